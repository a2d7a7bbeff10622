"""Bytes and seconds of collectives."""
