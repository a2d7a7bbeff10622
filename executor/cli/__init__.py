"""The command line of ``python -m executor``."""
