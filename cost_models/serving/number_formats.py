"""Storage formats of weights and caches in serving engines: bytes of an element and its scales.

Units     bytes; ``group``: elements of a row that share a scale (0: the whole row).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from msgspec import Struct

from cost_models.model.spec import Weight

ServingPrecision = Literal["bf16", "fp16", "fp32"]
WeightPrecision = Literal["bf16", "fp16", "fp32", "fp8", "int8", "int4", "mxfp4"]
KVPrecision = Literal["bf16", "fp16", "fp32", "fp8", "int8", "int4"]
SERVING_PRECISIONS: Final[tuple[str, ...]] = get_args(ServingPrecision)
WEIGHT_PRECISIONS: Final[tuple[str, ...]] = get_args(WeightPrecision)
KV_PRECISIONS: Final[tuple[str, ...]] = get_args(KVPrecision)
# parts whose matrices are quantised; embeddings, output projection, router and norms are not (the
# published AWQ, GPTQ and FP8 checkpoints of Llama and Qwen, ``ignore: [lm_head]``)
QUANTISED_PARTS: Final = ("attention", "mlp", "experts", "shared_experts")


class WeightFormat(Struct, frozen=True):
    """Bytes of one stored element of a matrix, and of a scale (and zero point)."""

    name: str
    element: float
    scale: float = 0.0
    group: int = 0
    experts_only: bool = False

    @property
    def is_quantised(self) -> bool:
        """Whether the format applies to matrices only; other tensors stay in 16 bits."""
        return self.scale > 0.0

    def holds(self, weight: Weight) -> bool:
        """Whether a tensor is stored in this format."""
        if not self.is_quantised:
            return True
        matrix = weight.is_matrix and weight.part in QUANTISED_PARTS
        return matrix and (weight.is_routed_expert or not self.experts_only)


class CacheFormat(Struct, frozen=True):
    """Bytes of one cached element, and of the scale of one head's vector."""

    name: str
    element: float
    scale: float = 0.0


# int8, fp8: one fp32 scale for each output (llm-compressor: W8A8, FP8_DYNAMIC; a 70B model takes
# 67.7229 GiB so, vllm-project/vllm/pull/12569).
# int4: groups of 128 with an fp16 scale and a 4-bit zero point (GPTQ, arXiv:2210.17323; AWQ,
# arXiv:2306.00978: group_size 128).
# mxfp4: experts alone, groups of 32 with an 8-bit scale (OCP MX 1.0; gpt-oss, arXiv:2508.10925,
# sec. 2.1: 4.25 bits a parameter).
WEIGHT_FORMATS: Final[Mapping[str, WeightFormat]] = {
    "bf16": WeightFormat("bf16", 2.0),
    "fp16": WeightFormat("fp16", 2.0),
    "fp32": WeightFormat("fp32", 4.0),
    "fp8": WeightFormat("fp8", 1.0, 4.0),
    "int8": WeightFormat("int8", 1.0, 4.0),
    "int4": WeightFormat("int4", 0.5, 2.5, 128),
    "mxfp4": WeightFormat("mxfp4", 0.5, 1.0, 32, experts_only=True),
}
# fp8: one scale a tensor (vLLM: kv_cache_dtype fp8). int8, int4: of each token, head, key and value
# a scale and a zero point of 16 bits each (LMDeploy: quant_policy 8 and 4); vLLM's
# int8_per_token_head has an fp32 scale instead, which is as large.
CACHE_FORMATS: Final[Mapping[str, CacheFormat]] = {
    "bf16": CacheFormat("bf16", 2.0),
    "fp16": CacheFormat("fp16", 2.0),
    "fp32": CacheFormat("fp32", 4.0),
    "fp8": CacheFormat("fp8", 1.0),
    "int8": CacheFormat("int8", 1.0, 4.0),
    "int4": CacheFormat("int4", 0.5, 4.0),
}
_METHODS: Final = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4"}


def stored_format(config: Mapping[str, Any]) -> str | None:
    """Return the weight format that a config.json gives; None for 16 or 32 bits.

    Reads ``quantization_config`` of fp8, mxfp4, gptq and awq; ignores others.

    >>> stored_format({"quantization_config": {"quant_method": "awq", "bits": 4}})
    'int4'
    """
    given = config.get("quantization_config")
    if not isinstance(given, Mapping):
        return None
    method = str(given.get("quant_method", ""))
    if method in ("gptq", "awq"):
        return {4: "int4", 8: "int8"}.get(given.get("bits", 4))
    return _METHODS.get(method)
