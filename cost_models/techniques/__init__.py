"""Techniques that are compared and not planned: grids of tensor parallelism, stale weights."""
