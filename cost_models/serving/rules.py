"""Legality of serving layouts: rules over columns, each with its error text.

Unlike in training, tensor_parallel may exceed the number of key heads: several ranks then have the
same head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cost_models.legality.rule import attentions, divisors_text, query_heads
from cost_models.model.spec import ModelSpec
from cost_models.serving.memory import ServingPoint, ServingWorkload


@dataclass(frozen=True, slots=True)
class ServingQuestion:
    """Model, workload and cluster size that the rules check a point against."""

    model: ModelSpec
    workload: ServingWorkload
    num_gpus: int
    num_stages: int | None = None  # stages for which the user gave layers


@dataclass(frozen=True, slots=True)
class ServingRule:
    """A rule: its code, the rows that violate it, and the error text for one point."""

    code: str
    broken: Callable[[ServingQuestion, ServingPoint], Any]
    words: Callable[[ServingQuestion, Any], str]


def _indivisible(sizes: list[int], ranks: Any) -> Any:
    nowhere = np.zeros(np.shape(ranks), dtype=bool)
    return np.logical_or.reduce([nowhere, *(np.mod(size, ranks) != 0 for size in sizes)])


def _ordinary_key_heads(model: ModelSpec) -> list[int]:
    """Key heads of every attention except latent ones, whose cache is replicated."""
    return [a.num_kv_heads for a in attentions(model) if not a.kv_lora_rank]


def _uneven_heads(heads: int, ranks: Any) -> Any:
    return (np.mod(heads, ranks) != 0) & (np.mod(ranks, heads) != 0)


def _ffn_sizes(model: ModelSpec) -> list[int]:
    sizes = [k.feed_forward.shared_ffn_hidden_size for k in model.kinds]
    sizes += [k.feed_forward.ffn_hidden_size for k in model.kinds if not k.feed_forward.num_experts]
    return [size for size in sizes if size]


def _experts(model: ModelSpec) -> list[tuple[int, int]]:
    """Return the number of experts and the size of one, for every kind with experts."""
    return [
        (k.feed_forward.num_experts, k.feed_forward.ffn_hidden_size)
        for k in model.kinds
        if k.feed_forward.num_experts
    ]


def _too_long(q: ServingQuestion, context_len: Any) -> Any:
    longest = q.model.max_seq_len if q.model.max_seq_len_is_hard else None
    return np.less(context_len, 0) if longest is None else np.greater(context_len, longest)


SERVING_RULES: Final[tuple[ServingRule, ...]] = (
    ServingRule(
        "world_size",
        lambda q, p: (
            np.multiply(p.data_parallel, p.tensor_parallel) * p.pipeline_parallel != q.num_gpus
        ),
        lambda q, p: (
            f"data_parallel {p.data_parallel} x tensor_parallel {p.tensor_parallel} x "
            f"pipeline_parallel {p.pipeline_parallel} = "
            f"{p.data_parallel * p.tensor_parallel * p.pipeline_parallel}, but there are "
            f"{q.num_gpus} accelerators"
        ),
    ),
    ServingRule(
        "num_heads",
        lambda q, p: _indivisible(query_heads(q.model), p.tensor_parallel),
        lambda q, p: (
            f"tensor_parallel = {p.tensor_parallel} does not divide num_heads = "
            f"{min(query_heads(q.model))}; legal values: {divisors_text(query_heads(q.model))}"
        ),
    ),
    ServingRule(
        "num_kv_heads",
        lambda q, p: np.logical_or.reduce(
            [
                np.zeros(np.shape(p.tensor_parallel), dtype=bool),
                *(_uneven_heads(n, p.tensor_parallel) for n in _ordinary_key_heads(q.model)),
            ]
        ),
        lambda q, p: (
            f"tensor_parallel = {p.tensor_parallel} neither divides num_kv_heads = "
            f"{min(_ordinary_key_heads(q.model))} nor is a multiple of it"
        ),
    ),
    ServingRule(
        "ffn_hidden_size",
        lambda q, p: _indivisible(_ffn_sizes(q.model), p.tensor_parallel),
        lambda q, p: (
            f"tensor_parallel = {p.tensor_parallel} does not divide ffn_hidden_size = "
            f"{min(_ffn_sizes(q.model))}; legal values: {divisors_text(_ffn_sizes(q.model))}"
        ),
    ),
    ServingRule(
        "without_experts",
        lambda q, p: np.greater(p.expert_parallel, 1) & (not _experts(q.model)),
        lambda q, p: (
            f"expert_parallel = {p.expert_parallel}: {q.model.name} has no experts (must be 1)"
        ),
    ),
    ServingRule(
        "expert_ffn_hidden_size",
        lambda q, p: (
            np.equal(p.expert_parallel, 1)
            & _indivisible([size for _, size in _experts(q.model)], p.tensor_parallel)
        ),
        lambda q, p: (
            f"tensor_parallel = {p.tensor_parallel} does not divide the experts' ffn_hidden_size = "
            f"{min(size for _, size in _experts(q.model))}; distribute whole experts instead "
            f"(expert_parallel = {p.tensor_parallel * p.data_parallel})"
        ),
    ),
    ServingRule(
        "expert_parallel",
        lambda q, p: _indivisible([count for count, _ in _experts(q.model)], p.expert_parallel),
        lambda q, p: (
            f"expert_parallel = {p.expert_parallel} does not divide num_experts = "
            f"{min(n for n, _ in _experts(q.model))}; legal values: "
            f"{divisors_text([n for n, _ in _experts(q.model)])}"
        ),
    ),
    ServingRule(
        "expert_ranks",
        lambda q, p: (
            np.mod(np.multiply(p.data_parallel, p.tensor_parallel), p.expert_parallel) != 0
        ),
        lambda q, p: (
            f"expert_parallel = {p.expert_parallel} does not divide data_parallel "
            f"{p.data_parallel} x tensor_parallel {p.tensor_parallel}"
        ),
    ),
    ServingRule(
        "num_layers",
        lambda q, p: np.greater(p.pipeline_parallel, q.model.num_layers),
        lambda q, p: (
            f"pipeline_parallel = {p.pipeline_parallel}, but the model has {q.model.num_layers} "
            "layers"
        ),
    ),
    ServingRule(
        "stage_layers",
        lambda q, p: np.not_equal(p.pipeline_parallel, q.num_stages or p.pipeline_parallel),
        lambda q, p: (
            f"layers are given for {q.num_stages} stages, but pipeline_parallel = "
            f"{p.pipeline_parallel}"
        ),
    ),
    ServingRule(
        "encoder_decoder_pipeline",
        lambda q, p: np.greater(p.pipeline_parallel, 1) & q.model.is_encoder_decoder,
        lambda q, p: (
            "an encoder-decoder cannot be split into pipeline stages: pipeline_parallel must be 1"
        ),
    ),
    ServingRule(
        "positions",
        lambda q, p: _too_long(q, p.context_len),
        lambda q, p: (
            f"context_len = {p.context_len}: {q.model.name} has {q.model.max_seq_len} learned "
            f"positions (must be 1 to {q.model.max_seq_len})"
        ),
    ),
)
SERVING_CODES: Final = ("legal", *(rule.code for rule in SERVING_RULES))


def serving_codes(question: ServingQuestion, point: ServingPoint) -> NDArray[np.int16]:
    """Return 0 for a legal point, or the position in SERVING_CODES of the first violated rule."""
    shape = np.broadcast(
        point.context_len,
        point.tensor_parallel,
        point.pipeline_parallel,
        point.data_parallel,
        point.expert_parallel,
    ).shape
    codes = np.zeros(shape, dtype=np.int16)
    for position, rule in reversed(list(enumerate(SERVING_RULES, start=1))):
        broken = np.broadcast_to(rule.broken(question, point), shape)
        codes = np.where(broken, position, codes).astype(np.int16)
    return codes


def why_not_served(question: ServingQuestion, point: ServingPoint) -> str | None:
    """Return why a point is illegal, in words; None if it is legal."""
    code = int(serving_codes(question, point))
    return SERVING_RULES[code - 1].words(question, point) if code else None
