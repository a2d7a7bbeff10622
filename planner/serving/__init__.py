"""``fit --inference``: whether and how fast a cluster serves a model."""
