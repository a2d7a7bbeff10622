"""Ranks that share the tokens of a sequence give the single process's loss and gradients."""

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch

from benchmarks.memory_truth.rows import rows_of
from benchmarks.memory_truth.small_models import small
from cost_models.plan.plan import CONTEXT_METHODS, Plan
from executor.attention import ring
from executor.data.batch import Batch
from executor.parallel import mesh
from executor.parallel.context_parallel import AttentionPattern, ContextAxis
from executor.processes.fork import run_forked
from tests.executor.tiny import assert_equal, tiny, verified

QUICK = Plan(context_parallel=2, num_microbatches=2)


# --- who holds what, and who sees whom -----------------------------------------------------------


@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_the_ranks_hold_every_token_once(method: str):
    axes = [ContextAxis(size=4, rank=rank, method=method) for rank in range(4)]
    places = torch.cat([axis.places(32) for axis in axes])
    assert sorted(places.tolist()) == list(range(32))
    if method == "ulysses":
        assert places.tolist() == list(range(32))
    else:
        assert axes[1].places(32).tolist() == [*range(4, 8), *range(24, 28)]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 9, 16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_blocks_are_what_a_causal_mask_shows(size: int, window: int | None, documents: bool):
    seq_len = 24
    index = torch.arange(seq_len)
    starts = torch.where(torch.isin(index, torch.tensor([5, 6, 17])), index, 0).cummax(0).values
    distance = index[:, None] - index[None, :]
    expected = distance >= 0
    if window is not None:
        expected &= distance < window
    if documents:
        expected &= starts[:, None] == starts[None, :]
    found = torch.zeros(seq_len, seq_len, dtype=torch.bool)
    computed = torch.zeros(size, size)
    for rank in range(size):
        axis = ContextAxis(size=size, rank=rank)
        sight = AttentionPattern(axis, window, starts[None] if documents else None)
        query = torch.zeros(1, 1, seq_len // size, 1)
        for other in range(size):
            for block in sight.blocks(other, seq_len // size):
                rows = axis.places(seq_len)[block.queries]
                columns = axis.places_of(other, seq_len)[block.keys]
                mask = sight.mask(block, other, query)
                seen = torch.ones(len(rows), len(columns), dtype=torch.bool)
                if block.causal:
                    seen = seen.tril()
                if mask is not None:
                    seen = mask[0, 0] == 0
                assert not found[rows[:, None], columns[None]].any()  # no pair twice
                found[rows[:, None], columns[None]] = seen
                computed[rank, other] += len(rows) * len(columns)
    assert torch.equal(found, expected)
    if window is None and not documents:  # every rank has the same work with every other's keys
        others = ~torch.eye(size, dtype=torch.bool)
        assert computed[others].unique().numel() == 1


def test_a_batch_keeps_its_tokens_and_the_starts_of_all():
    tokens, starts = torch.arange(16).view(2, 8), torch.zeros(2, 8, dtype=torch.int64)
    batch = Batch.whole(tokens, tokens + 1, starts)
    cut = batch.at(torch.tensor([0, 1, 6, 7]))
    assert cut.inputs.tolist() == [[0, 1, 6, 7], [8, 9, 14, 15]]
    assert cut.labels.tolist() == [[1, 2, 7, 8], [9, 10, 15, 16]]
    assert cut.starts is not None
    assert cut.starts.shape == (2, 8)
    assert cut.tokens == 16  # of the whole batch: by these the loss is divided
    assert cut.split(1)[1].places.tolist() == [0, 1, 6, 7]  # type: ignore[union-attr]


# --- parity --------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.distributed
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_quick_parity(method: str, documents: bool):
    plan = replace(QUICK, context_parallel_method=method)
    assert_equal(verified(tiny(plan, "mistral", num_layers=2), documents=documents))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # every axis, ZeRO stage, recomputation and family somewhere; more with each method: the matrix
    "cp 4, zero 3": ({"context_parallel": 4, "zero_stage": 3}, {"family": "qwen3"}),
    "cp 2, dp 2, zero 3, full": (
        {"data_parallel": 2, "context_parallel": 2, "zero_stage": 3, "recompute": "full"},
        {"family": "llama", "tied": True},
    ),
    "cp 2, tp 2, sp, pp 2, zero 2, selective": (
        {
            "context_parallel": 2,
            "tensor_parallel": 2,
            "pipeline_parallel": 2,
            "sequence_parallel": True,
            "zero_stage": 2,
            "recompute": "selective",
        },
        {"family": "qwen2", "tied": True},
    ),
    "cp 2, tp 2, dp 2, zero 1, full": (
        {
            "data_parallel": 2,
            "context_parallel": 2,
            "tensor_parallel": 2,
            "zero_stage": 1,
            "recompute": "full",
        },
        {"family": "gpt2", "tied": True},
    ),
    "cp 2, replicas of two, zero 2": (
        {"data_parallel": 2, "dp_replicate": 2, "context_parallel": 2, "zero_stage": 2},
        {"family": "mistral"},
    ),
}
SPECIAL: dict[str, tuple[Plan, dict[str, Any], bool]] = {
    "ring of three": (replace(QUICK, context_parallel=3), {"seq_len": 18}, True),
    "ring, eager": (QUICK, {"attention_kernel": "eager", "family": "gpt2"}, False),
    "ulysses, eager": (
        replace(QUICK, context_parallel_method="ulysses"),
        {"attention_kernel": "eager", "family": "gpt2"},
        True,
    ),
    "ring, capped scores": (QUICK, {"family": "gemma2"}, True),
    "ulysses, capped scores": (
        replace(QUICK, context_parallel_method="ulysses"),
        {"family": "gemma2"},
        False,
    ),
    "ulysses, more ranks than key heads": (
        Plan(1, 2, context_parallel=4, context_parallel_method="ulysses", recompute="full"),
        {"num_key_value_heads": 2, "num_layers": 2},
        False,
    ),
    "ring, sinks, experts": (
        Plan(
            2,
            2,
            expert_parallel=2,
            context_parallel=2,
            zero_stage=3,
            recompute="full",
            num_microbatches=2,
        ),
        {"family": "gpt_oss", "num_layers": 2},
        False,
    ),
    "ulysses, sinks": (
        replace(QUICK, context_parallel_method="ulysses"),
        {"family": "gpt_oss", "num_layers": 2},
        True,
    ),
    "ring, narrow values": (QUICK, {"family": "deepseek_v3", "num_layers": 2}, False),
    "ring, weight gradients later": (
        Plan(1, 1, 2, 2, "zbv", 3, num_microbatches=4, context_parallel=2),
        {"family": "mistral"},
        False,
    ),
    "allgather, all axes, interleaved": (
        Plan(
            1,
            2,
            2,
            2,
            "interleaved_1f1b",
            3,
            True,
            "full",
            1,
            2,
            context_parallel=2,
            context_parallel_method="allgather",
        ),
        {"family": "mistral"},
        True,
    ),
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("name", "method"), list(zip(CASES, cycle(CONTEXT_METHODS))))
def test_parity(name: str, method: str):
    changes, options = CASES[name]
    plan = Plan(num_microbatches=2, context_parallel_method=method, **changes)
    options = {"num_layers": 2 * plan.pipeline_parallel, **options}
    assert_equal(verified(tiny(plan, **options), documents=name.startswith("cp 4")))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", SPECIAL)
def test_special_parity(name: str):
    plan, options, documents = SPECIAL[name]
    options = {"num_layers": max(2, plan.num_stages), **options}
    seq_len = options.pop("seq_len", None)
    file = tiny(plan, **options)
    if seq_len is not None:
        file = replace(file, workload=replace(file.workload, seq_len=seq_len))
    assert_equal(verified(file, documents=documents))


MEMORY = {
    "ring": Plan(context_parallel=2, zero_stage=3, micro_batch_size=4, num_microbatches=2),
    "ulysses": Plan(
        context_parallel=2,
        context_parallel_method="ulysses",
        zero_stage=3,
        micro_batch_size=4,
        num_microbatches=2,
    ),
    "allgather": Plan(
        context_parallel=4,
        context_parallel_method="allgather",
        zero_stage=3,
        micro_batch_size=4,
        num_microbatches=2,
    ),
    "replicas": Plan(
        data_parallel=4, dp_replicate=2, zero_stage=2, micro_batch_size=2, num_microbatches=2
    ),
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", MEMORY)
def test_the_peak_is_predicted(name: str):
    (row,) = rows_of(small("llama", "bf16", MEMORY[name], layers=4))
    assert abs(row["error_percent"]) < 1.5, row


# --- the comparison sees it when a guard is gone -------------------------------------------------


def _with_positions_from_zero() -> None:
    """Let every rank count the positions of its own tokens."""
    original = Batch.at

    def at(batch: Batch, places: torch.Tensor) -> Batch:
        return replace(original(batch, places), places=torch.arange(len(places)))

    Batch.at = at


def _without_the_context_in_the_sharding_group() -> None:
    mesh.GROUP_AXES = {**mesh.GROUP_AXES, "data": ("shard",)}


def _with_a_mean_over_the_context() -> None:
    from executor.training.trainer import Trainer

    original = Trainer.own

    def own(trainer: Trainer, batch: Batch) -> list[Batch]:
        return [replace(b, tokens=2 * b.tokens) for b in original(trainer, batch)]

    Trainer.own = own


def _without_the_last_hop() -> None:
    """Leave the gradients of the keys with the rank that saw them last."""
    exchange = ring._RingExchange
    original = exchange.own_gradients

    def own_gradients(self: Any) -> Any:
        original(self)  # waits
        return self.pairs.unpacked(self.flat)

    exchange.own_gradients = own_gradients


def _in_slices_without_balance() -> None:
    """Take the chunks in order, as if causal work were the same everywhere."""
    ContextAxis.chunks = lambda axis, rank: (2 * rank, 2 * rank + 1)


def _with_weights_of_blocks() -> None:
    """Average blocks evenly instead of by their log-sum-exp."""
    original = ring.RunningSoftmax.add

    def add(total: Any, rows: slice, output: torch.Tensor, lse: torch.Tensor) -> None:
        original(total, rows, output, torch.zeros_like(lse))

    ring.RunningSoftmax.add = add


GUARDS = {
    "positions": _with_positions_from_zero,
    "sharding group": _without_the_context_in_the_sharding_group,
    "double division": _with_a_mean_over_the_context,
    "last hop": _without_the_last_hop,
    "balance": _in_slices_without_balance,
    "log-sum-exp": _with_weights_of_blocks,
}


@pytest.mark.sampled(1)
@pytest.mark.distributed
@pytest.mark.parametrize("name", GUARDS)
def test_a_missing_guard_is_seen(name: str):
    found = verified(tiny(QUICK, num_layers=2), GUARDS[name])
    assert found.gradient_difference > 1e-3
    assert not found.passed


# --- what the ranks draw -------------------------------------------------------------------------


def _masks(rank: int, plan: Plan) -> tuple[list[float], list[float]]:
    """Return hidden and attention dropout that a rank draws in its first step."""
    from executor.training.trainer import Trainer

    trainer = Trainer(tiny(plan, "gpt2", num_layers=1, precision="fp32"))
    trainer.seed_dropout()
    return torch.rand(4).tolist(), torch.rand(4).tolist()


@pytest.mark.distributed
def test_ranks_with_other_tokens_draw_other_masks():
    plan = replace(QUICK, context_parallel_method="ulysses")
    first, second = run_forked(_masks, 2, plan, timeout=60)
    assert first != second
