"""Traces of any ``nn.Module`` on fake tensors, and its data-parallel training."""
