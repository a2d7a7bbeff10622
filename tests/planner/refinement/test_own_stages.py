"""Stages that a search chooses: equal to trying all of them, and never worse than even ones."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import planner
from cost_models.communication.volumes import pipeline_traffic
from cost_models.legality.rules import legality_codes
from cost_models.memory.outside_torch import context_bytes
from cost_models.model.spec import ModelSpec
from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.partition.rank_view import RankView
from cost_models.partition.schedules import ranks_of_stages
from cost_models.partition.stages import contents_of_rank
from cost_models.plan.plan import Plan, PlanTable, split_layers
from cost_models.plan_file import read_plan_file, write_plan_file
from cost_models.pricing.estimate import price
from cost_models.pricing.table import table_steps
from cost_models.scenario import Scenario
from cost_models.uncertainty import verdict_spread
from cost_models.units import format_seconds
from planner.answer.plan_answer import PlanAnswer
from planner.assessment.assess import assess
from planner.assessment.verdict import budget_bytes, plan_verdict_spread
from planner.refinement.best_partition import GAIN, best_staged
from planner.refinement.minimal_recompute import least_recompute, share_out
from planner.refinement.rank_prices import rank_passes, rank_peaks
from planner.refinement.stage_bounds import (
    balanced_bounds,
    chooses_layers,
    is_looped,
    least_steps,
    stage_bounds,
    stage_candidates,
)
from planner.refinement.stage_contents import StageContents
from planner.refinement.stage_costs import (
    StageCosts,
    peaks,
    price_stages,
    simulated_step,
    sizes_of,
    with_stages,
)
from planner.refinement.stage_search import StageSplit, best_stages
from planner.search.search import search
from tests.samples import examples, llama, make_scenario, sample_model


def all_stages(
    layers: int, stages: int, *, empty: bool = False
) -> list[tuple[tuple[int, int], ...]]:
    choose = itertools.combinations_with_replacement if empty else itertools.combinations
    found = []
    for cuts in choose(range(layers + 1), stages - 1):
        ends = (*cuts, layers)
        found.append(tuple(zip((0, *ends[:-1]), ends, strict=True)))
    return found


def with_budget(scenario: Scenario, size: float) -> Scenario:
    chip = scenario.cluster.accelerator
    chip = replace(
        chip,
        memory_capacity=replace(chip.memory_capacity, value=2 * size),
        usable_memory=replace(chip.memory_capacity, value=size),
    )
    return replace(scenario, cluster=replace(scenario.cluster, accelerator=chip))


def brute_force(scenario: Scenario, plan: Plan) -> float | None:
    """Simulate every cut with every number of recomputed layers that fits; the best step."""
    layers, stages = scenario.model.num_layers, plan.pipeline_parallel
    most = budget_bytes(scenario.cluster) / (1.0 + plan_verdict_spread(scenario).above)
    best = None
    for ranges in all_stages(layers, stages):
        sizes = [last - first for first, last in ranges]
        choices = [range(n + 1) if plan.recompute != "none" else [0] for n in sizes]
        for by_stage in itertools.product(*choices):
            given_layers = tuple(by_stage) if plan.recompute != "none" else None
            if max(peaks(scenario, plan, ranges, given_layers)) > most:
                continue
            step = simulated_step(scenario, plan, ranges, given_layers)
            best = step if best is None else min(best, step)
    return best


def plan_of(
    stages: int, microbatches: int, schedule: Any = "1f1b", recompute: Any = "none"
) -> Plan:
    return Plan(
        data_parallel=2,
        pipeline_parallel=stages,
        pipeline_schedule=schedule,
        num_microbatches=microbatches,
        recompute=recompute,
        zero_stage=1,
    )


def scenario_of(model: ModelSpec | str, plan: Plan, **changes: Any) -> Scenario:
    cluster = f"{plan.pipeline_parallel}x2xH100-SXM"
    return make_scenario(
        model, cluster, global_batch_size=plan.global_batch_size, **{"seq_len": 512, **changes}
    )


def stages_of(scenario: Scenario, plan: Plan) -> StageSplit | None:
    """Return the best stages, proven to be so."""
    found, proven = best_stages(StageCosts.of(scenario, plan))
    assert proven
    return found


LARGE_HEAD = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 128_000}


@settings(max_examples=examples(6), deadline=None)
@given(
    layers=st.integers(4, 7),
    stages=st.integers(2, 3),
    microbatches=st.integers(3, 6),
    schedule=st.sampled_from(["1f1b", "gpipe", "zero_bubble"]),
    vocab=st.sampled_from([512, 32_000, 128_000]),
)
def test_the_best_stages_are_those_of_trying_all(
    layers: int, stages: int, microbatches: int, schedule: str, vocab: int
) -> None:
    plan = plan_of(stages, microbatches, schedule)
    sizes = {**LARGE_HEAD, "vocab_size": vocab, "num_hidden_layers": layers}
    scenario = scenario_of(llama(**sizes), plan)
    found = stages_of(scenario, plan)
    assert found is not None
    assert found.step == pytest.approx(brute_force(scenario, plan), rel=1e-9)
    assert found.step == pytest.approx(simulated_step(scenario, plan, found.layer_ranges))


@pytest.mark.slow
@settings(max_examples=examples(3), deadline=None)
@given(share=st.floats(0.0, 1.0), stages=st.integers(2, 3))
def test_under_little_memory_too_with_recomputed_layers(share: float, stages: int) -> None:
    """Between what the smallest stages need and what all fit with: cuts and layers together."""
    plan = plan_of(stages, 4, "1f1b", "full")
    scenario = scenario_of(llama(**LARGE_HEAD, num_hidden_layers=4), plan, seq_len=2048)
    even = split_layers(4, stages)
    low = max(peaks(scenario, plan, even, tuple(b - a for a, b in even)))
    high = max(peaks(scenario, plan, even, (0,) * stages))
    spread = 1.0 + plan_verdict_spread(scenario).above
    tight = with_budget(scenario, (low + share * (high - low)) * spread * (1 + 1e-9))
    found = stages_of(tight, plan)
    assert found is not None
    assert found.step == pytest.approx(brute_force(tight, plan), rel=1e-9)
    fits = peaks(tight, plan, found.layer_ranges, found.recomputed)
    assert max(fits) * spread <= budget_bytes(tight.cluster)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("schedule", "stages", "virtual", "layers", "share"),
    [
        ("interleaved_1f1b", 2, 2, 6, 0.3),
        ("interleaved_zero_bubble", 3, 2, 4, 1.5),  # two stages more than layers
        ("zbv", 3, 2, 7, 1.5),
        ("dualpipev", 2, 2, 5, 0.3),
    ],
)
def test_layers_of_several_stages_on_a_rank_are_those_of_trying_all(
    schedule: Any, stages: int, virtual: int, layers: int, share: float
) -> None:
    """``share``: of the memory between full recomputation and none."""
    plan = replace(plan_of(stages, 6, schedule, "full"), virtual_stages=virtual)
    model = llama(**{**LARGE_HEAD, "vocab_size": 32_000}, num_hidden_layers=layers)
    scenario, owner = scenario_of(model, plan, seq_len=2048), ranks_of_stages(plan)
    every = [
        ranges
        for ranges in all_stages(layers, len(owner), empty=True)
        if all(first < last for first, last in ranges[1:-1])
    ]
    by_rank = {tuple(StageContents.of_plan(model, plan).layers_of_ranks(r)): r for r in every}
    whole = [max(peaks(scenario, plan, ranges)) for ranges in by_rank.values()]
    none = replace(plan, recompute="none")
    without = [max(peaks(scenario, none, ranges)) for ranges in by_rank.values()]
    most = (1.0 - share) * min(whole) + share * min(without)
    spread = 1.0 + plan_verdict_spread(scenario).above
    tight = with_budget(scenario, most * spread * (1.0 + 1e-9))
    best, known = np.inf, set()
    for layers_of, ranges in by_rank.items():
        for numbers in itertools.product(*(range(b - a + 1) for a, b in ranges)):
            pairs = list(zip(owner, numbers, strict=True))
            key = layers_of, *(sum(n for r, n in pairs if r == rank) for rank in range(stages))
            if key not in known and max(peaks(tight, plan, ranges, numbers)) <= most:
                known.add(key)
                best = min(best, simulated_step(tight, plan, ranges, numbers))
    found = stages_of(tight, plan)
    assert found is not None
    assert found.step == pytest.approx(best, rel=1e-9)
    assert found.step == pytest.approx(
        simulated_step(tight, plan, found.layer_ranges, found.recomputed)
    )
    assert max(peaks(tight, plan, found.layer_ranges, found.recomputed)) <= most * (1.0 + 1e-6)


def test_the_embedding_and_the_head_alone_recompute_nothing() -> None:
    plan = plan_of(4, 6, recompute="full")
    scenario = scenario_of(llama(**LARGE_HEAD, num_hidden_layers=2), plan)
    (found,) = least_recompute(scenario, [(plan, split_layers(2, 4))])
    assert found.by_stage(scenario) == (0, 0, 0, 0)
    assert [rank.each > 0.0 for rank in found.ranks] == [False, True, True, False]


def test_a_limit_that_a_stage_of_one_layer_exceeds_leaves_no_stages() -> None:
    plan = plan_of(2, 8)
    scenario = scenario_of(llama(**LARGE_HEAD, num_hidden_layers=8), plan)
    limit = simulated_step(scenario, plan, split_layers(8, 2)) / 2
    costs = StageCosts(scenario, plan, StageContents(scenario.model, 2), limit, [limit, 0.0])
    price_stages([costs])
    assert not costs.possible
    assert best_stages(costs) == (None, True)


@pytest.mark.parametrize("vocab", [512, 128_000])
@pytest.mark.parametrize("layers", [0, 1, 8, 12, 22])
def test_the_most_layers_of_a_stage_are_those_of_its_time(vocab: int, layers: int) -> None:
    """Whether they are near an even split, far fewer, or all that other stages leave."""
    plan = plan_of(3, 8)
    model = llama(**{**LARGE_HEAD, "vocab_size": vocab}, num_hidden_layers=24)
    scenario, contents = scenario_of(model, plan), StageContents(model, 3)
    pairs = [(s, pair) for s in range(3) for pair in contents.ranges(s, range(25))]
    ranks = [(0, contents.of(s, *pair, 0)) for s, pair in pairs]
    found = zip(pairs, rank_passes(scenario, [plan], ranks), strict=True)
    whole = {(s, last - first): one.whole for (s, (first, last)), one in found}
    limit = whole[1, layers] if layers else whole[1, 1] / 2
    shorter = [key for key, seconds in whole.items() if seconds <= limit]
    fit = [max((n for s, n in shorter if s == stage), default=-1) for stage in range(3)]
    costs = StageCosts(scenario, plan, contents, np.inf, [limit] * 3)
    price_stages([costs])
    assert costs.sizes == sizes_of(fit, 24, contents.least)


def test_the_stage_with_the_head_gets_fewer_layers() -> None:
    plan = plan_of(4, 32)
    sizes = {"hidden_size": 4096, "intermediate_size": 16384, "vocab_size": 128_000}
    scenario = scenario_of(llama(**sizes, num_hidden_layers=32), plan, seq_len=2048)
    found = stages_of(scenario, plan)
    assert found is not None
    assert found.layers[-1] < min(found.layers[:-1])
    one_fewer = simulated_step(scenario, plan, ((0, 9), (9, 17), (17, 25), (25, 32)))
    assert found.step < one_fewer < simulated_step(scenario, plan, split_layers(32, 4))


@pytest.mark.slow
def test_dense_and_expert_layers_are_told_apart() -> None:
    """The first layer of DeepSeek-V2-Lite is dense and costs half, the head as much as two."""
    model = sample_model("deepseek-v2-lite")
    plan = plan_of(3, 24)
    scenario = with_budget(scenario_of(model, plan, seq_len=4096), 1e12)
    found = stages_of(scenario, plan)
    assert found is not None
    even = simulated_step(scenario, plan, split_layers(model.num_layers, 3))
    assert found.step < 0.95 * even
    assert found.layers[0] > 9 > found.layers[2]
    assert found.step == pytest.approx(simulated_step(scenario, plan, found.layer_ranges))


@pytest.mark.slow
@pytest.mark.parametrize("target_seq_len", [0, 64, 2048])
def test_encoder_and_decoder_are_told_apart(target_seq_len: int) -> None:
    """Decoder layers attend twice, so that even halves of the layers are uneven stages."""
    plan = replace(plan_of(2, 8), micro_batch_size=8)
    model = sample_model("t5", d_model=1024, d_kv=128, d_ff=8192, num_layers=8, vocab_size=32128)
    scenario = scenario_of(model, plan, target_seq_len=target_seq_len)
    assert model.num_layers == 16
    found = stages_of(scenario, plan)
    assert found is not None
    assert found.step == pytest.approx(brute_force(scenario, plan), rel=1e-6)
    assert found.layers[0] >= found.layers[1]


UNEVEN = {"d_model": 512, "d_kv": 64, "d_ff": 4096, "num_layers": 5, "num_decoder_layers": 2}


@pytest.mark.slow
@pytest.mark.parametrize("target_seq_len", [0, 64, 2048])
def test_uneven_halves_of_an_encoder_decoder_are_those_of_trying_all(target_seq_len: int) -> None:
    plan = replace(plan_of(3, 5), micro_batch_size=4)
    model = sample_model("t5", **UNEVEN, vocab_size=32_128)
    scenario = scenario_of(model, plan, target_seq_len=target_seq_len)
    assert (model.num_layers, model.bridge_layer) == (7, 5)
    need = max(peaks(scenario, plan, split_layers(7, 3), None))
    tight = with_budget(
        scenario,
        1.001 * need * (1.0 + plan_verdict_spread(scenario).above),
    )
    found = stages_of(tight, plan)
    assert found is not None
    assert found.step == pytest.approx(brute_force(tight, plan), rel=1e-9)


def test_the_output_of_the_encoder_travels_and_stays_with_every_decoder_stage() -> None:
    """Behind the first decoder layer two hidden states are sent, and kept; before it one."""
    plan = replace(plan_of(3, 6), micro_batch_size=4)
    model = sample_model("t5", **UNEVEN, vocab_size=32_128)
    scenario, table = scenario_of(model, plan), PlanTable.from_plans([plan])
    hidden = 2.0 * 4 * 512 * model.hidden_size  # bf16, micro-batch of 4, 512 tokens

    def of(ranges: tuple[tuple[int, int], ...]) -> tuple[list[float], list[int]]:
        ranks = [contents_of_rank(model, ranges, range(3), rank) for rank in range(3)]
        traffic = [pipeline_traffic(RankView(scenario, table, rank)) for rank in ranks]
        sent = [float(found["pipeline", "send"].size[0]) for found in traffic]  # type: ignore[index]
        return [size / 6 / hidden for size in sent], [rank.hidden_states_received for rank in ranks]

    assert of(((0, 3), (3, 5), (5, 7))) == ([1.0, 2.0, 1.0], [0, 1, 1])
    assert of(((0, 3), (3, 6), (6, 7))) == ([1.0, 3.0, 2.0], [0, 1, 2])
    assert of(((0, 5), (5, 6), (6, 7))) == ([1.0, 3.0, 2.0], [0, 1, 2])
    scenario = scenario_of(model, plan, target_seq_len=128)
    assert of(((0, 3), (3, 6), (6, 7)))[0] == [1.0, 2.25, 1.25]


@pytest.mark.slow
def test_memory_moves_layers_from_the_first_stage() -> None:
    """Under 1F1B the first stage has the most micro-batches in flight."""
    plan = plan_of(4, 16)
    scenario = scenario_of(
        llama(hidden_size=512, intermediate_size=1024, num_hidden_layers=32), plan, seq_len=2048
    )
    even = split_layers(32, 4)
    need = max(peaks(scenario, plan, even))
    spread = 1.0 + plan_verdict_spread(scenario).above
    runtime = context_bytes(scenario.software, scenario.cluster.accelerator.architecture)
    tight = with_budget(scenario, spread * (runtime + 0.93 * (need - runtime)))
    found = stages_of(tight, plan)
    assert found is not None
    assert found.layers[0] < 8
    assert max(peaks(tight, plan, found.layer_ranges)) * spread <= budget_bytes(tight.cluster)
    assert stages_of(with_budget(scenario, 2e9), plan) is None


def test_a_stopped_search_says_that_it_proves_nothing() -> None:
    plan = plan_of(4, 8)
    scenario = scenario_of(llama(**LARGE_HEAD, num_hidden_layers=16), plan)
    stopped, proven = best_stages(StageCosts.of(scenario, plan), most_nodes=3)
    whole = stages_of(scenario, plan)
    assert isinstance(stopped, StageSplit)
    assert whole is not None
    assert not proven
    assert stopped.step >= whole.step * (1 - 1e-9)


def test_the_simulation_is_not_below_what_is_priced() -> None:
    plan = plan_of(4, 8, recompute="full")
    scenario = scenario_of(llama(**LARGE_HEAD, num_hidden_layers=16), plan)
    for ranges, by_stage in (
        (split_layers(16, 4), None),
        (((0, 5), (5, 10), (10, 14), (14, 16)), (2, 1, 0, 2)),
    ):
        there = with_stages(scenario, ranges, by_stage)
        priced = price(there, PlanTable.from_plans([plan]))
        simulated = simulated_step(scenario, plan, ranges, by_stage)
        assert simulated >= float(priced.step[0]) * (1 - 1e-9)
        assert simulated <= float(priced.step[0]) * 1.1
        assert max(peaks(scenario, plan, ranges, by_stage)) == pytest.approx(float(priced.peak[0]))


def test_costs_of_a_stage_do_not_depend_on_the_others() -> None:
    plan = plan_of(3, 4)
    scenario = scenario_of(llama(**LARGE_HEAD, num_hidden_layers=9), plan)
    contents = StageContents(scenario.model, 3)
    for ranges in (((0, 2), (2, 5), (5, 9)), ((0, 4), (4, 6), (6, 9))):
        alone = [(0, contents.of(stage, *pair, 0)) for stage, pair in enumerate(ranges)]
        assert rank_peaks(scenario, [plan], alone).tolist() == peaks(scenario, plan, ranges)


# --- memory that is left over ---


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("stages", "virtual", "schedule"),
    [(1, 1, "1f1b"), (2, 1, "1f1b"), (2, 2, "interleaved_1f1b"), (2, 2, "zbv")],
)
def test_no_fewer_layers_can_be_recomputed(stages: int, virtual: int, schedule: Any) -> None:
    plan = replace(plan_of(stages, 8, schedule, "full"), virtual_stages=virtual)
    scenario = scenario_of(llama(**LARGE_HEAD, num_hidden_layers=8), plan, seq_len=2048)
    ranges = split_layers(8, stages * virtual)
    sizes = [last - first for first, last in ranges]
    spread = 1.0 + plan_verdict_spread(scenario).above
    low = max(peaks(scenario, plan, ranges, tuple(sizes)))
    high = max(peaks(scenario, plan, ranges, (0,) * len(sizes)))
    tight = with_budget(scenario, (low + 0.4 * (high - low)) * spread)
    (least,) = least_recompute(tight, [(plan, ranges)])
    found = least.by_stage(tight)
    most = budget_bytes(tight.cluster) / spread
    assert max(peaks(tight, plan, ranges, found)) <= most
    best = min(
        simulated_step(tight, plan, ranges, numbers)
        for numbers in itertools.product(*(range(n + 1) for n in sizes))
        if max(peaks(tight, plan, ranges, numbers)) <= most
    )
    assert simulated_step(tight, plan, ranges, found) == pytest.approx(best, rel=1e-9)
    assert not least_recompute(with_budget(scenario, low * 0.5), [(plan, ranges)])


@given(
    seconds=st.lists(st.floats(1.0, 3.0), min_size=4, max_size=4),
    least=st.tuples(st.integers(0, 6), st.integers(0, 6)),
)
@settings(max_examples=examples(20), deadline=None)
def test_the_integer_program_is_the_best_of_all(
    seconds: list[float], least: tuple[int, int]
) -> None:
    mine, sizes, each = [[0, 2], [1, 3]], [3, 3, 3, 3], [0.4, 0.3, 0.4, 0.3]
    found = share_out(seconds, each, sizes, mine, list(least))

    def longest(numbers: tuple[int, ...]) -> float:
        return max(t + s * x for t, s, x in zip(seconds, each, numbers, strict=True))

    possible = [
        numbers
        for numbers in itertools.product(range(4), repeat=4)
        if all(sum(numbers[c] for c in mine[r]) >= least[r] for r in (0, 1))
    ]
    assert found in possible
    if any(least):
        assert longest(found) == pytest.approx(min(map(longest, possible)), rel=1e-2)
        assert sum(found) <= sum(least) + 1


# --- in the answer of plan ---


def test_the_gain_is_what_fit_prices() -> None:
    """Every layer recomputed fits with much to spare: fewer do, and the step is shorter."""
    scenario = scenario_of(llama(**LARGE_HEAD, num_hidden_layers=8), plan_of(1, 8), seq_len=2048)
    roomy = search(scenario, {"recompute": "none", "zero_stage": 3}, top=1).plans[0]
    need = [max(peaks(scenario, replace(roomy, recompute=r), ((0, 8),))) for r in ("none", "full")]
    spread = 1.0 + plan_verdict_spread(scenario).above
    tight = with_budget(scenario, spread * (need[1] + 0.7 * (need[0] - need[1])))
    plan = replace(roomy, recompute="full")
    found = best_staged(tight, [plan], PlanTable.from_plans([plan]))
    assert found is not None
    assert found.by_stage is not None
    assert 0 < found.by_stage[0] < 8
    assert found.gain == pytest.approx(1.0 - found.step / found.even_step)
    assert found.gain > 0.02
    document = assess(found.scenario(tight), found.plan)
    assert document.verdict == "fits"
    assert document.time.step_seconds == pytest.approx(found.step)


def test_all_forms_of_an_answer_name_the_same_best_plan(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 9, "hidden_size": 1024, "intermediate_size": 4096}
    model = sample_model("llama", **sizes, vocab_size=128_000)
    options: dict[str, Any] = {
        "seq_len": 1024,
        "global_batch_size": 32,
        "fix": "pp=4,tp=1,schedule=1f1b",
    }
    answer = planner.plan(model, "4xA100-80GB", **options)
    assert isinstance(answer, PlanAnswer)
    best, document = answer.ranked[0], answer.to_dict()
    assert best.staged is not None
    assert best.step.seconds < answer.result.seconds[0]
    layers, step = list(best.staged.layers), best.step.seconds
    first = document["plans"][0]
    assert answer.best == answer.fastest == best.plan
    assert answer.table.step_seconds[0] == step
    assert (first["plan"], first["time"]["step_seconds"]) == (answer.best.to_dict(), step)
    assert first["staged"] == document["staged"] == best.staged.to_dict()
    assert [plan["staged"] for plan in document["plans"][1:]] == [None] * 9
    assert document["tie"] is None  # the tie of the plans with even stages
    said = " ".join(answer.text().split())
    shown = said[said.index("Best") : said.index("Bottleneck")]
    assert f"--layers {','.join(map(str, layers))} Step {format_seconds(step)}" in shown
    for rank, one in enumerate(answer.ranked):
        path = tmp_path / f"{rank}.json"
        write_plan_file(path, answer.plan_file(rank))
        read = read_plan_file(path)
        assert (read.plan, read.prediction["time"]["step_seconds"]) == (one.plan, one.step.seconds)
        assert rank or [last - start for start, last in read.layer_ranges] == layers


def test_nothing_is_told_where_nothing_is_gained() -> None:
    plan = Plan(data_parallel=2, micro_batch_size=8)
    scenario = scenario_of("llama", plan)
    assert best_staged(scenario, [plan], PlanTable.from_plans([plan])) is None
    assert best_staged(scenario, [plan], None) is None
    assert best_staged(scenario, [], None) is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("layers", "share"), [(0, 0.6), (2, 0.75)])
def test_a_trainer_with_one_number_for_all_stages_has_its_own_layers(
    layers: int, share: float
) -> None:
    """Equal to simulating every cut with the recomputed layers that the plan says."""
    plan = replace(plan_of(3, 6, recompute="full"), recompute_layers=layers)
    scenario = scenario_of(llama(**LARGE_HEAD, num_hidden_layers=8), plan)
    cuts = all_stages(8, 3)
    needs = [max(peaks(scenario, plan, ranges)) for ranges in cuts]
    most = (1.0 - share) * min(needs) + share * max(needs)
    scenario = with_budget(scenario, most * (1.0 + verdict_spread("shardplan").above))
    steps = [
        simulated_step(scenario, plan, ranges)
        for ranges, need in zip(cuts, needs, strict=True)
        if need <= most
    ]
    assert 0 < len(steps) < len(cuts)
    found, proven = best_stages(StageCosts.of(scenario, plan, by_stage=False))
    assert found is not None
    assert proven
    assert found.step == pytest.approx(min(steps), rel=1e-9)
    table = stage_candidates(PlanTable.from_plans([plan, plan]), recomputed="given")
    assert len(table) == 1
    bound = least_steps(scenario, table, recomputed="given")[0]
    assert bound <= found.step * (1.0 + 1e-9)


def test_whose_layers_are_chosen() -> None:
    plan = plan_of(4, 8)
    looped = replace(plan, virtual_stages=2, pipeline_schedule="interleaved_1f1b")
    table = PlanTable.from_plans([plan, replace(plan, pipeline_parallel=1), looped])
    assert chooses_layers(table).tolist() == [True, False, False]
    again = [replace(one, recompute="full") for one in (plan, looped)]
    found = stage_candidates(PlanTable.from_plans([plan, *again, looped, plan]))
    assert [found.plan(row) for row in range(len(found))] == again


@pytest.mark.parametrize("name", ["gemma-2-9b", "deepseek-v2-lite", "llama-3-8b"])
@pytest.mark.parametrize("stages", [2, 3, 5, 8])
def test_different_stages_have_every_content(name: str, stages: int) -> None:
    """Also where most layers are on one stage: those near the end begin with other kinds."""
    model = sample_model(name)
    of = StageContents(model, stages)
    for size in range(model.num_layers + 1):
        every = {
            of.key(stage, *pair)
            for stage in range(stages)
            for pair in of.ranges_of_size(stage, size)
        }
        found = [of.key(stage, *pair) for stage, pair in of.different([size])]
        assert sorted(map(repr, found)) == sorted(map(repr, every))


# --- the best of all plans ---


def small_cluster(layers: int, vocab: int, nodes: str, share: float, batch: int) -> Scenario:
    """A model of which a share of its largest plan without a pipeline fits on an accelerator."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": vocab}
    model = llama(**sizes, num_hidden_layers=layers)
    cluster = f"{nodes}xA100-PCIe-80GB"
    scenario = make_scenario(model, cluster, global_batch_size=batch, seq_len=1024)
    whole = Plan(data_parallel=scenario.cluster.num_gpus, num_microbatches=1)
    need = max(peaks(scenario, whole, split_layers(layers, 1)))
    return with_budget(scenario, share * need)


def final_step(scenario: Scenario, fixed: dict[str, Any]) -> float:
    """Seconds of the best plan, with even stages or with its own; infinite if nothing fits."""
    found = search(scenario, fixed, top=10, with_near=True)
    if not found.fits:
        return np.inf
    staged = best_staged(scenario, found.plans, found.near, min(found.seconds))
    return min(found.seconds) if staged is None else staged.step


SMALL = {  # of small_cluster: a scenario itself is too long to print
    "layers": st.integers(4, 9),
    "vocab": st.sampled_from([512, 32_000, 128_000]),
    "nodes": st.sampled_from(["2x2", "4x1", "4x2"]),
    "share": st.floats(0.25, 0.8),
    "batch": st.sampled_from([8, 16, 24]),
}
MOST_TRIED = 150  # plans whose best stages are computed one by one


@pytest.mark.slow
@settings(max_examples=examples(5), deadline=None)
@given(**SMALL, draw=st.data())
def test_a_pinned_option_never_improves_the_answer(draw: st.DataObject, **sizes: Any) -> None:
    scenario = small_cluster(**sizes)
    free = final_step(scenario, {})
    plans = search(scenario, {}, top=200).plans
    if not plans:
        return
    plan = draw.draw(st.sampled_from(plans))
    names = ["tensor_parallel", "pipeline_parallel", "virtual_stages", "pipeline_schedule"]
    names += ["zero_stage", "micro_batch_size", "dp_replicate", "sequence_parallel"]
    name = draw.draw(st.sampled_from(names))
    assert final_step(scenario, {name: getattr(plan, name)}) >= free * (1.0 - GAIN)


@pytest.mark.slow(seconds=30)
@settings(max_examples=examples(3), deadline=None)
@given(**SMALL, seed=st.integers(0, 2**32 - 1))
@example(layers=7, vocab=32_000, nodes="2x2", share=0.8, batch=16, seed=0)
@example(layers=6, vocab=128_000, nodes="2x2", share=0.467, batch=24, seed=0)
@example(layers=5, vocab=128_000, nodes="4x2", share=0.375, batch=24, seed=0)
def test_the_best_staged_plan_is_that_of_trying_all(seed: int, **sizes: Any) -> None:
    """Of a drawn part where they are many; the bounds that leave plans out hold for every plan."""
    scenario = small_cluster(**sizes)
    found = search(scenario, {}, top=10, with_near=True)
    if not found.fits or found.near is None:
        return
    table = stage_candidates(found.near)
    bounds, kept = stage_bounds(scenario, table)
    least = least_steps(scenario, table, recomputed="by_stage")
    best = np.inf
    tried = np.random.default_rng(seed).permutation(len(table))[:MOST_TRIED]
    own = chooses_layers(table) | is_looped(table)
    for row in tried[own[tried]].tolist():
        one = stages_of(scenario, table.plan(row))
        if one is not None:
            assert one.step >= least[row] * (1.0 - 1e-9)
            best = min(best, one.step)
    rows = tried[~chooses_layers(table)[tried]].tolist()
    pairs = [(plan, default_layer_ranges(scenario, plan)) for plan in map(table.plan, rows)]
    bound = {table.plan(row): max(kept[row], bounds.step[row]) for row in rows}
    for one in least_recompute(scenario, pairs):
        numbers = one.by_stage(scenario)
        if numbers is not None:
            step = simulated_step(scenario, one.plan, one.ranges, numbers)
            assert step >= max(bound[one.plan], one.step_bound) * (1.0 - GAIN)
            best = min(best, step)
    even = min(found.seconds)
    limited = stage_bounds(scenario, table, even)[1]
    assert np.all((limited == kept) | (limited >= even))
    staged = best_staged(scenario, found.plans, found.near, even)
    if staged is None:
        assert best >= even * (1.0 - GAIN)
        return
    assert staged.proven
    assert staged.step < min(best * (1.0 + 1e-9), even * (1.0 - GAIN))
    assert len(tried) < len(table) or staged.step == pytest.approx(best, rel=1e-9)
    assert assess(staged.scenario(scenario), staged.plan).verdict == "fits"


def test_bounds_hold_where_one_stage_hides_launches_of_others() -> None:
    """The head of a small model hides launches of layers that come to its stage."""
    model = sample_model("llama", num_hidden_layers=5, vocab_size=32_000)
    scenario = make_scenario(model, "6xA100-80GB", seq_len=512, global_batch_size=96)
    plan = Plan(pipeline_parallel=6, pipeline_schedule="gpipe", micro_batch_size=96)
    table = PlanTable.from_plans([plan])
    own = [replace(scenario, layer_ranges=ranges) for ranges in all_stages(5, 6, empty=True)]
    steps = [table_steps(one, table)[0] for one in own if not legality_codes(one, table)[0]]
    assert len(steps) > 2
    assert min(steps) >= balanced_bounds(scenario, table, "given").step[0]


@pytest.mark.parametrize("virtual_stages", [1, 2, 4])
def test_bounds_hold_where_interleaved_stages_hide_messages(virtual_stages: int) -> None:
    model = sample_model("llama", num_hidden_layers=16, hidden_size=1024, vocab_size=1000)
    scenario = make_scenario(model, "8xL40S", seq_len=2048, global_batch_size=256, software="nemo")
    schedule = "interleaved_1f1b" if virtual_stages > 1 else "1f1b"
    plan = Plan(2, 1, 4, virtual_stages, schedule, num_microbatches=128)
    table = PlanTable.from_plans([plan])
    bound = balanced_bounds(scenario, table, "given").step[0]
    assert table_steps(scenario, table)[0] >= bound
