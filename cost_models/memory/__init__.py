"""Bytes of weights, gradients, optimizer states and buffers, and the peak."""
