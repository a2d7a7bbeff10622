"""Faults at random: in runs, in files that are read, and in the code."""
