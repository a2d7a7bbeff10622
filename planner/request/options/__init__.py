"""Options of requests: their classes, values and proposals, and functions that take them."""
