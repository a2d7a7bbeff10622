"""Text formatting that all answers share."""
