"""Runs a plan with torch.distributed."""
