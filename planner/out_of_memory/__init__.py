"""Explanation of torch's out-of-memory errors."""
