"""The part of a model and of a step that one rank owns."""
