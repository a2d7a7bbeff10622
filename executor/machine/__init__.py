"""Measurements of this machine for ``calibrate``."""
