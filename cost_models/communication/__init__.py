"""Communication: bytes and seconds of every collective."""
