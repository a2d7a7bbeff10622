"""Every plan gives the single process's loss, gradients and weights, and moves what was predicted.

The matrix covers every legal pair of option values on up to eight ranks; a greedy choice finds a
small set of plans that does.
"""

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from cost_models.legality.rules import legality_codes
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan_file import PlanFile
from executor.parallel import data_parallel, pipeline
from executor.support import own_scenario
from executor.training import optimizer
from executor.training import trainer as train
from executor.verify import gather
from executor.verify.parity import TOLERANCE
from tests.executor.tiny import assert_equal, tiny, verified

pytestmark = pytest.mark.distributed

OPTIONS: dict[str, tuple[Any, ...]] = {
    "data_parallel": (1, 2, 4),
    "tensor_parallel": (1, 2, 4),
    "pipeline_parallel": (1, 2, 4),
    "zero_stage": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
    "recompute": ("none", "selective", "full"),
    "pipeline_schedule": ("gpipe", "1f1b", "interleaved_1f1b"),
    "num_microbatches": (1, 2, 4),
    "family": ("llama", "mistral", "qwen2", "qwen3", "gpt2"),
    "tied": (False, True),
}
FREE = ("family", "tied", "recompute")  # do not change what is legal
MAX_RANKS = 8


def _plan(case: dict[str, Any]) -> Plan:
    options = {name: value for name, value in case.items() if name not in ("family", "tied")}
    interleaved = options["pipeline_schedule"] == "interleaved_1f1b"
    return Plan(**options, virtual_stages=2 if interleaved else 1)


def _file(case: dict[str, Any]) -> PlanFile:
    plan = _plan(case)
    # one layer more than stages does not divide evenly over them; interleaving needs even stages
    uneven = plan.pipeline_schedule != "interleaved_1f1b" or plan.pipeline_parallel == 2
    layers = plan.num_stages + int(uneven)
    return tiny(plan, case["family"], tied=case["tied"], num_layers=layers)


def _legal_layouts(layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep the legal ones; those of one model, batch and world size are judged as one table."""
    plans = [_plan(case) for case in layouts]
    tables: dict[tuple[int, int, int], list[int]] = {}
    for row, plan in enumerate(plans):
        batch = plan.data_parallel * plan.num_microbatches
        tables.setdefault((plan.num_stages, batch, _ranks(layouts[row])), []).append(row)
    legal: list[int] = []
    for rows in tables.values():
        scenario = own_scenario(_file(layouts[rows[0]]))
        codes = legality_codes(scenario, PlanTable.from_plans([plans[row] for row in rows]))
        legal += [row for row, code in zip(rows, codes, strict=True) if code == 0]
    return [layouts[row] for row in sorted(legal)]


@cache
def _legal_cases() -> list[dict[str, Any]]:
    """Return all legal combinations, few ranks first; legality does not depend on the family."""
    free = {name: values[0] for name, values in OPTIONS.items() if name in FREE}
    every = _product([name for name in OPTIONS if name not in FREE])
    legal = _legal_layouts([case | free for case in every if _ranks(case) <= MAX_RANKS])
    legal.sort(key=_ranks)
    others = _product(FREE)
    return [case | other for case in legal for other in others]


def _product(names: Sequence[str]) -> list[dict[str, Any]]:
    values = itertools.product(*(OPTIONS[name] for name in names))
    return [dict(zip(names, row, strict=True)) for row in values]


def _ranks(case: dict[str, Any]) -> int:
    return int(case["data_parallel"] * case["tensor_parallel"] * case["pipeline_parallel"])


def _pairs(case: dict[str, Any]) -> list[tuple[Any, ...]]:
    return list(itertools.combinations(sorted(case.items()), 2))


@cache
def _covering() -> list[dict[str, Any]]:
    """Take the case that covers most missing pairs until none is missing."""
    cases = _legal_cases()
    number: dict[tuple[Any, ...], int] = {}
    rows = [[number.setdefault(pair, len(number)) for pair in _pairs(case)] for case in cases]
    pairs_of = np.array(rows)
    missing = np.ones(len(number), dtype=bool)
    chosen = []
    while missing.any():
        best = int(missing[pairs_of].sum(axis=1).argmax())
        chosen.append(cases[best])
        missing[pairs_of[best]] = False
    return chosen


def _name(case: dict[str, Any]) -> str:
    short = {"data_parallel": "dp", "tensor_parallel": "tp", "pipeline_parallel": "pp"}
    words = [f"{short.get(k, k)}{v}" for k, v in case.items() if k in short]
    flags = ["sp"] * case["sequence_parallel"] + ["tied"] * case["tied"]
    parts = [case["family"], *words, f"zero{case['zero_stage']}", *flags, case["recompute"]]
    return "-".join([*parts, case["pipeline_schedule"], f"m{case['num_microbatches']}"])


def test_the_covering_set_covers_every_legal_pair():
    legal = {pair for case in _legal_cases() for pair in _pairs(case)}
    covered = {pair for case in _covering() for pair in _pairs(case)}
    assert covered == legal
    assert len(legal) > 350


@pytest.mark.slow
@pytest.mark.parametrize("case", _covering(), ids=_name)
def test_parity(case: dict[str, Any]):
    assert_equal(verified(_file(case)))


# what the options above leave out, and all axes at once
SPECIAL: dict[str, tuple[Plan, dict[str, Any]]] = {
    "all axes, zero 3, interleaved": (
        Plan(2, 2, 2, 2, "interleaved_1f1b", 3, True, "full", 2, 4),
        {"family": "qwen3", "tied": True},
    ),
    "all axes, zero 2": (
        Plan(2, 2, 2, 1, "1f1b", 2, True, "selective", 2, 4),
        {"family": "gpt2", "tied": True},
    ),
    "all axes, zero 1, gpipe": (
        Plan(2, 2, 2, 1, "gpipe", 1, True, "none", 1, 3),
        {"family": "mistral"},
    ),
    "all axes, zero 0": (
        Plan(2, 2, 2, 1, "1f1b", 0, False, "full", 2, 2),
        {"family": "qwen2", "tied": True},
    ),
    "three data ranks, zero 0": (Plan(3, zero_stage=0, num_microbatches=2), {}),
    "three data ranks, zero 1": (Plan(3, zero_stage=1, num_microbatches=2), {"family": "qwen3"}),
    "three data ranks, zero 3": (
        Plan(3, 2, zero_stage=3, sequence_parallel=True, num_microbatches=2),
        {"family": "gpt2", "tied": True},
    ),
    "odd vocabulary": (
        Plan(2, 4, sequence_parallel=True, zero_stage=3),
        {"family": "llama", "vocab_size": 131},
    ),
    "odd vocabulary, tied over stages": (
        Plan(1, 4, 2, num_microbatches=2),
        {"family": "gpt2", "tied": True, "vocab_size": 131},
    ),
    "odd vocabulary, three data ranks, tied over stages": (
        Plan(3, 1, 2, zero_stage=2, num_microbatches=2),
        {"family": "gpt2", "tied": True, "vocab_size": 131},
    ),
    "uneven stages": (
        Plan(1, 1, 3, num_microbatches=4),
        {"layer_ranges": ((0, 1), (1, 4), (4, 6)), "num_layers": 6},
    ),
    "uneven virtual stages": (
        Plan(2, 1, 2, 2, "interleaved_1f1b", 1, num_microbatches=4),
        {"layer_ranges": ((0, 1), (1, 3), (3, 4), (4, 6)), "num_layers": 6, "tied": True},
    ),
    "three virtual stages": (
        Plan(1, 2, 2, 3, "interleaved_1f1b", num_microbatches=6),
        {"family": "qwen3", "num_layers": 6},
    ),
    "eager attention": (
        Plan(1, 2, recompute="selective"),
        {"family": "mistral", "attention_kernel": "eager"},
    ),
    "eager attention of GPT-2": (
        Plan(2, 2, recompute="full", zero_stage=3),
        {"family": "gpt2", "attention_kernel": "eager"},
    ),
    "scaled by layer": (
        Plan(1, 2, 2, num_microbatches=2),
        {"family": "gpt2", "scale_attn_by_inverse_layer_idx": True},
    ),
    "multi-query and a padding token": (
        Plan(2, zero_stage=2, num_microbatches=3),
        {"num_key_value_heads": 1, "pad_token_id": 3},
    ),
    "padding token over tensor ranks": (Plan(1, 2, sequence_parallel=True), {"pad_token_id": 70}),
    "a norm beside the embedding is gathered for its gradient": (
        Plan(2, 1, 2, zero_stage=3, num_microbatches=2),
        {"family": "bert", "num_layers": 2},
    ),
    "many micro-batches": (Plan(1, 1, 4, num_microbatches=9), {"family": "gpt2"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECIAL)
def test_parity_of_special_cases(name: str):
    plan, options = SPECIAL[name]
    layers = 2 if plan.pipeline_parallel == 1 else 4
    assert_equal(verified(tiny(plan, **{"num_layers": layers, **options})))


def _few_values_at_a_time() -> None:
    gather.BATCH = 5000  # smaller than one matrix, larger than a few vectors


@pytest.mark.slow
def test_tensors_that_are_gathered_in_many_batches_are_compared_as_well():
    plan = Plan(2, 2, 2, zero_stage=3, num_microbatches=2)
    assert_equal(verified(tiny(plan, num_layers=2, tied=True), _few_values_at_a_time))


def test_there_are_at_least_forty_cases():
    assert len(_covering()) + len(SPECIAL) >= 40


# --- the comparison sees it when a guard is gone -------------------------------------------------


def _without_tied_sum() -> None:
    train.sum_shared_gradients = lambda *_: None


def _without_summed_gradients() -> None:
    data_parallel._sum_gradients = lambda stage: None


def _without_completion() -> None:
    train.sum_partial_gradients = lambda *_: None


def _completing_after_every_micro_batch() -> None:
    """Sums of the micro-batches before are added up again, as in transformers' own plans."""
    accumulate, backward = train.Trainer.accumulate, pipeline.Pipeline._backward
    complete, train.sum_partial_gradients = train.sum_partial_gradients, lambda *_: None

    def accumulated(trainer: Any, batch: Any) -> Any:
        def completed(self: Any, *arguments: Any) -> None:
            backward(self, *arguments)
            complete(trainer.shards, trainer.axis)

        pipeline.Pipeline._backward = completed
        return accumulate(trainer, batch)

    train.Trainer.accumulate = accumulated


def _with_an_extra_collective() -> None:
    original = optimizer.local_square_sum

    def twice(shard: Any, device: Any) -> Any:
        total = original(shard, device)
        train.dist.all_reduce(total.clone())
        return total

    train.local_square_sum = twice


GUARDS: dict[str, tuple[Any, Plan, dict[str, Any]]] = {
    "tied gradients over stages": (
        _without_tied_sum,
        Plan(pipeline_parallel=2, num_microbatches=2),
        {"tied": True},
    ),
    "sum over data ranks": (_without_summed_gradients, Plan(data_parallel=2, zero_stage=1), {}),
    "norms under sequence parallelism": (
        _without_completion,
        Plan(tensor_parallel=2, sequence_parallel=True),
        {},
    ),
    "norms of heads": (_without_completion, Plan(tensor_parallel=2), {"family": "qwen3"}),
    "norms of heads, accumulated": (
        _completing_after_every_micro_batch,
        Plan(tensor_parallel=2, num_microbatches=2),
        {"family": "qwen3"},
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", GUARDS)
def test_a_missing_guard_is_seen(name: str):
    prepare, plan, options = GUARDS[name]
    found = verified(tiny(plan, num_layers=2, **options), prepare)
    assert found.gradient_difference > 1e-3
    assert not found.passed


@pytest.mark.slow
def test_a_hidden_collective_is_seen():
    found = verified(tiny(Plan(data_parallel=2), num_layers=2), _with_an_extra_collective)
    assert found.gradient_difference <= TOLERANCE
    assert not found.traffic_is_predicted
