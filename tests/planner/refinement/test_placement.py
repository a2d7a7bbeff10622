"""Orders of ranks against every permutation of small graphs; what the answer of plan says."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planner
from cost_models.legality.rules import legality_codes
from cost_models.plan.plan import Plan
from cost_models.plan_file import read_plan_file
from cost_models.pricing.estimate import price
from cost_models.pricing.prediction import predict, scenario_of
from cost_models.pricing.table import price_table
from cost_models.units import format_seconds
from hardware_profiles.cluster.cluster_file import with_levels
from hardware_profiles.cluster.irregular_tree import levels_of_graph
from hardware_profiles.cluster.links.groups import link_graph
from hardware_profiles.cluster.links.nvlink_domains import exchange_bandwidth
from hardware_profiles.cluster.links.tree import neighbour_link, ring_link, tree_of
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.cluster.schema import Cluster, Figure, Level
from planner.assessment.assess import assess
from planner.cli.app import main
from planner.refinement.placed_plan import groups_of, ordered_step
from planner.refinement.placement import place
from planner.refinement.rank_orders import Groups, best_order, orders_of_axes
from planner.search.space import enumerate_plans
from tests.samples import make_scenario

BOX = """
nodes = 1
gpus_per_node = 8
accelerator = "L40S"

[[level]]
name = "PCIe switch"
above = [0, 1, 2, 3, 0, 1, 2, 3]
bandwidth = 25e9

[[level]]
name = "socket"
each = [3, 1]
bandwidth = 20e9

[[level]]
name = "UPI"
each = 2
bandwidth = 16e9
"""
GRIDS = {4: [(2, 2), (4, 1)], 5: [(5, 1)], 6: [(2, 3), (3, 2)], 8: [(2, 4), (4, 2), (2, 2, 2)]}


def random_tree(rng: np.random.Generator, num_gpus: int) -> Cluster:
    """Return a cluster whose links are a random tree, its leaves in any order."""
    levels: list[Level] = []
    below = num_gpus
    while below > 1:
        switches = int(rng.integers(1, below)) if len(levels) < 2 else 1
        above = np.concatenate([np.arange(switches), rng.integers(0, switches, below - switches)])
        figures = [Figure(float(w), "assumed", "test") for w in rng.integers(5, 100, 2 * below)]
        levels.append(
            Level(
                f"level {len(levels)}",
                tuple(rng.permutation(above).tolist()),
                tuple(figures[:below]),
                tuple(replace(late, value=1e-3 * late.value) for late in figures[below:]),
                bool(rng.random() < 0.3),
            )
        )
        below = switches
    cluster = replace(parse_cluster("8xL40S"), gpus_per_node=num_gpus)
    return with_levels(cluster, tuple(levels))


def groups_of_grid(grid: tuple[int, ...], rng: np.random.Generator) -> list[Groups]:
    """Return the groups of every axis; the outermost sends messages in lines."""
    strides = [math.prod(grid[axis + 1 :]) for axis in range(len(grid))]
    rings = [axis > 0 or bool(rng.random() < 0.5) for axis in range(len(grid))]
    exchanges = [ring and bool(rng.random() < 0.5) for ring in rings]
    axes = zip(grid, strides, rings, exchanges, strict=True)
    return [Groups(*each) for each in axes if each[0] > 1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(60))
def test_the_best_order_equals_brute_force_over_all_permutations(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_gpus = int(rng.choice([4, 5, 6]))
    _check(rng, num_gpus)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1))
def test_it_does_so_on_eight_accelerators(seed: int) -> None:
    _check(np.random.default_rng(100 + seed), 8)


def _check(rng: np.random.Generator, num_gpus: int) -> None:
    cluster = random_tree(rng, num_gpus)
    choices = GRIDS[num_gpus]
    grid = choices[int(rng.integers(len(choices)))]
    groups = groups_of_grid(grid, rng)
    weights = rng.integers(1, 1000, (len(groups), 3)).tolist()
    hidden = float(rng.integers(0, 200))

    def cost(order: tuple[int, ...]) -> float:
        """Seconds of all axes; those of the last one are hidden in part, as a step's are."""
        ordered = replace(cluster, rank_order=order)
        seconds = []
        for axis, (much, often, hops) in zip(groups, weights, strict=True):
            link = ring_link if axis.ring else neighbour_link
            found = link(ordered, axis.size, axis.stride, num_gpus)
            seconds.append(much / found.bandwidth + often * found.latency + hops * found.hop)
            if axis.exchanges:  # more than once a domain, and once
                for copies in (0, 4):
                    width = exchange_bandwidth(ordered, axis.size, axis.stride, copies=copies)
                    seconds[-1] += much / float(width)
        return sum(seconds[:-1]) + max(0.0, seconds[-1] - hidden)

    found = best_order(tree_of(cluster), groups, grid, cost)
    least = min(map(cost, itertools.permutations(range(num_gpus))))
    assert found.proven
    assert found.cost == pytest.approx(least, rel=1e-9)
    assert found.cost == cost(found.order)
    assert found.usual_cost == cost(tuple(range(num_gpus)))
    assert found.order[0] == 0
    assert sorted(found.order) == list(range(num_gpus))


def test_larger_trees_get_an_order_that_is_no_worse_and_here_the_best() -> None:
    """Four racks of four, numbered so that neighbours are never in one: sorting is best."""
    figure = (Figure(10.0, "assumed", "test"),)
    late = (Figure(1e-6, "assumed", "test"),)
    racks = Level("rack", tuple(rank % 4 for rank in range(16)), figure, late)
    spine = Level("spine", (0,) * 4, figure, late)
    cluster = with_levels(replace(parse_cluster("8xL40S"), gpus_per_node=16), (racks, spine))
    groups = [Groups(4, 1, True), Groups(4, 4, True)]

    def cost(order: tuple[int, ...]) -> float:
        ordered = replace(cluster, rank_order=order)
        inner, outer = (ring_link(ordered, size, stride, 16) for size, stride, *_ in groups)
        return 100.0 / inner.bandwidth + 1.0 / outer.bandwidth

    found = best_order(tree_of(cluster), groups, (4, 4), cost)
    assert not found.proven
    assert found.cost == pytest.approx(100.0 / 10.0 + 1.0 / 2.5)
    assert found.usual_cost == pytest.approx(100.0 / 2.5 + 1.0 / 10.0)
    assert [rank % 4 for rank in found.order[:4]] == [0] * 4


def test_exchanges_mend_what_no_order_of_axes_can() -> None:
    """Racks of three and nine: one group of four fills the small one instead of three."""
    wide, thin = Figure(10.0, "assumed", "test"), Figure(1.0, "assumed", "test")
    racks = Level("rack", (0, 0, 0, *(1,) * 9), (wide,), (thin,))
    spine = Level("spine", (0, 0), (thin,), (thin,))
    cluster = with_levels(replace(parse_cluster("8xL40S"), gpus_per_node=12), (racks, spine))
    groups = [Groups(4, 3, True)]

    def cost(order: tuple[int, ...]) -> float:
        return 1.0 / ring_link(replace(cluster, rank_order=order), 4, 3, 12).bandwidth

    found = best_order(tree_of(cluster), groups, (4, 3), cost)
    assert (found.cost, found.usual_cost) == (1.0, 3.0)
    small = [{found.order[rank + 3 * i] for i in range(4)} & {0, 1, 2} for rank in range(3)]
    assert sorted(map(len, small)) == [0, 0, 3]


def test_orders_of_axes_keep_rank_0_and_are_permutations() -> None:
    orders = orders_of_axes([2, 1, 2, 3], np.array([2, 3, 0, 1, 4, 5, 6, 7, 8, 9, 10, 11]))
    assert len(orders) == 6
    assert all(sorted(order) == list(range(12)) and order[0] == 0 for order in orders.tolist())


@pytest.fixture
def box(tmp_path: Path) -> Cluster:
    path = tmp_path / "box.toml"
    path.write_text(BOX)
    return parse_cluster(str(path))


@pytest.mark.slow
def test_a_plan_s_order_has_the_shortest_step_of_all_that_were_tried(box: Cluster) -> None:
    answer = planner.plan("llama-3.2-1b", box, global_batch_size=16, fix="tp=2,pp=2", top=1)
    plan = answer.best  # type: ignore[union-attr]
    scenario = answer.scenario  # type: ignore[union-attr]
    found = place(scenario, plan)
    assert set(groups_of(plan)) == {"tensor", "data", "pipeline"}
    rng = np.random.default_rng(0)
    for _ in range(20):
        order = (0, *(1 + rng.permutation(7)).tolist())
        assert found.cost <= ordered_step(scenario, plan, order)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["2x4xA100-80GB", "4x2xA100-PCIe-80GB", "8xH100-SXM"])
@pytest.mark.parametrize("fix", ["tp=2,pp=1", "tp=4", "tp=2,pp=2"])
def test_on_equal_nodes_the_usual_order_is_within_half_a_percent_of_the_best(
    name: str, fix: str
) -> None:
    """Stages may as well be the nearest where data ranks hide what they send."""
    answer = planner.plan("llama-3.2-1b", name, global_batch_size=64, fix=fix, top=1)
    assert answer.ranked[0].placed is None  # type: ignore[union-attr]
    found = place(answer.scenario, answer.best)  # type: ignore[union-attr]
    assert found.cost <= found.usual_cost <= 1.005 * found.cost


def called(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert not ended.value.code


@pytest.mark.slow
def test_the_answer_says_the_order_and_why_and_writes_it(
    box: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "plan",
        "llama-3.2-1b",
        box.name,
        "--global-batch-size",
        "32",
        "--fix",
        "tp=2",
        "--top",
        "1",
    ]
    path = tmp_path / "plan.json"
    called([*words, "-v", "-o", str(path)])
    said = " ".join(capsys.readouterr().out.split())
    assert "% less, simulated) with ranks 0, 1, 2" in said
    assert "with ranks 0, 1, 2, … on the accelerators 0, 4, 1, 5, 2, 6, 3, 7" in said
    assert "tensor groups of 2" in said
    assert "talk over PCIe switch, 25 GB/s, instead of" in said
    assert "no plan is faster in any order; that is what -o writes" in said
    file = read_plan_file(path)
    assert file.rank_order is not None
    step = file.prediction["time"]["step_seconds"]
    assert f"Step {format_seconds(step)}" in said
    fresh = predict(scenario_of(file), file.plan, file.layer_ranges)
    usual = replace(file, cluster=replace(file.cluster, rank_order=None))
    before = predict(scenario_of(usual), file.plan, file.layer_ranges)
    assert fresh.time.step_seconds == pytest.approx(step)
    assert before.time.step_seconds > 1.05 * step
    called([*words, "--json"])
    document = json.loads(capsys.readouterr().out)
    placed, first = document["placed"], document["plans"][0]
    assert (first["placed"], first["plan"]) == (placed, file.plan.to_dict())
    assert first["time"] == file.prediction["time"]
    assert placed["rank_order"] == list(file.rank_order)
    assert placed["step_seconds"] == pytest.approx(step)
    assert placed["proven"]


@pytest.mark.slow
def test_surveys_and_inverse_questions_place_ranks(box: Cluster, tmp_path: Path) -> None:
    """A step that is short enough in an order of its own alone counts, and is what is written."""
    asked: dict[str, Any] = {
        "global_batch_size": 16,
        "fix": "tp=2,pp=1,cp=1,zero=1,mbs=1",
        "top": 2,
    }
    asked["require"] = "recompute==none,sp==on"
    small: Any = planner.plan("llama-3.2-1b", box, objective="memory", **asked)
    usual = assess(small.scenario, small.result.plans[0])
    alone = planner.plan("llama-3.2-1b", box, **asked).ranked[0].placed  # type: ignore[union-attr]
    assert alone is not None
    within = f"{asked['require']},step<={1.01 * alone.step:.6f}s"
    assert alone.step < 0.9 * usual.time.step_seconds
    for options in (
        {"price": 1, "tokens": "1B"},
        {"find": "fewest-gpus", "gpus_at_most": None},
        {},
    ):
        answer = planner.plan("llama-3.2-1b", box, **{**asked, "require": within, **options})
        survey = getattr(answer, "answer", answer)
        best = survey.ranked[0]
        assert best.placed.order == alone.order
        assert best.step.seconds == pytest.approx(alone.step)
        assert survey.plan_file().rank_order == alone.order
        assert "Order      " in str(answer)
        assert "own order of ranks" in str(answer)
        assert json.loads(json.dumps(survey.to_dict()))["plans"][0]["placed"]["gain"] > 0.1
        assert not any("in the order of the accelerators" in said for said in survey.assumptions)
    least = small.ranked[0].placed
    assert least is not None
    assert assess(least.scenario, least.plan).memory.peak_bytes == usual.memory.peak_bytes
    assert least.step < usual.time.step_seconds
    front = planner.plan("llama-3.2-1b", box, pareto="time,memory", **asked)
    assert front.ranked[0].placed.order == alone.order  # type: ignore[union-attr]
    nodes = tmp_path / "nodes.toml"
    two = BOX.replace("nodes = 1", "nodes = 2").replace(
        "above = [0, 1, 2, 3, 0, 1, 2, 3]", "each = 4"
    )
    nodes.write_text(two)
    notes = planner.plan("llama-3.2-1b", nodes, pareto="time,memory", **asked).assumptions
    assert any("on fronts of more than 8 it is not optimised" in note for note in notes)


@pytest.mark.slow
def test_a_pipeline_through_all_ranks_has_an_order_too(tmp_path: Path) -> None:
    """Stages on accelerators whose neighbours by number sit on the other socket."""
    path = tmp_path / "box.toml"
    path.write_text(BOX.replace("16e9", "1e9").replace("[3, 1]", "2"))
    answer = planner.plan("llama-3.2-1b", path, global_batch_size=16, fix="pp=8", top=1)
    assert set(groups_of(answer.best)) == {"pipeline"}  # type: ignore[union-attr]
    placed = answer.ranked[0].placed  # type: ignore[union-attr]
    assert placed is not None
    sockets = [rank % 4 // 2 for rank in (*placed.order, 0)]
    assert list(itertools.pairwise(sockets)).count((0, 1)) == 1  # twice in the usual order


@pytest.mark.slow
def test_another_grid_wins_where_its_order_is_better(tmp_path: Path) -> None:
    path = tmp_path / "box.toml"
    slow = BOX.replace("16e9", "2e9").replace("20e9", "5e9").replace("[3, 1]", "2")
    path.write_text(slow)
    answer = planner.plan("llama-3.2-1b", path, global_batch_size=16, top=1)
    placed = answer.ranked[0].placed  # type: ignore[union-attr]
    assert len(answer.assessments) == 1  # type: ignore[union-attr]
    assert placed is not None
    assert placed.rank != 0
    steps = [ordered_step(placed.scenario, placed.plan, order) for order in (None, placed.order)]
    assert steps[1] == pytest.approx(placed.step)
    assert placed.step < placed.usual_step <= steps[0]


@pytest.mark.slow
def test_an_order_that_is_given_is_priced_and_kept(box: Cluster) -> None:
    torn = replace(box, rank_order=(0, 1, 2, 3, 4, 5, 6, 7))
    plan = Plan(4, 2, zero_stage=1, num_microbatches=4)
    options = {"global_batch_size": 16, "tensor_parallel": 2, "zero_stage": 1}
    usual = planner.fit("llama-3.2-1b", torn, **options)
    paired = planner.fit(
        "llama-3.2-1b", replace(box, rank_order=(0, 4, 1, 5, 2, 6, 3, 7)), **options
    )
    steps = [one.assessment.time.step_seconds for one in (usual, paired)]  # type: ignore[union-attr]
    assert steps[1] < steps[0]
    answer = planner.plan("llama-3.2-1b", torn, global_batch_size=16, fix="tp=2", top=1)
    assert answer.ranked[0].placed is None  # type: ignore[union-attr]
    assert plan.world_size == 8


def level(name: str, each: list[int], gigabytes: float, *, lanes: bool = False) -> Level:
    above = tuple(number for number, size in enumerate(each) for _ in range(size))
    figures = (Figure(gigabytes * 1e9, "assumed", "test"),), (Figure(5e-6, "assumed", "test"),)
    return Level(name, above, *figures, lanes)


SHAPES = {
    "one NVLink domain over four trays": (4, [level("NVLink5", [16], 900, lanes=True)]),
    "nodes of four": (
        4,
        [level("NVLink4", [4] * 4, 450, lanes=True), level("network", [4], 50, lanes=True)],
    ),
    "two racks, an oversubscribed uplink": (
        4,
        [
            level("NVLink4", [4] * 4, 450, lanes=True),
            level("rack", [3, 1], 50, lanes=True),
            level("uplink", [2], 40),
        ],
    ),
    "a box of PCIe alone": (
        16,
        [level("PCIe", [4] * 4, 25), level("socket", [2, 2], 20), level("UPI", [2], 16)],
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SHAPES)
def test_the_chattiest_groups_come_to_the_fastest_links_however_accelerators_are_numbered(
    name: str,
) -> None:
    gpus_per_node, levels = SHAPES[name]
    base = replace(
        parse_cluster("2x8xH100-SXM"), num_nodes=16 // gpus_per_node, gpus_per_node=gpus_per_node
    )
    shuffled = np.random.default_rng(1).permutation(16)
    above = np.empty(16, dtype=int)
    above[shuffled] = levels[0].above
    other = [replace(levels[0], above=tuple(above.tolist())), *levels[1:]]
    plan = Plan(4, 4, zero_stage=1, sequence_parallel=True, num_microbatches=4)
    costs = []
    for tree in (levels, other):
        cluster = with_levels(base, tuple(tree))
        scenario = replace(make_scenario("llama-3-8b", seq_len=4096), cluster=cluster)
        found = place(scenario, plan)
        ordered = replace(cluster, rank_order=found.order)
        assert ring_link(ordered, 4, 1, 16).level == 0  # tensor-parallel groups
        costs.append(found.cost)
    assert costs[1] == pytest.approx(costs[0], rel=1e-9)


def test_a_networkx_graph_is_planned_on() -> None:
    cluster = with_levels(
        replace(parse_cluster("2x8xH100-SXM"), num_nodes=4, gpus_per_node=4),
        tuple(SHAPES["two racks, an oversubscribed uplink"][1]),
    )
    graph = link_graph(cluster)
    again = with_levels(cluster, levels_of_graph(graph))
    plan = Plan(2, 4, 2, zero_stage=1, num_microbatches=4)
    steps = [
        ordered_step(replace(make_scenario(global_batch_size=8), cluster=one), plan, None)
        for one in (cluster, again)
    ]
    # as the graph has it, a rank may take all of a link; the file said lanes
    assert steps[1] <= steps[0]


@pytest.mark.slow
def test_a_table_is_priced_as_every_row_alone(box: Cluster) -> None:
    scenario = replace(make_scenario("mixtral", global_batch_size=32), cluster=box)
    table = enumerate_plans(scenario.model, scenario.workload, 8, {})
    legal = table.rows(legality_codes(scenario, table) == 0)
    rows = np.random.default_rng(0).choice(len(legal), 10, replace=False)
    whole = price_table(scenario, legal).step[rows]
    alone = [float(price(scenario, legal.rows([row])).step[0]) for row in rows.tolist()]
    assert whole.tolist() == alone
