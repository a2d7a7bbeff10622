"""Memory and time of a traced ``nn.Module``."""
