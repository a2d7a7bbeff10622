"""Measurements of what a step is made of, and of whole steps on this machine."""
