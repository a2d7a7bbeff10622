"""Explanations: why this plan, why not another one, what would change the choice."""
