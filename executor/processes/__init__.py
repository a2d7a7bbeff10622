"""Processes of one machine: fork, signals, messages."""
