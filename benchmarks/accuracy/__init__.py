"""How far predictions of published and unseen runs are off: ``python -m benchmarks.accuracy``."""
