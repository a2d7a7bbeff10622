"""Answers of ``fit`` and ``plan``, and their text and drawings."""
