"""Recorded runs: comparison, calibration, replanning."""
