"""The training step, the loop, the optimizer, evaluation."""
