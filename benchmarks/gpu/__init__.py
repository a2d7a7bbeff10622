"""Measurements of one GPU and their predictions: ``python -m benchmarks.gpu``."""
