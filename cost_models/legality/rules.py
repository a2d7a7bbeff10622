"""The rules of legal plans, in order, each with a code, a column of broken rows and an error text.

A rule is a pure function that returns a boolean column (true: broken). ``legality_codes`` returns
the first rule that a row breaks; only functions for a single plan turn a code into an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cost_models.arrays import among, holds
from cost_models.columnar.columns import expand
from cost_models.legality.capabilities import beyond_trainer, beyond_trainer_in_words
from cost_models.legality.fp8_rules import FP8_RULES
from cost_models.legality.frozen_rules import FROZEN_RULES
from cost_models.legality.recompute_rules import RECOMPUTE_RULES
from cost_models.legality.rule import (
    Rule,
    adapts_experts,
    any_of,
    divisors_text,
    expert_sizes,
    ffn_sizes,
    freezes_autocast,
    indivisible,
    key_heads,
    multiplies_in_fp32,
    num_experts,
    query_heads,
    too_long,
)
from cost_models.legality.sharing_rules import SHARING_RULES
from cost_models.partition.schedules import (
    LOOPED,
    LOOPED_CODES,
    SPLIT,
    SPLIT_CODES,
    V_CODES,
    V_SHAPED,
)
from cost_models.plan.factored import factored, find_projections
from cost_models.plan.plan import ENDS, NVME, SCHEDULES, Plan, PlanTable
from cost_models.plan.workload import PROJECTED
from cost_models.scenario import Scenario
from hardware_profiles.errors import InputError

Column = NDArray[np.bool_]
MANY: Final = 2_000  # plans from which on equal rows are evaluated once
# fewest micro-batches by schedule: torch refuses fewer (1f1b, dualpipev), or the
# order has no steady part (zero bubbles)
FEWEST: Final[dict[str, Callable[[Any], Any]]] = {
    "1f1b": lambda t: t.pipeline_parallel,
    "zero_bubble": lambda t: t.pipeline_parallel,
    "zbv": lambda t: 2 * t.pipeline_parallel - 1,
    "dualpipev": lambda t: 2 * t.pipeline_parallel,
}


ENDS_ALONE: Final = "0 in --layers: embedding or head alone, such as --layers 0,1,1,0"
RULES: tuple[Rule, ...] = (
    Rule(
        "world_size",
        lambda s, t: t.world_size != s.world_size,
        lambda s, p: (
            f"data_parallel {p.data_parallel} x "
            + (f"context_parallel {p.context_parallel} x " if p.context_parallel > 1 else "")
            + f"tensor_parallel {p.tensor_parallel} x pipeline_parallel {p.pipeline_parallel} = "
            f"{p.world_size}, but there are {s.world_size} ranks"
        ),
    ),
    Rule(
        "global_batch_size",
        lambda s, t: (
            t.micro_batch_size * t.num_microbatches * t.data_parallel
            != s.workload.global_batch_size
        ),
        lambda s, p: (
            f"micro_batch_size {p.micro_batch_size} x num_microbatches {p.num_microbatches} x "
            f"data_parallel {p.data_parallel} = {p.global_batch_size}, but global_batch_size is "
            f"{s.workload.global_batch_size}"
        ),
    ),
    Rule(
        "num_heads",
        lambda s, t: indivisible(query_heads(s.model), t.tensor_parallel),
        lambda s, p: (
            f"tensor_parallel = {p.tensor_parallel} does not divide num_heads = "
            f"{min(query_heads(s.model))}; legal values: {divisors_text(query_heads(s.model))}"
        ),
    ),
    Rule(
        "num_kv_heads",
        lambda s, t: indivisible(key_heads(s.model), t.tensor_parallel),
        lambda s, p: (
            f"tensor_parallel = {p.tensor_parallel} does not divide num_kv_heads = "
            f"{min(key_heads(s.model))}; legal values: {divisors_text(key_heads(s.model))}"
        ),
    ),
    Rule(
        "ffn_hidden_size",
        lambda s, t: indivisible(ffn_sizes(s.model), t.tensor_parallel),
        lambda s, p: (
            f"tensor_parallel = {p.tensor_parallel} does not divide ffn_hidden_size = "
            f"{min(ffn_sizes(s.model))}; legal values: {divisors_text(ffn_sizes(s.model))}"
        ),
    ),
    Rule(
        "expert_ffn_hidden_size",
        lambda s, t: (
            t.expert_tensor_parallel & indivisible(expert_sizes(s.model), t.tensor_parallel)
        ),
        lambda s, p: (
            f"tensor_parallel = {p.tensor_parallel} does not divide the experts' ffn_hidden_size = "
            f"{min(expert_sizes(s.model))}; legal values: "
            f"{divisors_text(expert_sizes(s.model))}, or whole experts on every tensor-parallel "
            "rank (expert_tensor_parallel off)"
        ),
    ),
    Rule(
        "sequence_parallel_alone",
        lambda s, t: t.sequence_parallel & (t.tensor_parallel == 1),
        lambda s, p: (
            "sequence_parallel splits the sequence inside the tensor-parallel group: it "
            "needs tensor_parallel >= 2"
        ),
    ),
    Rule(
        "sequence_length",
        lambda s, t: (
            t.sequence_parallel
            & any_of(
                length % (t.tensor_parallel * t.context_parallel) != 0
                for length in (s.workload.seq_len, s.workload.target_tokens)
            )
        ),
        lambda s, p: (
            "sequence_parallel: "
            + (f"context_parallel {p.context_parallel} x " if p.context_parallel > 1 else "")
            + f"tensor_parallel = {p.context_parallel * p.tensor_parallel} does not divide "
            + (
                f"seq_len = {s.workload.seq_len}"
                if s.workload.seq_len % (p.tensor_parallel * p.context_parallel)
                else f"target_seq_len = {s.workload.target_seq_len}"
            )
        ),
    ),
    Rule(
        "num_layers",
        # pinned stages may hold the embedding or the head alone
        lambda s, t: (
            (t.pipeline_parallel * t.virtual_stages > s.model.num_layers)
            & (t.pipeline_parallel * t.virtual_stages != len(s.layer_ranges or ()))
        ),
        lambda s, p: (
            f"pipeline_parallel {p.pipeline_parallel} x virtual_stages {p.virtual_stages} = "
            f"{p.num_stages} stages, but the model has {s.model.num_layers} layers"
            + f" ({ENDS_ALONE})"
            * (p.num_stages <= s.model.num_layers + ENDS)
        ),
    ),
    Rule(
        "stage_layers",
        lambda s, t: (
            t.pipeline_parallel * t.virtual_stages != len(s.layer_ranges)
            if s.layer_ranges is not None
            else np.zeros(len(t), dtype=bool)
        ),
        lambda s, p: (
            f"layers are given for {len(s.layer_ranges or ())} stages, but pipeline_parallel "
            f"{p.pipeline_parallel} x virtual_stages {p.virtual_stages} = {p.num_stages} stages"
        ),
    ),
    *RECOMPUTE_RULES,
    Rule(
        "virtual_stages",
        lambda s, t: np.select(
            [among(t.pipeline_schedule, V_CODES), among(t.pipeline_schedule, LOOPED_CODES)],
            [
                (t.virtual_stages != 2) | (t.pipeline_parallel < 2),
                (t.virtual_stages < 2) | (t.pipeline_parallel < 2),
            ],
            t.virtual_stages > 1,
        ),
        lambda s, p: (
            f"pipeline_schedule {p.pipeline_schedule} with virtual_stages = {p.virtual_stages} and "
            f"pipeline_parallel = {p.pipeline_parallel}: {' and '.join(LOOPED)} need at least 2 of "
            f"both, {' and '.join(V_SHAPED)} exactly 2 virtual stages on at least 2 ranks, the "
            "other schedules exactly one virtual stage"
        ),
    ),
    Rule(
        "schedule_microbatches",
        lambda s, t: (t.pipeline_parallel > 1) & (t.num_microbatches < fewest_microbatches(s, t)),
        lambda s, p: (
            f"{p.pipeline_schedule} needs num_microbatches >= "
            f"{_fewest(s, p.pipeline_schedule, p)} "
            f"with pipeline_parallel = {p.pipeline_parallel}, got {p.num_microbatches}"
        ),
    ),
    Rule(
        "interleaved_microbatches",
        lambda s, t: (
            among(t.pipeline_schedule, LOOPED_CODES)
            & (t.num_microbatches % t.pipeline_parallel != 0)
        ),
        lambda s, p: (
            f"{p.pipeline_schedule} needs num_microbatches to be a multiple of "
            f"pipeline_parallel, got {p.num_microbatches} and {p.pipeline_parallel}"
        ),
    ),
    Rule(
        "pipeline_schedule",
        lambda s, t: (
            among(t.pipeline_schedule, SPLIT_CODES) & (not s.software.pipeline.splits_backward)
        ),
        lambda s, p: (
            f"pipeline_schedule = {p.pipeline_schedule}: this trainer does not compute weight "
            "gradients separately from input gradients (allowed: "
            f"{', '.join(name for name in SCHEDULES if name not in SPLIT)})"
        ),
    ),
    Rule(
        "zero_alone",
        lambda s, t: (
            (t.zero_stage > 0)
            & (t.data_parallel * t.context_parallel == 1)
            & np.logical_not(t.offloads_optimizer)  # ZeRO-Offload needs no second rank
        ),
        lambda s, p: (
            f"zero_stage = {p.zero_stage} shards over data- and context-parallel ranks: it needs "
            "data_parallel >= 2 or context_parallel >= 2, or offload optimizer or weights"
        ),
    ),
    Rule(
        "zero_stage",
        lambda s, t: t.zero_stage > int(s.software.sharding.largest_zero_stage),
        lambda s, p: (
            f"zero_stage = {p.zero_stage}: this trainer shards up to stage "
            f"{int(s.software.sharding.largest_zero_stage)}"
        ),
    ),
    Rule(
        "projected_gradients",
        lambda s, t: (
            ((t.zero_stage > 0) | t.offloads_optimizer) & (s.workload.optimizer in PROJECTED)
        ),
        lambda s, p: (
            f"optimizer = {s.workload.optimizer} projects gradients of whole matrices on the "
            f"accelerator: it needs zero_stage 0 without offload of the optimizer (got "
            f"{p.zero_stage} and {p.offload})"
        ),
    ),
    Rule(
        "offload_weights",
        lambda s, t: t.offloads_weights & (t.zero_stage < 3),
        lambda s, p: (
            f"offload {p.offload} keeps shards of the weights off the accelerator: it needs "
            f"zero_stage 3 (got {p.zero_stage})"
        ),
    ),
    Rule(
        "offload_device",
        lambda s, t: (t.offload_device == NVME) & np.logical_not(t.offloads_optimizer),
        lambda s, p: (
            f"offload_device = {p.offload_device} is where offloaded tensors go: it needs "
            f"offload optimizer or weights (got {p.offload})"
        ),
    ),
    Rule(
        "zero_plus_plus",
        lambda s, t: (
            ((t.secondary_ranks > 1) | t.quantised_weights | t.quantised_gradients)
            & (t.zero_stage < 3)
        ),
        lambda s, p: (
            f"secondary_ranks {p.secondary_ranks}, quantised_weights and quantised_gradients are "
            f"parts of ZeRO++: they need zero_stage 3 (got {p.zero_stage})"
        ),
    ),
    Rule(
        "secondary_ranks",
        lambda s, t: t.shard_ranks % t.secondary_ranks != 0,
        lambda s, p: (
            f"secondary_ranks = {p.secondary_ranks} does not divide the {p.shard_ranks} ranks that "
            f"ZeRO shards over; legal values: {divisors_text([p.shard_ranks])}"
        ),
    ),
    *SHARING_RULES,
    Rule(
        "without_experts",
        lambda s, t: (
            (t.expert_parallel > 1) | np.logical_not(t.expert_tensor_parallel)
            if not num_experts(s.model)
            else np.zeros(len(t), dtype=bool)
        ),
        lambda s, p: (
            (
                f"expert_parallel = {p.expert_parallel}"
                if p.expert_parallel > 1
                else "expert_tensor_parallel off"
            )
            + ": the model has no experts"
        ),
    ),
    Rule(
        "expert_parallel",
        lambda s, t: indivisible(num_experts(s.model), t.expert_parallel),
        lambda s, p: (
            f"expert_parallel = {p.expert_parallel} does not divide num_experts = "
            f"{min(num_experts(s.model))}; legal values: {divisors_text(num_experts(s.model))}"
        ),
    ),
    Rule(
        "expert_ranks",
        lambda s, t: t.expert_ranks % t.expert_parallel != 0,
        lambda s, p: (
            f"expert_parallel = {p.expert_parallel} does not divide the {p.expert_ranks} ranks "
            "that can share experts: data_parallel / dp_replicate x context_parallel"
            + ("" if p.expert_tensor_parallel else " x tensor_parallel")
            + f"; legal values: {divisors_text([p.expert_ranks])}"
        ),
    ),
    Rule(
        "expert_tokens",
        lambda s, t: (
            np.logical_not(t.expert_tensor_parallel)
            & np.logical_not(t.sequence_parallel)
            & (s.workload.seq_len % (t.tensor_parallel * t.context_parallel) != 0)
        ),
        lambda s, p: (
            f"expert_tensor_parallel off: {p.tensor_parallel} tensor-parallel ranks share the "
            f"tokens of a sequence, but do not divide seq_len = {s.workload.seq_len}"
        ),
    ),
    Rule(
        "adapter_experts",
        lambda s, t: np.full(len(t), adapts_experts(s)),
        lambda s, p: (
            f"adapter {s.workload.adapter} on all matrices: those of routed experts are one "
            "tensor, which takes no adapter (--lora-targets must be attention)"
        ),
    ),
    Rule(
        "autocast",
        lambda s, t: np.full(len(t), freezes_autocast(s)),
        lambda s, p: (
            f"{'freeze' if s.workload.freeze else 'adapter'} = "
            f"{s.workload.freeze or s.workload.adapter}: autocast over fp32 weights trains all of "
            "them (a frozen base is in 16 bits: --software hf-trainer; in fp32, too: +fp32-frozen)"
        ),
    ),
    Rule(
        "cast",
        lambda s, t: multiplies_in_fp32(s.workload, s.software, t),
        lambda s, p: (
            f"precision {s.workload.precision}: this trainer casts fp32 weights only where it "
            f"shards them, and data_parallel x context_parallel is 1 with {p.world_size} ranks "
            "(must be precision fp32, weights in 16 bits (--no-master-weights), or a product above "
            "1)"
        ),
    ),
    *FROZEN_RULES,
    *FP8_RULES,
    Rule(
        "positions",
        lambda s, t: np.full(len(t), too_long(s)),
        lambda s, p: (
            f"seq_len = {s.workload.seq_len} is longer than the model's "
            f"{s.model.max_seq_len} learned positions"
        ),
    ),
    Rule("trainer", beyond_trainer, beyond_trainer_in_words),
)
CODES = ("legal", *(rule.code for rule in RULES))
EVERY_RULE: Final = range(1, len(CODES))


def fewest_microbatches(scenario: Scenario, table: PlanTable) -> Any:
    """Return the smallest number of micro-batches of each plan's schedule."""
    schedules = [table.pipeline_schedule == SCHEDULES.index(name) for name in FEWEST]
    return np.select(schedules, [_fewest(scenario, name, table) for name in FEWEST], 1)


def _fewest(scenario: Scenario, schedule: str, plans: Any) -> Any:
    """Return the smallest number of micro-batches of one schedule; 1F1B: by its trainer."""
    fewest = FEWEST[schedule](plans)
    if schedule != "1f1b":
        return fewest
    return {"any": 1, "ranks - 1": fewest - 1, "ranks": fewest}[
        scenario.software.pipeline.fewest_microbatches
    ]


def broken_rules(
    scenario: Scenario, table: PlanTable, positions: Sequence[int] = EVERY_RULE
) -> dict[int, Any]:
    """Return the rules that some row breaks, by their position in CODES, the last one first.

    The value of each marks the broken rows: a column of the table's length, or one flag for all.
    ``positions``: of the rules that rows may break.
    """
    found = {}
    for position in sorted(positions, reverse=True):
        broken = RULES[position - 1].broken(scenario, table)
        if holds(broken):
            found[position] = broken
    return found


def legality_codes(scenario: Scenario, table: PlanTable) -> NDArray[np.int16]:
    """Return, row by row, 0 for a legal plan or the position in CODES of the first broken rule."""
    codes = np.zeros(len(table), dtype=np.int16)
    few, frame = factored(table) if len(table) >= MANY else (table.plain(), None)
    if frame is not None:
        find_projections(few, frame)
    for position, broken in broken_rules(scenario, few).items():
        codes[expand(broken, len(table))] = position
    if frame is not None:
        frame.release()
    return codes


def require_legal(scenario: Scenario, plan: Plan, where: object = "") -> None:
    """Raise an InputError with the rule's text for a plan that is not legal.

    ``where``: the file of the plan.
    """
    code = int(legality_codes(scenario, PlanTable.from_plans([plan]))[0])
    if code:
        words = RULES[code - 1].words(scenario, plan)
        raise InputError(f"{where}: {words}" if where else words)
