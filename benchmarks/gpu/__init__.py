"""Measurements of one GPU beside predictions: ``python -m benchmarks.gpu``."""
