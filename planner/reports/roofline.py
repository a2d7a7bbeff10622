"""Roofline of one layer's forward pass: its matrices, its attention core, and the head.

    intensity = FLOP / bytes        rate = FLOP / seconds <= min(peak, bandwidth x intensity)

Bytes: weights, inputs and outputs, each moved once; of a flash kernel queries, keys, values and
outputs. Units: FLOP, bytes, seconds of one accelerator and one micro-batch. Source: Williams et
al., Roofline (CACM 52(4), 2009).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from cost_models.communication.expert_parallel import slots_per_token
from cost_models.compute.flops import attention_flops_per_token, keys_per_token
from cost_models.compute.head import head_seconds
from cost_models.compute.layer import LayerWork, core_seconds, layer_seconds
from cost_models.compute.matrices import matrices_seconds
from cost_models.compute.rates import Rates, training_rates
from cost_models.memory.ledger import first
from cost_models.model.spec import Weight
from cost_models.partition.plan_stages import pipeline_rank
from cost_models.partition.rank_view import RankView
from cost_models.partition.tensor_sharding import shard_dim
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.utilisation import peak_flops
from cost_models.scenario import Scenario
from cost_models.step_time.rank_time import layer_work

HEAD: Final = "output projection and loss"


@dataclass(frozen=True, slots=True)
class RooflinePoint:
    """One operator, or several alike."""

    name: str
    flops: float
    moved: float  # bytes
    seconds: float

    @property
    def intensity(self) -> float:
        """FLOP a byte."""
        return self.flops / self.moved

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return self.flops / self.seconds


@dataclass(frozen=True, slots=True)
class Roofline:
    """Operators of the most frequent layer and the head, and what the accelerator can reach."""

    points: tuple[RooflinePoint, ...]
    layer_seconds: float  # forward
    peak: float  # FLOP/s, of the datasheet where it has one
    bandwidth: float  # bytes/s, of the datasheet
    reached: float  # FLOP/s of the best large matrix product

    @property
    def other_seconds(self) -> float:
        """Seconds of the layer's operators without matrices: norms, activations, residuals."""
        named = sum(point.seconds for point in self.points if point.name != HEAD)
        return max(0.0, self.layer_seconds - named)


def roofline(scenario: Scenario, plan: Plan, layer_ranges: Sequence[tuple[int, int]]) -> Roofline:
    """Return the roofline of the last stage under a plan."""
    table = PlanTable.from_plans([plan])
    rank = pipeline_rank(scenario, plan, layer_ranges, plan.pipeline_parallel - 1)
    if not rank.last:  # V-shaped schedules: the first rank owns the last stage
        rank = pipeline_rank(scenario, plan, layer_ranges, 0)
    view = RankView(scenario, table, rank)
    chip, precision = scenario.cluster.accelerator, scenario.workload.precision
    rate = training_rates(chip, precision, scenario.software)
    kind = max(view.layers, key=lambda layers: first(layers.count)).kind
    work = layer_work(view, kind, rate)
    points = _together([*_matrices(work), *_core(work), *_head(view, rate)])
    return Roofline(
        points=tuple(point for point in points if point.flops > 0 and point.seconds > 0),
        layer_seconds=first(layer_seconds(work).forward),
        peak=peak_flops(scenario) or rate.matmul,
        bandwidth=chip.memory_bandwidth.value,
        reached=rate.matmul,
    )


def _together(points: Sequence[RooflinePoint]) -> list[RooflinePoint]:
    """Return points with the equal ones as one, named after both."""
    found: dict[tuple[float, float, float], list[RooflinePoint]] = {}
    for point in points:
        found.setdefault((point.flops, point.moved, point.seconds), []).append(point)
    return [
        RooflinePoint(
            ", ".join(point.name for point in alike), *(len(alike) * value for value in values)
        )
        for values, alike in found.items()
    ]


def _matrices(work: LayerWork) -> Iterator[RooflinePoint]:
    """Yield the matrices of a layer."""
    tokens, tensor = first(work.tokens), first(work.tensor_parallel)
    cut = tensor if work.expert_tensor is None else first(work.expert_tensor)
    of_experts = slots_per_token(work.kind.feed_forward, work.software)
    for weight in work.kind.weights:
        if not weight.is_matrix or len(weight.shape) < 2 or weight.is_adapter:
            continue
        seconds = matrices_seconds(
            (weight,),
            work.tokens,
            work.tensor_parallel,
            work.compute_bytes,
            work.rate,
            experts_per_token=of_experts,
            expert_tensor=work.expert_tensor,
            expert_parallel=work.expert_parallel,
            source_tokens=work.source_tokens,
        )
        rows, many, over = work.kind.rows_of(weight, tokens), 1.0, tensor
        if weight.role == "expert":
            rows, over = tokens * cut / tensor * of_experts, cut
            many = weight.shape[0] / first(work.expert_parallel)
        one, other = _dims(weight, over)
        yield RooflinePoint(
            name=weight.name.removesuffix(".weight").rpartition(".")[2] or weight.name,
            flops=2.0 * rows * one * other,
            moved=work.compute_bytes * (many * one * other + rows * (one + other)),
            seconds=first(seconds.forward),
        )


def _dims(weight: Weight, over: float) -> tuple[float, float]:
    """Return rows and columns of a matrix on one rank of ``over``."""
    one, other = (float(length) for length in weight.shape[-2:])
    cut = shard_dim(weight)
    if cut == len(weight.shape) - 2:
        one /= over
    elif cut == len(weight.shape) - 1:
        other /= over
    return one, other


def _core(work: LayerWork) -> Iterator[RooflinePoint]:
    """Yield the attention core, of kernels whose FLOP are counted."""
    attention = work.kind.attention
    if attention.delta_rule is not None or work.kind.cross_attention is not None:
        return
    tokens = first(work.tokens)
    keys = keys_per_token(attention, work.seq_len, masked=work.kernel == "flash")
    heads = attention.num_heads + attention.num_kv_heads
    elements = heads * (attention.head_dim + attention.value_head_dim)
    moved = work.compute_bytes * tokens * elements
    if work.kernel != "flash":  # scores are written and read
        moved += 2.0 * work.compute_bytes * tokens * attention.num_heads * first(keys)
    over = first(work.tensor_parallel)
    yield RooflinePoint(
        "attention core",
        first(work.computed_score_share * attention_flops_per_token(attention, keys))
        * tokens
        / over,
        moved / over,
        first(core_seconds(work)),
    )


def _head(view: RankView, rate: Rates) -> Iterator[RooflinePoint]:
    """Yield the output projection with the loss."""
    model, over = view.model, first(view.table.tensor_parallel)
    if not model.head_multiply:
        return
    rows = view.at_head.tokens
    found = head_seconds(
        model, rows, view.table.tensor_parallel, view.compute_bytes, rate, view.software
    )
    tokens, inputs = first(rows), model.head_multiply / model.vocab_size
    outputs = model.vocab_size / over
    moved = inputs * outputs + tokens * (inputs + outputs)
    flops = 2.0 * tokens * inputs * outputs
    yield RooflinePoint(HEAD, flops, view.compute_bytes * moved, first(found.forward))
