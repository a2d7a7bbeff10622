"""Parsing of requests, and shell commands that reproduce them."""
