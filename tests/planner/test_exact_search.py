"""The winner is that of pricing and simulating every legal plan, one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from samples import llama, make_setting, sample_model

from cost_models.estimate import Setting, price
from cost_models.legality import legality_codes, question_of
from cost_models.plan import Plan, PlanTable
from cost_models.price_table import price_table
from cost_models.simulated import above, simulated_steps
from cost_models.uncertainty import memory_spread
from planner.objectives import pareto_front
from planner.search import search
from planner.space import enumerate_plans
from planner.verdict import budget_bytes, verdict_codes

FEWEST_PLANS = 500
CLOSE = 1e-12


@st.composite
def problems(draw: Any) -> Setting:
    """A small model on eight accelerators, of which some plans may not fit."""
    name = draw(st.sampled_from(["llama", "llama tied", "gpt2", "mixtral", "t5", "wide"]))
    model = sample_model(name) if name != "wide" else llama(hidden_size=512, vocab_size=32_000)
    cluster = draw(st.sampled_from(["8xA100-80GB", "2x4xH100-SXM", "8xA100-40GB"]))
    setting = make_setting(
        model,
        cluster,
        seq_len=draw(st.sampled_from([64, 256, 512])),
        global_batch_size=draw(st.sampled_from([16, 24, 32])),
        software=draw(st.sampled_from(["shardplan", "megatron-core"])),
    )
    chip = setting.cluster.accelerator
    size = draw(st.sampled_from([1.0, 0.1, 0.06, 0.04])) * chip.memory_capacity.value
    chip = replace(chip, memory_capacity=replace(chip.memory_capacity, value=size))
    return replace(setting, cluster=replace(setting.cluster, accelerator=chip))


def verdicts(setting: Setting, peak: Any) -> Any:
    around = memory_spread(setting.software.name)
    return verdict_codes(peak, budget_bytes(setting.cluster), around)


def brute_force(setting: Setting, legal: PlanTable) -> tuple[int, float, float]:
    """Verdict, simulated step and peak of the best plan."""
    priced = price(setting, legal)
    simulated = simulated_steps(setting, legal)
    assert (simulated >= priced.step * (1 - CLOSE)).all()  # the bound is one
    step = np.where(simulated <= priced.step * (1 + CLOSE), priced.step, simulated)
    codes = verdicts(setting, priced.peak)
    best = np.lexsort((priced.peak, step, codes))[0]
    return int(codes[best]), float(step[best]), float(priced.peak[best])


def check(setting: Setting) -> None:
    table = enumerate_plans(setting.model, setting.workload, setting.cluster.num_gpus, {})
    legal = table.rows(legality_codes(question_of(setting), table) == 0)
    assume(len(legal) >= FEWEST_PLANS)
    axes = ("data_parallel", "tensor_parallel", "pipeline_parallel")
    assert all(len(np.unique(getattr(legal, axis))) > 1 for axis in axes)
    found = search(setting, top=1)
    code, step, peak = brute_force(setting, legal)
    if code == 2:
        assert not found.plans
        return
    best = PlanTable.from_plans([found.plans[0]])
    priced, simulated = price(setting, best), simulated_steps(setting, best)
    assert max(priced.step[0], simulated[0]) == pytest.approx(step, rel=CLOSE)
    assert priced.peak[0] == pytest.approx(peak, rel=CLOSE)
    assert verdicts(setting, priced.peak)[0] == code
    counts = found.counts
    assert counts.enumerated == len(table)
    assert counts.priced == len(legal)
    rivals = counts.fitting if counts.fitting else counts.tight
    assert counts.simulated + counts.bounded_away <= rivals


RELAXED = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@given(problems())
@settings(max_examples=3, **RELAXED)  # type: ignore[arg-type]
def test_the_winner_is_that_of_brute_force(setting: Setting) -> None:
    check(setting)


@pytest.mark.slow
@given(problems())
@settings(max_examples=200, **RELAXED)  # type: ignore[arg-type]
def test_the_winner_is_that_of_brute_force_200_times(setting: Setting) -> None:
    check(setting)


def test_fronts_and_the_smallest_are_those_of_brute_force() -> None:
    """Time is the simulated step there, too: the front, and among equal peaks the order."""
    setting = make_setting("llama", "8xA100-80GB", global_batch_size=32)
    pinned = {"sequence_parallel": False, "recompute": "none"}
    table = enumerate_plans(setting.model, setting.workload, 8, pinned)
    legal = table.rows(legality_codes(question_of(setting), table) == 0)
    peak, steps = price_table(setting, legal).peak, simulated_steps(setting, legal)
    step = above(price(setting, legal).step, steps)
    fits = np.flatnonzero(verdicts(setting, peak) == 0)

    def of(plans: tuple[Plan, ...]) -> list[tuple[float, float]]:
        rows = [next(i for i in fits if legal.plan(i) == plan) for plan in plans]
        return [(float(step[row]), float(peak[row])) for row in rows]

    front = pareto_front(step[fits], peak[fits])
    found = search(setting, pinned, front=True)
    assert of(found.plans) == [(float(step[fits][i]), float(peak[fits][i])) for i in front]
    assert found.counts.simulated + found.counts.bounded_away <= len(fits)
    assert found.counts.simulated < len(fits) / 2
    smallest = np.lexsort((step[fits], peak[fits]))[:20]
    found = search(setting, pinned, objective="memory", top=20)
    assert of(found.plans) == [(float(step[fits][i]), float(peak[fits][i])) for i in smallest]


def test_a_bound_that_is_no_bound_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps in closed form that are too long the first one that is simulated would win."""
    setting = make_setting("llama", "8xA100-80GB", global_batch_size=32)
    table = enumerate_plans(setting.model, setting.workload, 8, {})
    legal = table.rows(legality_codes(question_of(setting), table) == 0)
    from cost_models import pipeline_time

    honest = pipeline_time.BOUNDS["1f1b"]
    monkeypatch.setitem(pipeline_time.BOUNDS, "1f1b", lambda x: 1.5 * honest(x))
    with pytest.raises(AssertionError):
        brute_force(setting, legal)
