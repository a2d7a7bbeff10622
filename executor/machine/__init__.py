"""Measurement of this machine for ``calibrate``."""
