"""Memory and time of inference."""
