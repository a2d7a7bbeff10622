"""``fit`` and ``plan`` of a traced module."""
