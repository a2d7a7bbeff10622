"""Accelerators, nodes and links, and the bandwidth that a group of ranks has."""
