"""Rules of context parallelism and of replicated shards (HSDP)."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from cost_models.legality.rule import Rule, any_of, divisors_text, key_heads, query_heads
from cost_models.model.spec import ModelSpec
from cost_models.plan.plan import CONTEXT_METHODS, Plan, PlanTable

ULYSSES: Final = CONTEXT_METHODS.index("ulysses")


def _is_decoder(model: ModelSpec) -> bool:
    return all(kind.attention.causal and kind.cross_attention is None for kind in model.kinds)


def _by_heads(table: PlanTable) -> Any:
    return (table.context_parallel > 1) & (table.context_parallel_method == ULYSSES)


def _chunks(plan: Plan | PlanTable) -> Any:
    """Chunks of a sequence on every rank: two where the work is balanced (zigzag)."""
    if isinstance(plan, Plan):
        return 1 if plan.context_parallel_method == "ulysses" else 2
    return np.where(plan.context_parallel_method == ULYSSES, 1, 2)


SHARING_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "context_attention",
        lambda s, t: (t.context_parallel > 1) & (not _is_decoder(s.model)),
        lambda s, p: (
            f"context_parallel = {p.context_parallel} supports causal attention only: "
            f"{s.model.name} has bidirectional attention (must be 1)"
        ),
    ),
    Rule(
        "context_linear_attention",
        lambda s, t: (t.context_parallel > 1) & s.model.has_linear_attention,
        lambda s, p: (
            f"context_parallel = {p.context_parallel}: the linear attention of {s.model.name} "
            "carries a state through the whole sequence, which is not divided among ranks (must "
            "be 1)"
        ),
    ),
    Rule(
        "context_length",
        lambda s, t: (
            (t.context_parallel > 1) & (s.workload.seq_len % (_chunks(t) * t.context_parallel) != 0)
        ),
        lambda s, p: (
            f"context_parallel = {p.context_parallel}: {p.context_parallel_method} cuts a sequence "
            f"into {p.context_parallel * _chunks(p)} equal chunks, a number that does not divide "
            f"seq_len = {s.workload.seq_len}"
        ),
    ),
    Rule(
        "context_heads",
        lambda s, t: (
            _by_heads(t)
            & any_of(
                [n % (t.tensor_parallel * t.context_parallel) != 0 for n in query_heads(s.model)]
            )
        ),
        lambda s, p: (
            f"ulysses splits heads: tensor_parallel {p.tensor_parallel} x context_parallel "
            f"{p.context_parallel} does not divide num_heads = {min(query_heads(s.model))}; legal "
            f"products: {divisors_text(query_heads(s.model))}"
        ),
    ),
    Rule(
        "context_kv_heads",
        lambda s, t: (
            _by_heads(t)
            & any_of(
                [
                    ((n // t.tensor_parallel) % t.context_parallel != 0)
                    & (t.context_parallel % np.maximum(1, n // t.tensor_parallel) != 0)
                    for n in key_heads(s.model)
                ]
            )
        ),
        lambda s, p: (
            "ulysses splits key heads, or repeats them so that every rank has one: "
            f"context_parallel = {p.context_parallel} must divide num_kv_heads / tensor_parallel = "
            f"{min(key_heads(s.model)) // p.tensor_parallel}, or be a multiple of it"
        ),
    ),
    Rule(
        "context_dropout",
        lambda s, t: (
            (t.context_parallel > 1)
            & np.logical_not(_by_heads(t))
            & (s.model.attention_dropout > 0)
        ),
        lambda s, p: (
            f"context_parallel_method = {p.context_parallel_method} does not support attention "
            f"dropout; {s.model.name} has {s.model.attention_dropout:g}: choose ulysses, or set it "
            "to 0 in the config"
        ),
    ),
    Rule(
        "dp_replicate",
        lambda s, t: t.data_parallel % t.dp_replicate != 0,
        lambda s, p: (
            f"dp_replicate = {p.dp_replicate} does not divide data_parallel = {p.data_parallel}; "
            f"legal values: {divisors_text([p.data_parallel])}"
        ),
    ),
    Rule(
        "dp_replicate_alone",
        lambda s, t: (t.dp_replicate > 1) & ((t.zero_stage == 0) | (t.shard_ranks == 1)),
        lambda s, p: (
            f"dp_replicate = {p.dp_replicate} replicates shards: it needs zero_stage >= 1 "
            f"(got {p.zero_stage}) and data_parallel / dp_replicate x context_parallel >= 2 "
            f"(got {p.shard_ranks})"
        ),
    ),
)
