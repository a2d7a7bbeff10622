"""The device mesh, and one file for each kind of parallelism."""
