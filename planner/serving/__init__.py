"""``fit --inference``."""
