"""Models: every tensor of a transformer, LoRA and frozen parts, presets, parameter counts."""
