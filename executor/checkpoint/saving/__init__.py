"""Writing of checkpoints during training."""
