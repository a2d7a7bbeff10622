"""Partitions of a model over ranks: stages, schedules, tensor shards, recomputed layers."""
