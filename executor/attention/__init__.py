"""Attention cores: plain, blockwise, ring, Ulysses."""
