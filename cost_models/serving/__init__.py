"""Serving: memory and time of inference."""
