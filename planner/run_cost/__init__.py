"""Cost of a whole training run: days, dollars, joules, failures."""
