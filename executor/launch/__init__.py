"""Start and supervision of the ranks on one machine."""
