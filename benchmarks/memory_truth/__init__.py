"""Predicted memory against the memory of the executor's own steps, at any size."""
