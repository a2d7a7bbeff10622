"""Accelerators, nodes and links, and the bandwidth of groups of ranks."""
