"""The families that the executor trains: one description each, one forward pass for them all.

The modules of transformers keep the parameters, the norms, the activations and their names; only
the order of the calls is ours, because their forward passes take heads and positions from shapes
that sequence parallelism changes.
"""

from __future__ import annotations

from typing import Final

from executor.families.description import Family
from executor.families.gpt_like import GPT2
from executor.families.llama_like import LLAMA, QWEN3

FAMILIES: Final[dict[str, Family]] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": QWEN3,
}
