"""No plan that ``fit`` accepts is better than the winner, drawn without the search's own code.

Plans are random values of the fields of ``Plan``: any ranks whose product is the number of
accelerators, any number of virtual stages, any micro-batch. Legality and prices are those of single
plans.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cost_models.legality.rules import legality_codes
from cost_models.model.spec import ModelSpec
from cost_models.partition.schedules import LOOPED_CODES, SPLIT_CODES
from cost_models.plan.plan import CONTEXT_METHODS, SCHEDULES, SEARCHED_RECOMPUTE, Plan, PlanTable
from cost_models.pricing.estimate import price
from cost_models.pricing.simulated_steps import above, simulated_steps
from cost_models.pricing.table import price_table, table_steps
from cost_models.scenario import Scenario
from hardware_profiles.software.trainer import software_profile
from planner.refinement.best_partition import GAIN, best_staged
from planner.request.constraints import parse_requirements
from planner.request.limits import searches_of
from planner.request.objectives import pareto_front
from planner.request.stage_layers import stage_ranges
from planner.search import space
from planner.search.search import search
from planner.search.sources.partial_recompute import FULL
from planner.search.sources.virtual_stages import LEAST_SHARE
from planner.search.space import enumerate_plans
from tests.planner.search.test_exact_search import verdicts, with_share
from tests.samples import examples, make_scenario, sample_model

DRAWN = 6_000  # plans of a problem, most of which are illegal
FEWEST = 10
CLOSE = 1e-12
RELAXED: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck)}
UNEVEN = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def draw_plan(rng: np.random.Generator, scenario: Scenario) -> Plan:
    """Return a plan with the right numbers of ranks and sequences, legal or not."""

    def one_of(values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    left, degrees = scenario.cluster.num_gpus, []
    for likely in (0.7, 0.7, 0.4):
        degrees.append(one_of(divisors(left)) if rng.random() < likely else 1)
        left //= degrees[-1]
    pipeline, tensor, context = degrees
    share, over = divmod(scenario.workload.global_batch_size, left)
    micro = one_of(divisors(share)) if share and not over else 1
    schedule = one_of(SCHEDULES) if pipeline > 1 else "1f1b"
    virtual = 1
    if "interleaved" in schedule:
        virtual = int(rng.integers(2, 3 + scenario.model.num_layers // pipeline))
    elif schedule in ("zbv", "dualpipev"):
        virtual = 2
    recompute = one_of(SEARCHED_RECOMPUTE)
    most = max(1, scenario.model.num_layers // (pipeline * virtual))
    layers = int(rng.integers(most)) if recompute == "full" and rng.random() < 0.5 else 0
    return Plan(
        data_parallel=left,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        virtual_stages=virtual,
        pipeline_schedule=schedule,
        zero_stage=int(rng.integers(4)),
        sequence_parallel=bool(rng.integers(2)) and tensor > 1,
        recompute=recompute,
        recompute_layers=layers,
        micro_batch_size=micro,
        num_microbatches=max(1, share // micro),
        dp_replicate=one_of(divisors(left)) if rng.random() < 0.4 else 1,
        context_parallel=context,
        context_parallel_method=one_of(CONTEXT_METHODS) if context > 1 else "ring",
        expert_parallel=one_of(divisors(left * context)) if rng.random() < 0.5 else 1,
        expert_tensor_parallel=bool(rng.integers(2)) or tensor == 1,
    )


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", {"num_hidden_layers": 7, "max_position_embeddings": 32_768}),
    "uneven heads": ("llama", UNEVEN | {"num_hidden_layers": 9}),
    "mixture": ("mixtral", {"num_hidden_layers": 7, "max_position_embeddings": 32_768}),
    "deep": ("llama", {"num_hidden_layers": 61, "vocab_size": 4096}),
    "two kinds": ("t5", {"num_layers": 3}),
}


def small_model(name: str) -> ModelSpec:
    base, changes = MODELS[name]
    return sample_model(base, **changes)


@st.composite
def problems(draw: Any) -> Scenario:
    """A small model on a few accelerators, of which some plans may not fit."""
    name = draw(st.sampled_from(list(MODELS)))
    long = name in ("dense", "mixture")
    scenario = make_scenario(
        small_model(name),
        draw(st.sampled_from(["6xA100-80GB", "2x4xH100-SXM", "2x6xA100-80GB", "8xA100-40GB"])),
        seq_len=draw(st.sampled_from([256, 16_384] if long else [256, 512])),
        global_batch_size=draw(st.sampled_from([16, 24, 48])),
        software=draw(st.sampled_from(["shardplan", "megatron-core"])),
    )
    return with_share(scenario, draw(st.sampled_from([1.0, 0.1, 0.05, 0.04])))


PINNED = (
    "tensor_parallel",
    "pipeline_parallel",
    "context_parallel",
    "pipeline_schedule",
    "zero_stage",
    "sequence_parallel",
    "micro_batch_size",
    "dp_replicate",
)


def best_of(codes: Any, step: Any, rows: Any) -> tuple[int, float]:
    row = rows[np.lexsort((step[rows], codes[rows]))[0]]
    return int(codes[row]), float(step[row])


def winner(scenario: Scenario, pins: dict[str, Any]) -> tuple[int, float]:
    found = search(scenario, pins, top=1)
    return (int(not found.fits), found.seconds[0]) if found.plans else (2, np.inf)


def check(scenario: Scenario, seed: int) -> None:
    rng = np.random.default_rng(seed)
    plans = [draw_plan(rng, scenario) for _ in range(DRAWN)]
    table = PlanTable.from_plans(plans)
    legal = (legality_codes(scenario, table) == 0).nonzero()[0]
    assert len(legal) >= FEWEST
    plans, table = [plans[row] for row in legal], table.rows(legal)
    codes = verdicts(scenario, table)
    step = above(price(scenario, table).step, simulated_steps(scenario, table))
    free, every = winner(scenario, {}), np.arange(len(plans))
    if codes.min() < 2:
        assert at_least(best_of(codes, step, every), free)
    uneven = [plan for plan in plans if plan.virtual_stages > 2] or plans
    one = uneven[int(rng.integers(len(uneven)))]
    names = [name for name in PINNED if rng.random() < 0.5]
    pins = {name: getattr(one, name) for name in names}
    same = [all(getattr(plan, name) == pins[name] for name in names) for plan in plans]
    best = best_of(codes, step, np.flatnonzero(same))
    pinned = winner(scenario, pins)
    assert best[0] == 2 or at_least(best, pinned), (pins, best, pinned)
    assert at_least(pinned, free), (pins, pinned, free)


def at_least(one: tuple[int, float], other: tuple[int, float]) -> bool:
    return one >= (other[0], other[1] * (1.0 - CLOSE))


@given(problems(), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(5), **RELAXED)
def test_no_drawn_plan_beats_the_winner(scenario: Scenario, seed: int) -> None:
    check(scenario, seed)


@pytest.mark.slow(seconds=40)
@given(problems(), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(40), **RELAXED)
def test_no_drawn_plan_beats_the_winner_40_times(scenario: Scenario, seed: int) -> None:
    check(scenario, seed)


@pytest.mark.parametrize("name", ["llama-3-8b", "deep"])
def test_the_bounds_for_other_numbers_of_virtual_stages_hold(name: str) -> None:
    """Plans are left unpriced because of these laws: see ``virtual_stages``."""
    model = small_model(name) if name in MODELS else sample_model(name)
    software = "megatron-core" if name in MODELS else "shardplan"
    scenario = make_scenario(
        model, "8xA100-80GB", seq_len=2048, global_batch_size=48, software=software
    )
    pins = {"dp_replicate": 1}
    table = enumerate_plans(scenario.model, scenario.workload, 8, pins, every_cut=True)
    table = table.rows(legality_codes(scenario, table) == 0)
    table = table.rows(np.isin(table.pipeline_schedule, LOOPED_CODES) & (table.virtual_stages > 2))
    table = table.rows(np.random.default_rng(0).permutation(len(table))[:800])
    two = replace(table, virtual_stages=np.full(len(table), 2))
    assert (legality_codes(scenario, two) == 0).all()
    peak, least = price_table(scenario, table).peak, price_table(scenario, two).peak
    stages = np.isin(table.pipeline_schedule, SPLIT_CODES) & (table.recompute == FULL)
    assert (peak >= LEAST_SHARE * least)[~stages].all()
    assert (peak < least).any()
    steps = [
        table_steps(scenario, replace(table, recompute=np.full(len(table), code)))
        for code in range(len(SEARCHED_RECOMPUTE))
    ]
    assert (steps[0] <= steps[1] * (1.0 + CLOSE)).all()
    assert (steps[1] <= steps[2] * (1.0 + CLOSE)).all()


@pytest.mark.slow
@pytest.mark.parametrize("few", [0, space.FEW])
def test_ranks_share_short_sequences_where_that_is_faster(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shorter pieces are bounded where they are many, else candidates like all others."""
    monkeypatch.setattr(space, "FEW", few)
    cluster = "2x8xA100-PCIe-80GB"
    scenario = make_scenario("qwen2.5-32b", cluster, seq_len=4096, global_batch_size=64)
    found = search(scenario, top=1)
    assert found.plans[0].context_parallel > 1
    assert (found.counts.short_pieces > 0) == (few == 0)
    whole = search(scenario, {"context_parallel": 1}, top=1)
    assert found.seconds[0] < 0.95 * whole.seconds[0]
    for ranks in (2, 4):
        assert at_least(winner(scenario, {"context_parallel": ranks}), (0, found.seconds[0]))
    # objectives without a bound on the step
    smallest = search(scenario, {"pipeline_parallel": 1}, top=1, objective="memory")
    pinned = {"pipeline_parallel": 1, "context_parallel": 8}
    least = search(scenario, pinned, top=1, objective="memory")
    assert smallest.smallest_peak <= least.smallest_peak


def test_numbers_that_do_not_divide_the_layers_are_searched() -> None:
    """7 layers of a mixture on 6 accelerators, in 3 ranks of 2 stages, 61 layers in 16 of 3."""
    scenario = make_scenario(small_model("mixture"), "6xA100-80GB", global_batch_size=24)
    for pins in ({"pipeline_parallel": 3, "virtual_stages": 2}, {"pipeline_schedule": "zbv"}):
        assert winner(scenario, pins)[0] == 0
    deep = make_scenario(small_model("deep"), "8xA100-80GB", global_batch_size=48)
    pins = {"pipeline_parallel": 8, "pipeline_schedule": "interleaved_zero_bubble"}
    found = search(deep, pins, top=1)
    assert found.plans[0].virtual_stages == 7
    assert found.counts.more_stages > 0
    for virtual in range(2, 8):
        assert winner(deep, pins | {"virtual_stages": virtual})[1] >= found.seconds[0]


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_a_secondary_copy_of_the_weights_is_searched_where_the_trainer_has_it(share: float) -> None:
    scenario = make_scenario("llama-3-8b", "4x8xA100-80GB", seq_len=4096, global_batch_size=32)
    scenario = with_share(scenario, share)
    (whole,) = [one for one in searches_of(scenario, "deepspeed") if one.pins["zero_stage"] == 3]
    asked: dict[str, Any] = {"require": whole.require, "top": 1}
    free = search(whole.scenario, whole.pins, **asked)
    assert free.fits
    assert free.counts.copies > 0
    pinned = {}
    for ranks in (1, 2, 4, 8, 16, 32):
        found = search(whole.scenario, {**whole.pins, "secondary_ranks": ranks}, **asked)
        if found.fits:
            pinned[ranks] = found.seconds[0]
    assert free.seconds[0] == pytest.approx(min(pinned.values()), rel=CLOSE)
    assert free.plans[0].secondary_ranks > 1
    assert pinned[1] > free.seconds[0]
    without = search(scenario, {"zero_stage": 3, "pipeline_parallel": 1}, top=1)
    assert without.counts.copies == 0  # the bundled executor has none


def test_a_policy_of_recomputation_is_searched_where_the_trainer_lists_it() -> None:
    scenario = make_scenario(
        "llama-3-8b", "8xA100-40GB", seq_len=4096, global_batch_size=8, software="torchtitan"
    )
    free = search(scenario, top=1)
    pinned = {
        word: search(scenario, {"recompute": word}, top=1)
        for word in ("none", "full", "ops:every-2nd-mm")
    }
    assert all(found.fits for found in (free, *pinned.values()))
    assert free.plans[0].recompute == "ops:every-2nd-mm"
    assert free.seconds[0] == min(found.seconds[0] for found in pinned.values())
    assert free.seconds[0] < 0.95 * pinned["full"].seconds[0]
    ours = replace(scenario, software=software_profile("shardplan"))
    assert search(ours, top=1).plans[0].recompute in SEARCHED_RECOMPUTE


def test_the_fewest_neighbours_of_a_secondary_copy_bound_the_step() -> None:
    """Plans with more of them are left unpriced because of this law: see ``secondary_copies``."""
    scenario = make_scenario("llama-3-8b", "2x8xA100-80GB", seq_len=8192, global_batch_size=32)
    table = enumerate_plans(scenario.model, scenario.workload, 16, {"zero_stage": 3})
    table = table.rows(legality_codes(scenario, table) == 0)
    table = table.rows(table.shard_ranks % 8 == 0)
    two, *more = (
        table_steps(scenario, replace(table, secondary_ranks=np.full(len(table), n)))
        for n in (2, 4, 8)
    )
    assert len(table) > 100
    assert all((two <= one * (1.0 + CLOSE)).all() for one in more)


def own_layers(rng: np.random.Generator, layers: int, stages: int) -> Any:
    """Draw the layers of every stage; the first and the last may have none."""
    sizes = [int(rng.integers(2)), *[1] * (stages - 2), int(rng.integers(2))]
    if (left := layers - sum(sizes)) < 0:
        sizes[0] = sizes[-1] = 0
        left = layers - sum(sizes)
    more = np.bincount(rng.integers(stages, size=left), minlength=stages)
    return (np.array(sizes) + more).tolist()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(12))
def test_no_drawn_plan_with_given_layers_beats_the_winner(seed: int) -> None:
    """As many stages as layers and two ends are legal: embedding or head alone."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(4, 11))
    cluster = str(rng.choice(["6xA100-80GB", "8xA100-40GB", "2x6xA100-80GB"]))
    scenario = make_scenario(
        sample_model("llama", num_hidden_layers=layers), cluster, seq_len=256, global_batch_size=24
    )
    gpus = scenario.cluster.num_gpus
    depths = [n for n in divisors(gpus) if 2 <= n <= layers + 2]
    pipeline = int(rng.choice(depths))
    virtual = int(rng.integers(1, (layers + 2) // pipeline + 1))
    stages = layers + 2 if (layers + 2) % pipeline == 0 and seed % 2 else pipeline * virtual
    sizes = own_layers(rng, layers, stages)
    given_layers = replace(scenario, layer_ranges=stage_ranges(sizes, scenario.model))
    drawn = []
    for _ in range(DRAWN):
        plan = draw_plan(rng, scenario)
        if stages % plan.pipeline_parallel == 0:
            drawn.append(replace(plan, virtual_stages=stages // plan.pipeline_parallel))
    table = PlanTable.from_plans(drawn)
    table = table.rows(np.flatnonzero(legality_codes(given_layers, table) == 0))
    assert len(table) >= FEWEST
    codes = verdicts(given_layers, table)
    step = above(price(given_layers, table).step, simulated_steps(given_layers, table))
    assert at_least(best_of(codes, step, np.arange(len(table))), winner(given_layers, {}))


@pytest.mark.parametrize("layers", [4, 5])
def test_embedding_and_head_alone_are_tried_with_more_stages_than_layers(layers: int) -> None:
    """A vocabulary that takes as long as four layers, on six accelerators."""
    model = sample_model("llama", num_hidden_layers=layers, vocab_size=32_000)
    scenario = make_scenario(model, "6xA100-80GB", seq_len=512, global_batch_size=96)
    pins = {"tensor_parallel": 1, "zero_stage": 0, "recompute": "none", "pipeline_schedule": "1f1b"}
    free = search(scenario, pins, top=1, with_near=True)
    assert free.near is not None
    deep = free.near.pipeline_parallel * free.near.virtual_stages > layers
    assert np.unique(free.near.pipeline_parallel[deep]).tolist() == [6]
    staged = best_staged(scenario, free.plans, free.near, free.seconds[0])
    best = free.seconds[0] if staged is None else staged.step
    sizes = [layers - 4, *[1] * 4, 0]
    alone = replace(scenario, layer_ranges=stage_ranges(sizes, model))
    assert winner(alone, {**pins, "pipeline_parallel": 6})[1] >= best * (1.0 - GAIN)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_given_layers_do_not_improve_the_answer(seed: int) -> None:
    """Also with several stages on a rank, and with the embedding or the head alone."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(4, 11))
    cluster = str(rng.choice(["6xA100-80GB", "8xA100-40GB"]))
    scenario = make_scenario(
        sample_model("llama", num_hidden_layers=layers, vocab_size=32_000),
        cluster,
        seq_len=512,
        global_batch_size=24,
    )
    pins: dict[str, Any] = {"tensor_parallel": 1, "dp_replicate": 1, "zero_stage": 0}
    pipeline = int(rng.choice([n for n in divisors(scenario.cluster.num_gpus) if n > 1]))
    pins["pipeline_parallel"] = pipeline = min(pipeline, 4)
    pins["pipeline_schedule"] = str(rng.choice(["1f1b", "interleaved_1f1b", "zbv", "dualpipev"]))
    free = search(scenario, pins, top=10, with_near=True)
    if not free.plans:
        pytest.skip("more stages than layers")
    staged = best_staged(scenario, free.plans, free.near, min(free.seconds))
    best = min(free.seconds) if staged is None else staged.step
    most = (layers + 2) // pipeline
    looped = pins["pipeline_schedule"] == "interleaved_1f1b"
    for _ in range(6):
        virtual = 1 if pins["pipeline_schedule"] == "1f1b" else 2
        virtual = int(rng.integers(2, most + 1)) if looped and most > 2 else virtual
        if pipeline * virtual > layers + 2:
            continue
        sizes = own_layers(rng, layers, pipeline * virtual)
        given_layers = replace(scenario, layer_ranges=stage_ranges(sizes, scenario.model))
        _, step = winner(given_layers, {**pins, "virtual_stages": virtual})
        assert step >= best * (1.0 - GAIN), (pins, virtual, sizes)


def test_a_requirement_on_virtual_stages_chooses_among_all_numbers() -> None:
    scenario = make_scenario(small_model("deep"), "8xA100-80GB", global_batch_size=48)
    pins = {"pipeline_parallel": 8, "pipeline_schedule": "interleaved_1f1b"}
    for text in ("vp>=5", "vp==6"):
        (best,) = search(scenario, pins, require=parse_requirements(text), top=1).plans
        assert best.virtual_stages >= 5
    assert best.virtual_stages == 6


@pytest.mark.parametrize("asked", [{"front": True}, {"objective": "memory"}])
def test_fronts_and_the_smallest_plans_have_all_numbers_of_stages(asked: dict[str, Any]) -> None:
    scenario = make_scenario(small_model("deep"), "8xA100-80GB", global_batch_size=48)
    pins = {
        "pipeline_parallel": 8,
        "pipeline_schedule": "interleaved_1f1b",
        "recompute": "none",
        "zero_stage": 0,
    }
    rows = [
        replace(plan, virtual_stages=v)
        for plan in enumerate_plans(scenario.model, scenario.workload, 8, pins)
        if plan.virtual_stages == 2
        for v in range(2, 8)
    ]
    table = PlanTable.from_plans(rows)
    table = table.rows(legality_codes(scenario, table) == 0)
    priced = price(scenario, table)
    step = above(priced.step, simulated_steps(scenario, table))
    front = pareto_front(step, priced.peak) if "front" in asked else [np.argmin(priced.peak)]
    found = search(scenario, pins, top=1, **asked)
    assert found.seconds == pytest.approx(tuple(step[front]), rel=CLOSE)
    assert any(plan.virtual_stages > 2 for plan in found.plans)
