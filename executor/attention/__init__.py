"""The attention core: blockwise, ring, Ulysses."""
