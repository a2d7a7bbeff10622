"""Models: every tensor of a transformer, LoRA, freezing, presets."""
