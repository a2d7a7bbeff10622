"""Start and supervision of the ranks of one machine."""
