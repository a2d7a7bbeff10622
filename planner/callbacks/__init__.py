"""Callbacks for other trainers, which check a run before its first step and record it.

One module a library, which it imports when its callback is used.
"""
