"""Verification of plans against a single process, and rehearsals on fake tensors."""
