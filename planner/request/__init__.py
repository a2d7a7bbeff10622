"""Parsing of a user's request, and rendering of a request as a command."""
