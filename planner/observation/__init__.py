"""Observed runs of other trainers: rows of RUNS.csv from live runs and from logs."""
