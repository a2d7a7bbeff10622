"""Changes that make a plan fit."""
