"""FLOP and seconds of computation on one accelerator."""
