"""The Python functions ``fit`` and ``plan``."""
