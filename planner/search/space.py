"""Search space: all candidate plans for a number of accelerators, as one table."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from math import gcd
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec import Struct

from cost_models.model.spec import ModelSpec
from cost_models.partition.schedules import LOOPED, V_SHAPED, default_virtual_stages
from cost_models.plan.plan import (
    CONTEXT_METHODS,
    ENDS,
    OFFLOADS,
    SCHEDULES,
    SEARCHED_RECOMPUTE,
    WORDS,
    Plan,
    PlanTable,
)
from cost_models.plan.recompute import RECOMPUTE
from cost_models.plan.workload import Workload
from hardware_profiles.errors import InputError
from planner.request.divisors import divisors
from planner.search.plan_product import PlanProduct, ProductBlock

MAX_VIRTUAL_STAGES: Final = 12
MIN_TOKENS: Final = 4_096  # of a sequence on each rank; shorter pieces: ``short_product``
FEW: Final = 400_000  # candidates with shorter pieces that are searched like all others
MAX_CANDIDATES: Final = 20_000_000
SLAB: Final = 400_000  # candidates in one table


class DegreeGrid(NamedTuple):
    """Number of ranks along each axis."""

    tensor: int
    pipeline: int
    context: int
    data: int
    copies: int  # replicas of the shards


class Space(Struct, frozen=True, dict=True):
    """What a search chooses among.

    Degrees are the divisors of the number of accelerators. Numbers of virtual stages are 2 and
    those that divide the layers evenly, with or without embedding and head as two more layers
    (Llama 3: 126 layers and 2), up to MAX_VIRTUAL_STAGES; ``virtual_stages`` searches the others.
    Expert-parallel degrees divide the number of experts and the number of ranks. Columns without
    effect are not varied: sequence parallelism and whole experts without tensor parallelism,
    sharding and schedules over one rank.

    ZeRO shards over all data ranks, or over equal groups that are replicas of each other (HSDP).

    Context parallelism leaves at least MIN_TOKENS of a sequence on each rank, unless the degree is
    pinned or shorter pieces have at most FEW candidates (``short_product``).
    """

    model: ModelSpec
    workload: Workload
    num_gpus: int
    fixed: Mapping[str, Any]
    offloads: Sequence[str] = ("none",)  # allowed values of Plan.offload (``allowed_offloads``)
    every_cut: bool = False  # all numbers of virtual stages, up to a layer a stage
    given_stages: int = 0  # stages whose layers are given; two more than layers are legal

    @property
    def most_stages(self) -> int:
        """Largest number of stages."""
        return max(self.model.num_layers, self.given_stages)

    def plans(self) -> PlanTable:
        """Return all candidates, legal or not."""
        product = self.product()
        projection = product.factored()[1].project(0)
        return product.plans(projection, np.arange(projection.size)).plain()

    def product(self, *, with_short: bool = True) -> PlanProduct:
        """Return the candidates as a product.

        ``with_short``: those with shorter pieces, too, if they are at most FEW.
        """
        fixed = self.fixed
        blocks = list(self._blocks(self._wanted("context_parallel", self._contexts())))
        if with_short:
            blocks += self._few_short_blocks or ()
        if not blocks:  # contradictory pins: one candidate, for which legality reports the rule
            tensor, pipeline = fixed.get("tensor_parallel", 1), fixed.get("pipeline_parallel", 1)
            context = fixed.get("context_parallel", 1)
            data = fixed.get(
                "data_parallel", max(1, self.num_gpus // (tensor * pipeline * context))
            )
            grid = DegreeGrid(tensor, pipeline, context, data, fixed.get("dp_replicate", 1))
            blocks = [self._block(grid)]
        return PlanProduct.of(blocks, _pinned(fixed, blocks[0]))

    def short_product(self) -> PlanProduct | None:
        """Return the candidates with fewer than MIN_TOKENS on each rank, if ``product`` has none.

        Those are more than FEW.
        """
        if self._few_short_blocks is not None:
            return None
        blocks = list(self._short_blocks())
        return PlanProduct.of(blocks, _pinned(self.fixed, blocks[0]))

    @cached_property
    def _few_short_blocks(self) -> list[ProductBlock] | None:
        """Return the ``_short_blocks`` if they have at most FEW candidates."""
        blocks, size = [], 0
        for block in self._short_blocks():
            blocks.append(block)
            size += block.size
            if size > FEW:
                return None
        return blocks

    def _short_blocks(self) -> Iterator[ProductBlock]:
        """Return the products of grids that leave fewer tokens than MIN_TOKENS on each rank."""
        if "context_parallel" in self.fixed or not can_share_sequences(self.model):
            return iter(())
        most = max(self._contexts())
        contexts = [
            n for n in divisors(self.num_gpus) if n > most and self.workload.seq_len % n == 0
        ]
        return self._blocks(contexts)

    def _blocks(self, contexts: Sequence[int]) -> Iterator[ProductBlock]:
        """Yield the products of choices of every grid of ranks with some context degrees."""
        degrees = divisors(self.num_gpus)
        grids = itertools.product(  # plans of the same pipeline are adjacent: priced together
            self._wanted("pipeline_parallel", degrees),
            self._wanted("tensor_parallel", degrees),
            contexts,
        )
        for pipeline, tensor, context in grids:
            data, left = divmod(self.num_gpus, tensor * pipeline * context)
            wanted = self.fixed.get("data_parallel", data) == data
            if left or pipeline > self.most_stages or not wanted:
                continue
            for copies in self._wanted("dp_replicate", _replicas(data, context)):
                yield self._block(DegreeGrid(tensor, pipeline, context, data, copies))

    def _block(self, grid: DegreeGrid) -> ProductBlock:
        """Return the product of choices of one grid."""
        tensor, pipeline, context, data, copies = grid
        offload = self._wanted("offload", list(self.offloads))
        # a single rank shards nothing, but trainers offload as a part of ZeRO
        moves = any(Plan(offload=word).offloads_optimizer for word in offload)
        stages = [0, 1, 2, 3] if data * context > 1 or moves else [0]
        known = list(CONTEXT_METHODS) if context > 1 else [Plan().context_parallel_method]
        methods = self._wanted("context_parallel_method", known)
        shards = stages if copies == 1 else stages[1:] or stages  # one rank: never legal
        zero = self._wanted("zero_stage", shards)
        sequence = self._wanted("sequence_parallel", [False, True] if tensor > 1 else [False])
        recompute = self._wanted("recompute", list(SEARCHED_RECOMPUTE))
        schedules = self._schedules(pipeline)
        choices: dict[tuple[str, ...], list[Any]] = {
            ("context_parallel_method",): [CONTEXT_METHODS.index(method) for method in methods],
            ("expert_parallel", "expert_tensor_parallel"): _experts(
                self.model, tensor, data // copies * context, self.fixed
            ),
            ("pipeline_schedule", "virtual_stages"): [
                (SCHEDULES.index(s), v) for s, v in schedules
            ],
            ("micro_batch_size", "num_microbatches"): _batches(self.workload, data, self.fixed),
            ("zero_stage",): zero,
            ("sequence_parallel",): sequence,
            ("recompute",): [RECOMPUTE.index(word) for word in recompute],
            ("offload",): [OFFLOADS.index(word) for word in offload],
        }
        return ProductBlock(
            {
                "data_parallel": data,
                "dp_replicate": copies,
                "context_parallel": context,
                "tensor_parallel": tensor,
                "pipeline_parallel": pipeline,
            },
            choices,
        )

    def _schedules(self, pipeline: int) -> list[tuple[str, int]]:
        """Return pairs of pipeline_schedule and virtual_stages to try."""
        fixed = self.fixed
        schedule, virtual = fixed.get("pipeline_schedule"), fixed.get("virtual_stages")
        if pipeline == 1:
            pairs = [("1f1b", 1)]
        else:
            legal = virtual_stage_counts(self.most_stages, pipeline)
            every = self.every_cut or virtual
            searched = legal if every else enumerated_counts(self.model, pipeline)
            pairs = [(name, 1) for name in SCHEDULES if name not in (*LOOPED, *V_SHAPED)]
            pairs += [(name, v) for name in LOOPED for v in searched]
            pairs += [(name, 2) for name in V_SHAPED if 2 in legal]
        kept = [(s, v) for s, v in pairs if schedule in (None, s) and virtual in (None, v)]
        if kept:
            return kept
        # legality reports the broken rule
        return [(schedule or "1f1b", virtual or default_virtual_stages(schedule))]

    def _contexts(self) -> list[int]:
        """Return the context-parallel degrees to try: at least MIN_TOKENS on each rank."""
        most = self.workload.seq_len // MIN_TOKENS if can_share_sequences(self.model) else 1
        return [n for n in divisors(self.num_gpus) if n <= most] or [1]

    def _wanted(self, name: str, values: list[Any]) -> list[Any]:
        return _wanted(self.fixed, name, values)


def enumerate_plans(
    model: ModelSpec, workload: Workload, num_gpus: int, fixed: Mapping[str, Any], **options: Any
) -> PlanTable:
    """Return all candidates of ``Space``, legal or not; ``options``: its further fields."""
    return Space(model, workload, num_gpus, fixed, **options).plans()


def slabs(product: PlanProduct) -> Iterator[PlanProduct]:
    """Yield a product in parts of about SLAB candidates, if it is not too large."""
    total = int(product.num_plans.sum())
    if total > MAX_CANDIDATES:
        raise InputError(
            f"{total:,} candidate plans exceed the limit of {MAX_CANDIDATES:,} for one search: "
            "pin some parts with --fix (for example zero=1,sp=on), or allow less --offload"
        )
    yield from product.slabs(SLAB)


def allowed_offloads(parts: Iterable[str]) -> tuple[str, ...]:
    """Return all values of Plan.offload that offload only ``parts``, none first.

    >>> allowed_offloads(["optimizer", "activations"])
    ('none', 'optimizer', 'activations', 'optimizer+activations')
    """
    allowed = {"none", *parts}
    return tuple(word for word in OFFLOADS if set(word.split("+")) <= allowed)


def can_share_sequences(model: ModelSpec) -> bool:
    """Whether ranks can share sequences: all attention is causal, none is linear."""
    causal = all(kind.attention.causal and kind.cross_attention is None for kind in model.kinds)
    return causal and not model.has_linear_attention


def _replicas(data: int, context: int) -> list[int]:
    """Return the values of dp_replicate to try: those that leave at least two ranks to shard over.

    >>> _replicas(8, 1), _replicas(4, 2)
    ([1, 2, 4], [1, 2, 4])
    """
    return [n for n in divisors(data) if n == 1 or data // n * context > 1]


def _wanted(fixed: Mapping[str, Any], name: str, values: list[Any]) -> list[Any]:
    return [fixed[name]] if name in fixed else values


def _experts(
    model: ModelSpec, tensor: int, ranks: int, fixed: Mapping[str, Any]
) -> list[tuple[int, bool]]:
    """Return pairs of expert_parallel and expert_tensor_parallel to try."""
    sizes = [kind.feed_forward.num_experts for kind in model.kinds]
    common = gcd(*sizes)
    pairs = []
    for cut in _wanted(fixed, "expert_tensor_parallel", [True, False]):
        if not cut and (tensor == 1 or not common) and "expert_tensor_parallel" not in fixed:
            continue
        holders = ranks if cut else ranks * tensor
        values = divisors(gcd(common, holders)) if common else [1]
        pairs += [(value, cut) for value in _wanted(fixed, "expert_parallel", values)]
    return pairs


def _pinned(fixed: Mapping[str, Any], block: ProductBlock) -> dict[str, Any]:
    """Return the columns that no block varies: pinned or default values."""
    varied = {*block.same, *itertools.chain.from_iterable(block.choices)}
    default = Plan()
    values = {
        field.name: fixed.get(field.name, getattr(default, field.name))
        for field in fields(Plan)
        if field.name not in varied
    }
    return {n: WORDS[n].index(v) if n in WORDS else v for n, v in values.items()}


def virtual_stage_counts(most_stages: int, pipeline: int) -> range:
    """Return the numbers of virtual stages, at most ``most_stages`` on all ranks together."""
    return range(2, most_stages // pipeline + 1)


def enumerated_counts(model: ModelSpec, pipeline: int) -> list[int]:
    """Return the numbers of virtual stages that every search enumerates: 2 and even ones.

    >>> from types import SimpleNamespace
    >>> enumerated_counts(SimpleNamespace(num_layers=126), 8)  # 126, or 126 and two ends
    [2, 4, 8]
    """
    layers = model.num_layers
    return [
        v
        for v in virtual_stage_counts(layers, pipeline)
        if v == 2
        or (
            v <= MAX_VIRTUAL_STAGES
            and 0 in (layers % (pipeline * v), (layers + ENDS) % (pipeline * v))
        )
    ]


def _batches(workload: Workload, data: int, fixed: Mapping[str, Any]) -> list[tuple[int, int]]:
    micro, count = fixed.get("micro_batch_size"), fixed.get("num_microbatches")
    share, left = divmod(workload.global_batch_size, data)
    if micro is not None and count is not None:
        return [(micro, count)]
    if left or not share:
        return [(micro or 1, count or 1)]  # legality reports the broken rule
    if micro is not None:
        return [(micro, max(1, share // micro))]
    if count is not None:
        return [(max(1, share // count), count)]
    return [(size, share // size) for size in divisors(share)]
