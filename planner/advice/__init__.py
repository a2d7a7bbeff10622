"""Changes with which a plan fits."""
