"""``compare-techniques``: every technique of the literature for one model on one cluster."""
