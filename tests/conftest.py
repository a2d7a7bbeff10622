"""Settings that every test shares."""

from __future__ import annotations

import os

from hypothesis import settings

# Tests fork processes after torch was used: a pool of OpenMP threads does not survive a fork, so
# this process must never make one. Set before anything imports torch.
os.environ["OMP_NUM_THREADS"] = "1"

settings.register_profile("shardplan", deadline=None, print_blob=True)
settings.load_profile("shardplan")
