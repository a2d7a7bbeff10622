"""Parallelism: the device mesh, and one module for each kind of parallelism."""
