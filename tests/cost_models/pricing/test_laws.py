"""Laws that hold for the price of any legal plan, drawn at random."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from msgspec.structs import astuple

from cost_models.compute.hardware_flops import hardware_flops_per_step
from cost_models.compute.rates import training_rates
from cost_models.memory.ledger import MOMENTS
from cost_models.memory.peak import timelines
from cost_models.model.families import model_spec
from cost_models.model.spec import ModelSpec
from cost_models.partition.plan_stages import default_layer_ranges, pipeline_rank
from cost_models.partition.rank_parameters import rank_parameters
from cost_models.partition.rank_view import RankView
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.workload import Workload
from cost_models.pricing.estimate import price, rank_communication
from cost_models.pricing.prediction import predict
from cost_models.pricing.simulated_steps import simulated_steps
from cost_models.scenario import Scenario
from cost_models.step_time.rank_time import device_seconds
from hardware_profiles.cluster.build import build_cluster
from hardware_profiles.cluster.catalogue import find_accelerator
from hardware_profiles.cluster.links.tree import levels_of_tiers
from hardware_profiles.cluster.schema import Cluster, Figure
from hardware_profiles.software.trainer import software_profile
from tests.drawn_plans import A100, DEEPSEEK, SETTINGS, asked, is_legal

SAME = 1 + 1e-12
# with peer-to-peer and without, full meshes, PCIe, unknown energies, shared links to the host
ACCELERATORS = ("A100-SXM-80GB", "H100-SXM-80GB", "RTX-4090", "MI300X", "L4", "V100-SXM-32GB")


def faster(figure: Figure | None, factor: float) -> Figure | None:
    return None if figure is None else replace(figure, value=factor * figure.value)


@st.composite
def placed(draw: st.DrawFn) -> tuple[Scenario, Plan]:
    """A legal plan on one of several kinds of clusters."""
    scenario, plan = draw(asked())
    chip = find_accelerator(draw(st.sampled_from(ACCELERATORS)))
    assume(scenario.workload.precision in chip.peak_flops)
    per_node = draw(st.sampled_from([n for n in (1, 2, 4, 8) if plan.world_size % n == 0]))
    cluster = build_cluster(chip, num_nodes=plan.world_size // per_node, gpus_per_node=per_node)
    return replace(scenario, cluster=cluster), plan


def step(scenario: Scenario, plan: Plan) -> tuple[float, float]:
    """Return the seconds of a step by the formula, and by the simulated pipeline."""
    table = PlanTable.from_plans([plan])
    return float(price(scenario, table).step[0]), float(simulated_steps(scenario, table)[0])


# --- bandwidths ----------------------------------------------------------------------------------


def with_bandwidth(cluster: Cluster, name: str, factor: float) -> Cluster:
    """Return the cluster with another bandwidth of the accelerators, or of a tier of links."""
    chip = cluster.accelerator
    if name == "inner":
        chip = replace(chip, link_bandwidth=faster(chip.link_bandwidth, factor))  # type: ignore[arg-type]
    elif name != "outer":
        chip = replace(chip, **{name: faster(getattr(chip, name), factor)})
    changed = {"inner": 0, "outer": len(cluster.tiers) - 1}.get(name, -1)
    tiers = tuple(
        replace(
            tier,
            bandwidth=faster(tier.bandwidth, factor),  # type: ignore[arg-type]
            peer_bandwidth=faster(tier.peer_bandwidth, factor),
        )
        if number == changed
        else tier
        for number, tier in enumerate(cluster.tiers)
    )
    return replace(cluster, accelerator=chip, tiers=tiers)


BANDWIDTHS = ("memory_bandwidth", "host_bandwidth", "host_memory_bandwidth", "inner", "outer")


@SETTINGS
@given(placed(), st.sampled_from(BANDWIDTHS), st.floats(0.05, 0.999))
def test_a_step_never_takes_less_where_a_bandwidth_is_lower(
    case: tuple[Scenario, Plan], name: str, factor: float
) -> None:
    scenario, plan = case
    slower = replace(scenario, cluster=with_bandwidth(scenario.cluster, name, factor))
    for before, after in zip(step(scenario, plan), step(slower, plan), strict=True):
        assert after * SAME >= before


@SETTINGS
@given(placed(), st.floats(1.0, 50.0))
def test_a_step_never_takes_less_where_messages_take_longer(
    case: tuple[Scenario, Plan], factor: float
) -> None:
    scenario, plan = case
    cluster = scenario.cluster
    tiers = tuple(
        replace(
            tier,
            latency=faster(tier.latency, factor),  # type: ignore[arg-type]
            peer_latency=faster(tier.peer_latency, factor),
        )
        for tier in cluster.tiers
    )
    later = replace(scenario, cluster=replace(cluster, tiers=tiers))
    for before, after in zip(step(scenario, plan), step(later, plan), strict=True):
        assert after * SAME >= before


# --- orders --------------------------------------------------------------------------------------


@st.composite
def moved(draw: st.DrawFn) -> tuple[Scenario, Plan, tuple[int, ...]]:
    """A legal plan, and an order of nodes and of the accelerators of each node."""
    scenario, plan = draw(placed())
    each, count = scenario.cluster.gpus_per_node, scenario.cluster.num_gpus
    # only whole domains of the inner links change places
    assume(scenario.cluster.tiers[0].domain_size in (each, count))
    order: list[int] = []
    for node in draw(st.permutations(range(scenario.cluster.num_nodes))):
        order += draw(st.permutations(range(node * each, (node + 1) * each)))
    return scenario, plan, tuple(order)


def experts_on_two_nodes() -> tuple[Scenario, Plan, tuple[int, ...]]:
    """Two experts of a token, each node reached once, and the default order."""
    plan = Plan(data_parallel=2, expert_parallel=2, expert_tensor_parallel=False)
    workload = Workload(seq_len=64, global_batch_size=2, precision="bf16")
    cluster = build_cluster(A100, num_nodes=2, gpus_per_node=1)
    model = model_spec(DEEPSEEK, name="deepseek_v2")
    return Scenario(model, cluster, workload, software_profile("nemo")), plan, (0, 1)


@SETTINGS
@given(moved())
@example(experts_on_two_nodes())
def test_equal_accelerators_may_change_places(
    case: tuple[Scenario, Plan, tuple[int, ...]],
) -> None:
    scenario, plan, order = case
    after = replace(scenario, cluster=replace(scenario.cluster, rank_order=order))
    assert step(after, plan) == step(scenario, plan)


@SETTINGS
@given(moved())
@example(experts_on_two_nodes())
def test_levels_of_equal_domains_are_priced_as_such(
    case: tuple[Scenario, Plan, tuple[int, ...]],
) -> None:
    """A tree of equal domains that is described level by level."""
    scenario, plan, order = case
    cluster = scenario.cluster
    assume(all(tier.peer_bandwidth is None for tier in cluster.tiers))
    levels = replace(cluster, levels=levels_of_tiers(cluster.tiers, cluster.num_gpus))
    for rank_order in (None, order):
        after = replace(scenario, cluster=replace(levels, rank_order=rank_order))
        assert step(after, plan) == pytest.approx(step(scenario, plan), rel=1e-9)


@SETTINGS
@given(placed(), st.data())
def test_plans_of_a_table_may_change_places(
    case: tuple[Scenario, Plan], data: st.DataObject
) -> None:
    scenario, plan = case
    others = [replace(plan, zero_stage=z, micro_batch_size=n) for z in range(4) for n in (1, 2, 3)]
    rows = [plan, *(each for each in others if is_legal_with_its_batch(scenario, each))]
    order = np.array(data.draw(st.permutations(range(len(rows)))))
    table = PlanTable.from_plans(rows)
    before, after = price(scenario, table), price(scenario, table.rows(order))
    for one, other in ((before.memory, after.memory), (before.time, after.time)):
        for column, moved in zip(astuple(one), astuple(other), strict=True):
            assert np.array_equal(np.asarray(column)[order], moved)


def is_legal_with_its_batch(scenario: Scenario, plan: Plan) -> bool:
    batch = replace(scenario.workload, global_batch_size=plan.global_batch_size)
    return is_legal(replace(scenario, workload=batch), plan)


# --- sums over ranks -----------------------------------------------------------------------------


def views(scenario: Scenario, plan: Plan) -> list[RankView]:
    """Every pipeline rank."""
    ranges, table = default_layer_ranges(scenario, plan), PlanTable.from_plans([plan])
    return [
        RankView(scenario, table, pipeline_rank(scenario, plan, ranges, rank))
        for rank in range(plan.pipeline_parallel)
    ]


def second_copies(model: ModelSpec, plan: Plan) -> float:
    """A tied projection is stored twice where the pipeline has several ranks."""
    tied = model.tie_embeddings and plan.pipeline_parallel > 1
    return float(model.head_multiply) if tied else 0.0


@SETTINGS
@given(asked())
def test_no_parameter_is_lost_or_held_twice(case: tuple[Scenario, Plan]) -> None:
    """Over pipeline, tensor and expert ranks, but for tensors that each of them holds whole."""
    scenario, plan = case
    model, table = scenario.model, PlanTable.from_plans([plan])
    alone = replace(plan, tensor_parallel=1)
    whole = sum(
        float(counts.total[0] - counts.expert_total[0])
        + float(counts.expert_total[0]) * plan.expert_parallel
        for counts in (
            rank_parameters(model, view.rank, PlanTable.from_plans([alone]))
            for view in views(scenario, plan)
        )
    )
    assert whole == pytest.approx(model.num_parameters + second_copies(model, plan), rel=1e-12)
    shards = sum(
        float(rank_parameters(model, view.rank, table).total[0]) for view in views(scenario, plan)
    )
    ranks = plan.tensor_parallel * plan.expert_parallel
    assert whole <= shards * ranks * SAME


@SETTINGS
@given(asked())
def test_the_shards_of_zero_3_are_the_whole_states(case: tuple[Scenario, Plan]) -> None:
    scenario, plan = case
    plan = replace(plan, offload="none", expert_parallel=1, zero_stage=3)
    one = replace(plan, data_parallel=1, dp_replicate=1, context_parallel=1, secondary_ranks=1)
    assume(plan.shard_ranks > 1 and scenario.software.sharding.largest_zero_stage >= 3)
    # adafactor and muon have states of whole matrices
    assume(scenario.workload.optimizer in ("adamw", "sgd"))
    assume(is_legal_with_its_batch(scenario, plan))
    sums = []
    for each in (plan, one):
        ranges = default_layer_ranges(scenario, each)
        states = [
            line[MOMENTS.index("optimizer")]
            for line in timelines(scenario, replace(each, zero_stage=3), ranges)
        ]
        sums.append(sum(float(s.optimizer) + float(s.gradients) for s in states))
    assert sums[0] * plan.shard_ranks == pytest.approx(sums[1], rel=1e-9)


@SETTINGS
@given(asked())
def test_pipeline_ranks_together_compute_what_one_rank_computes(
    case: tuple[Scenario, Plan],
) -> None:
    scenario, plan = case
    plan = replace(plan, recompute="none")
    assume(is_legal_with_its_batch(scenario, plan))
    rate = training_rates(
        scenario.cluster.accelerator, scenario.workload.precision, scenario.software
    )
    one = replace(plan, pipeline_parallel=1, virtual_stages=1, pipeline_schedule="1f1b")
    for name in ("forward", "backward", "weights", "core"):
        together, alone = (
            sum(
                float(np.ravel(getattr(device_seconds(view, rate), name))[0])
                for view in views(scenario, each)
            )
            for each in (plan, one)
        )
        assert together == pytest.approx(alone, rel=1e-9)


@SETTINGS
@given(asked())
def test_flop_do_not_depend_on_how_ranks_share_them(case: tuple[Scenario, Plan]) -> None:
    scenario, plan = case
    assume(scenario.workload.adapter == "none")  # see ``flops._adapter_extras``
    plan = replace(plan, recompute="none", offload="none")
    other = Plan(
        tensor_parallel=plan.tensor_parallel,
        # ranks that do not share a sequence all multiply with the matrices that each of them holds
        sequence_parallel=plan.sequence_parallel,
        expert_tensor_parallel=plan.expert_tensor_parallel,
        # attention by blocks skips those that the causal mask hides
        context_parallel=plan.context_parallel,
        context_parallel_method=plan.context_parallel_method,
        num_microbatches=plan.num_microbatches * plan.data_parallel,
        micro_batch_size=plan.micro_batch_size,
    )
    flops = [
        float(
            np.ravel(
                hardware_flops_per_step(
                    scenario.model, scenario.workload, PlanTable.from_plans([each])
                )
            )[0]
        )
        for each in (plan, other)
    ]
    assert flops[0] == pytest.approx(flops[1], rel=1e-12)


@SETTINGS
@given(asked())
def test_each_hidden_state_that_is_sent_is_received(case: tuple[Scenario, Plan]) -> None:
    """Once forward and once backward between neighbouring stages on different ranks."""
    scenario, plan = case
    ranks = [view.rank for view in views(scenario, plan)]
    inside = sum(rank.has_adjacent_stages for rank in ranks)
    borders = plan.num_stages - 1 - inside
    assert sum(rank.hidden_states_sent for rank in ranks) == 2 * borders
    ranges = default_layer_ranges(scenario, plan)
    sent = [
        by_axis.get(("pipeline", "send")) for by_axis in rank_communication(scenario, plan, ranges)
    ]
    count = sum(float(np.ravel(each.count)[0]) for each in sent if each is not None)
    if not scenario.model.tie_embeddings:
        assert count == 2 * borders * plan.num_microbatches


# --- intervals -----------------------------------------------------------------------------------


def intervals(scenario: Scenario, plan: Plan) -> list[tuple[float, float, float]]:
    found = predict(scenario, plan, default_layer_ranges(scenario, plan))
    memory, time = found.memory, found.time
    return [
        (memory.low_bytes, memory.peak_bytes, memory.high_bytes),
        (time.low_seconds, time.step_seconds, time.high_seconds),
    ]


@SETTINGS
@given(placed())
def test_intervals_contain_their_centre_and_grow_with_assumed_links(
    case: tuple[Scenario, Plan],
) -> None:
    scenario, plan = case
    cluster = scenario.cluster

    def known(kind: Any) -> Scenario:
        chip = cluster.accelerator
        changed = {
            f.name: replace(getattr(chip, f.name), kind=kind)
            for f in fields(chip)
            if f.name in ("link_share", "host_memory_bandwidth", "link_bandwidth")
            and getattr(chip, f.name) is not None
        }
        tiers = tuple(
            replace(tier, bandwidth=replace(tier.bandwidth, kind=kind)) for tier in cluster.tiers
        )
        chip = replace(chip, **changed)
        return replace(scenario, cluster=replace(cluster, accelerator=chip, tiers=tiers))

    for found in (scenario, known("measured"), known("assumed")):
        for low, centre, high in intervals(found, plan):
            assert 0.0 < low <= centre <= high
    narrow, wide = (intervals(known(kind), plan)[1] for kind in ("datasheet", "assumed"))
    assert narrow[1] == wide[1]
    assert wide[0] <= narrow[0]
    assert narrow[2] <= wide[2]
