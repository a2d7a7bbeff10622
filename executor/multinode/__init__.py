"""Runs on several machines: rendezvous and restart."""
