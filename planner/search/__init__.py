"""Enumeration, pricing, pruning and ranking of plans."""
