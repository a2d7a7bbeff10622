"""Values of options: clusters, objectives, inverse questions, parts to offload."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, get_args

from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.fields import names_in

ClusterLike = str | Path | Cluster
Objective = Literal["time", "cost", "memory", "energy"]
OBJECTIVES: Final[tuple[Objective, ...]] = get_args(Objective)
FINDS: Final = names_in("""
    fewest-gpus cheapest-cluster largest-micro-batch longest-sequence largest-model most-tokens
""")
# recomputed layers of a search: a number for each stage, one for all stages, or as they are given
Recomputed = Literal["by_stage", "one_number", "given"]
PARTS: Final = ("optimizer", "activations", "weights")  # that can be offloaded
ALLOWED: Final = ("offload", *(f"offload={part}" for part in PARTS))  # by --allow
