"""What a step costs: pure functions over numpy arrays."""
