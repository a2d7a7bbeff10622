"""Logs of other trainers: step times, batch and memory, one module a trainer."""
