"""Bytes of activations: saved for the backward pass, and live at each point of a step."""
