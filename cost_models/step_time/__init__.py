"""Seconds of a training step: pipeline, overlap and all parts together."""
