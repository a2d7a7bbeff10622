"""Counters of collectives, FLOP, waits and live tensors."""
