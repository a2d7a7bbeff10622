"""Words that options of a search may be: objectives, inverse questions, parts to offload."""

from __future__ import annotations

from typing import Final, Literal, get_args

Objective = Literal["time", "cost", "memory", "energy"]
OBJECTIVES: Final[tuple[Objective, ...]] = get_args(Objective)
FINDS: Final = (  # inverse questions
    "fewest-gpus",
    "cheapest-cluster",
    "largest-micro-batch",
    "longest-sequence",
    "largest-model",
    "most-tokens",
)
PARTS: Final = ("optimizer", "activations", "weights")  # that can be offloaded
ALLOWED: Final = ("offload", *(f"offload={part}" for part in PARTS))  # by --allow
