"""Settings that every test shares."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("shardplan", deadline=None, print_blob=True)
settings.load_profile("shardplan")
