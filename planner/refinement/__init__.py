"""Refinement of the best plans: uneven stages, least recomputation, rank placement."""
