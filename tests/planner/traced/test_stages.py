"""Stages of a module of unknown layers: against every cut, and against the module as a whole."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

import planner
from cost_models.memory.allocator import free_shares
from cost_models.memory.ledger import first
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.workload import Workload
from cost_models.traced.graph import ModuleNodes
from cost_models.traced.memory import traced_memory
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.errors import NoLegalPlanError
from hardware_profiles.software.trainer import software_profile
from planner.traced import fit_and_plan as traced_front_door
from planner.traced import stages as traced_stages
from planner.traced.answers import cut_words
from planner.traced.scenario import TracedScenario
from planner.traced.stages import TracedStageCosts, best_cut, cut_into
from tests.traced_sample import large, sample

SOFTWARE = software_profile("shardplan")


def scenario(batch: int, cluster: str = "8xA100-80GB") -> TracedScenario:
    workload = Workload(1, batch, precision="fp32")
    return TracedScenario(sample(), parse_cluster(cluster), SOFTWARE, workload)


def random_nodes(rng: np.random.Generator) -> ModuleNodes:
    """Return nodes with a tensor that skips some, and a parameter that two of them read."""
    count = int(rng.integers(4, 9))
    crossing = np.concatenate([[0.0], rng.integers(0, 10**8, count - 1), [0.0]])
    shared = rng.integers(0, count, 2).tolist()
    return ModuleNodes(
        names=tuple(f"b.{n}" for n in range(count)),
        blocks=tuple(range(count)),
        forward=rng.random(count) * 1e-2,
        backward=rng.random(count) * 2e-2,
        starts_forward=rng.random(count) * 1e-3,
        starts_backward=rng.random(count) * 1e-3,
        kept=rng.random(count) * 4e9,
        working=rng.random(count) * 4e9,
        crossing=crossing,
        returning=crossing * (rng.random(count + 1) < 0.7),
        parameters=tuple(
            tuple((k, int(5e8), True) for k in {n, *([99] if n in shared else [])})
            for n in range(count)
        ),
    )


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(60))
def test_the_longest_stage_is_the_shortest_of_all_cuts_that_fit(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    nodes = random_nodes(rng)
    monkeypatch.setattr(traced_stages, "nodes_of", lambda *_: nodes)
    plan = Plan(2, 1, 4, num_microbatches=int(rng.integers(1, 9)), zero_stage=1)
    here = scenario(plan.global_batch_size)
    costs = TracedStageCosts.of(here, plan)
    longest = np.inf
    for inner in itertools.combinations(range(1, len(nodes)), 3):
        cut = costs.cut([0, *inner, len(nodes)])
        if cut.peak <= costs.max_peak:
            longest = min(longest, max(s.forward + s.backward for s in cut.stages))
    found = cut_into(here, plan)
    if found is None:
        assert not np.isfinite(longest)
        return
    assert max(s.forward + s.backward for s in found.stages) == pytest.approx(longest)
    assert found.peak <= costs.max_peak
    assert sum(stage.num_nodes for stage in found.stages) == len(nodes)


def test_some_random_cuts_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a stage counts in these tests."""
    nodes = random_nodes(np.random.default_rng(0))
    plan, here = Plan(2, 1, 4, num_microbatches=8), scenario(16)
    monkeypatch.setattr(traced_stages, "nodes_of", lambda *_: nodes)
    assert cut_into(here, plan) is not None
    monkeypatch.setattr(
        traced_stages, "nodes_of", lambda *_: replace(nodes, kept=nodes.kept + 1e11)
    )
    assert cut_into(here, plan) is None


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_stage_is_the_whole_module(recompute: str) -> None:
    plan = Plan(micro_batch_size=6, recompute=recompute)  # type: ignore[arg-type]
    here = scenario(6, "1xA100-80GB")
    costs = TracedStageCosts.of(here, plan)
    whole = costs.cut([0, len(costs.nodes)])
    table = PlanTable.from_plans([plan])
    parts, _ = traced_memory(here.module, here.workload, SOFTWARE, table, here.cluster)
    assert whole.peak == pytest.approx(float(parts.peak[0]), rel=0.05)  # type: ignore[index]
    assert whole.stages[0].parameters == 24 + 2 * 32


def test_a_stage_holds_a_micro_batch_more_for_each_stage_behind_it() -> None:
    plan = Plan(4, 1, 2, zero_stage=1, micro_batch_size=2, num_microbatches=4)
    costs = TracedStageCosts.of(scenario(32), plan)
    once, twice = (costs.peaks(0, flight)[2] for flight in (1, 2))
    slack = 1.0 + first(free_shares(SOFTWARE, PlanTable.from_plans([plan])).needed)
    assert twice - once == pytest.approx(
        slack * 2 * 60.0
    )  # the first two nodes keep 60 bytes a row


def test_the_answer_prices_stages_and_says_that_they_are_not_run() -> None:
    cut = best_cut(scenario(64))
    assert cut is not None
    assert cut.plan.pipeline_parallel == 2
    assert [stage.first for stage in cut.stages] == ["b.0", "b.1"]
    words = cut_words(cut, 2 * cut.step)
    assert words.startswith("cut into 2 stages (b.0 | b.1), each on 4 data ranks")
    assert "50 % less than without" in words
    assert "the executor trains traced modules over data ranks only (DP, ZeRO)" in words
    document = json.loads(json.dumps(cut.to_dict()))
    assert document["stages"][0]["sent_bytes"] == 32.0 * cut.plan.micro_batch_size
    assert document["peak_bytes"] == cut.peak


def test_where_no_plan_fits_stages_that_would_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = best_cut(scenario(64))
    monkeypatch.setattr(traced_front_door, "trace", lambda *_, **__: large(2e9))
    monkeypatch.setattr(traced_front_door, "best_cut", lambda _: cut)
    with pytest.raises(NoLegalPlanError, match="0 fit") as caught:
        planner.plan("module:package.nets:net", "8xA100-80GB", precision="fp32")
    assert "cut into 2 stages (b.0 | b.1)" in str(caught.value)
    assert caught.value.document["cut"]["pipeline_parallel"] == 2
