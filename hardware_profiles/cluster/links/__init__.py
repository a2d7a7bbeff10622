"""Links between accelerators, and the bandwidth and latency that a group of ranks sees."""
