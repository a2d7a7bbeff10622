"""Model families that the executor trains: one description each, one forward pass for all.

The modules of transformers provide the parameters, the norms, the activations and their names; only
the order of the calls is this package's, because their forward passes derive heads and positions
from shapes that sequence parallelism changes.
"""

from __future__ import annotations

from typing import Final

from executor.model.families.bert import BERT
from executor.model.families.description import Family
from executor.model.families.gemma import GEMMA, GEMMA2, GEMMA3
from executor.model.families.gpt_like import GPT2, GPT_NEOX, OPT
from executor.model.families.llama_like import (
    COHERE,
    GLM4,
    GRANITE,
    LLAMA,
    OLMO2,
    PHI,
    PHI3,
    QWEN3,
    SMOLLM3,
    STARCODER2,
)
from executor.model.families.moe import DEEPSEEK, GPT_OSS, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from executor.model.families.qwen3_next import QWEN3_NEXT
from executor.model.families.t5 import T5

FAMILIES: Final[dict[str, Family]] = {
    "bert": BERT,
    "cohere": COHERE,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "deepseek_v3": DEEPSEEK,
    "glm4": GLM4,
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    "gpt_oss": GPT_OSS,
    "granite": GRANITE,
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": MIXTRAL,
    "olmo2": OLMO2,
    "olmoe": OLMOE,
    "opt": OPT,
    "phi": PHI,
    "phi3": PHI3,
    "qwen2": LLAMA,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
    "smollm3": SMOLLM3,
    "starcoder2": STARCODER2,
    "t5": T5,
}
