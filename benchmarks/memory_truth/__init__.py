"""Predicted memory beside the memory of the executor's own steps, at any size."""
