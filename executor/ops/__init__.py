"""Autograd functions that need no process group."""
