"""Trainer and serving-engine profiles, NCCL constants and failure rates."""
