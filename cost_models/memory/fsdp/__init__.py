"""Gathered weights and unreduced gradients under FSDP: the points of a step, block by block."""
