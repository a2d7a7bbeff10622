"""Comparison of several clusters or precisions, and inverse queries."""
