"""Traffic of experts: sums worked out by hand, and tables that price as their rows do."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cost_models.activations.selective_ops import kept_results
from cost_models.communication.expert_parallel import (
    expert_groups,
    exposed_all_to_all_seconds,
    max_experts_per_token,
    most_loaded,
    routed_tokens,
)
from cost_models.communication.seconds import EXCHANGE_SHARE, axis_seconds
from cost_models.communication.traffic import Traffic
from cost_models.communication.volumes import rank_traffic
from cost_models.partition.rank_parameters import rank_parameters
from cost_models.partition.rank_view import RankView
from cost_models.partition.stages import even_split_contents
from cost_models.plan.factored import factored
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.workload import Workload
from cost_models.scenario import Scenario
from hardware_profiles.cluster.links.nvlink_domains import exchange_bandwidth
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.software.trainer import SoftwareProfile, software_profile
from tests.samples import rank_view, sample_model

# 2 nodes of 8 with a NIC of 50 GB/s for each accelerator
CLUSTER = parse_cluster("2x8xH100-SXM-80GB")
WORKLOAD = Workload(seq_len=64, global_batch_size=8)
MODEL = sample_model("mixtral")  # 4 experts, 2 for each token, 4 layers
PLANS = [
    Plan(
        4,
        2,
        zero_stage=zero,
        num_microbatches=2,
        expert_parallel=experts,
        expert_tensor_parallel=cut,
        recompute=recompute,  # type: ignore[arg-type]
    )
    for zero in range(4)
    for experts in (1, 2, 4)
    for cut in (True, False)
    for recompute in ("none", "full")
]


def traffic_of(plan: Plan) -> dict[tuple[str, str], tuple[float, float]]:
    found = rank_traffic(rank_view(MODEL, WORKLOAD, None, plan))
    return {key: (float(t.count[0]), float(t.size[0])) for key, t in found.items()}


@pytest.mark.parametrize(("cut", "share"), [(True, 1.0), (False, 0.5)])
def test_tokens_go_to_their_experts_and_back(cut: bool, share: float) -> None:
    plan = Plan(2, 2, num_microbatches=4, expert_parallel=2, expert_tensor_parallel=cut)
    count, size = traffic_of(plan)["expert", "all_to_all"]
    # 4 layers, 4 micro-batches: counts of 4 experts once, rows there and back, forward and backward
    assert count == 4 * 4 * (1 + 4)
    rows = 2.0 * MODEL.hidden_size * 2 * 64 * share
    assert size == 4 * 4 * (4 * 8 + 4 * rows)


def test_operators_that_are_not_saved_exchange_again() -> None:
    plans = [Plan(2, expert_parallel=2, recompute=r) for r in ("none", "ops:every-2nd-mm", "full")]
    table = PlanTable.from_plans(plans)
    for name, again in (("torchtitan", 0), ("torchtitan+repeated-exchanges", 2)):
        view = rank_view(MODEL, WORKLOAD, software_profile(name), table)
        moved = rank_traffic(view)["expert", "all_to_all"].count
        kept, by_operator, full = (moved - moved[0]).tolist()
        assert (kept, by_operator) == (0, full if again else 0)
        results = [
            float(np.ravel(kept_results(MODEL, WORKLOAD, view.software, one, MODEL.kinds[0])[2])[0])
            for one in (table.rows([1]), replace(table.rows([1]), expert_parallel=np.ones(1, int)))
        ]
        rows = 2.0 * MODEL.hidden_size * 2 * MODEL.kinds[0].feed_forward.experts_per_token
        assert results[0] - results[1] == (0.0 if again else rows)


def test_ranks_wait_for_the_one_with_most_tokens() -> None:
    mixture, megatron = MODEL.kinds[0].feed_forward, software_profile("megatron-core")
    ranks = np.array([1, 2, 4, 8])
    eight = replace(mixture, num_experts=8)
    found = most_loaded(eight, ranks, megatron)
    # expected largest of as many normal variables, each the mean of 8 / ranks experts
    largest = np.array([0.0, 0.564, 1.029, 1.424])
    assert found.tolist() == pytest.approx((1 + 0.26 * largest * np.sqrt(ranks / 8)).tolist())
    assert [float(most_loaded(eight, n, megatron)) for n in ranks] == found.tolist()
    column: Any = factored(PlanTable.from_plans([Plan(expert_parallel=int(n)) for n in ranks]))[0]
    in_search: Any = most_loaded(eight, column.expert_parallel, megatron)
    assert in_search.expanded().tolist() == found.tolist()
    finer = most_loaded(replace(eight, num_experts=128), ranks[1:], megatron)
    assert np.all((finer > 1.0) & (finer < found[1:]))
    biased = most_loaded(replace(eight, balanced_by_bias=True), ranks[1:], megatron)
    assert np.all((biased > 1.0) & (biased < 1.03))
    assert most_loaded(eight, ranks, software_profile("shardplan")) == 1.0
    assert most_loaded(replace(eight, num_experts=0), ranks, megatron) == 1.0


def test_experts_that_nobody_else_holds_are_not_reduced() -> None:
    together, apart = (traffic_of(Plan(4, expert_parallel=n)) for n in (1, 4))
    experts = sum(w.numel for w in MODEL.kinds[0].weights if w.is_routed_expert)
    reduced = [t["data", "all_reduce"][1] for t in (together, apart)]
    assert reduced[0] - reduced[1] == 4 * 4.0 * experts
    assert apart["expert_data", "all_reduce"] == (0.0, 0.0)
    between = traffic_of(Plan(4, expert_parallel=2))["expert_data", "all_reduce"]
    assert between == (4.0, 4 * 4.0 * experts / 2)


def test_a_table_is_priced_as_its_rows() -> None:
    (rank,) = even_split_contents(MODEL, 1, 1)
    table = PlanTable.from_plans(PLANS)
    whole = rank_traffic(rank_view(MODEL, WORKLOAD, None, table, rank))
    params = rank_parameters(MODEL, rank, table)
    for row, plan in enumerate(PLANS):
        alone = traffic_of(plan)
        for key, traffic in whole.items():
            assert (traffic.count[row], traffic.size[row]) == alone[key]
        one = rank_parameters(MODEL, rank, PlanTable.from_plans([plan]))
        assert params.total[row] == one.total[0]
        assert params.expert_total[row] == one.expert_total[0]


def test_more_ranks_for_the_experts_never_hold_more_of_them() -> None:
    (rank,) = even_split_contents(MODEL, 1, 1)
    table = PlanTable.from_plans([Plan(4, 2, expert_parallel=n) for n in (1, 2, 4)])
    assert (np.diff(rank_parameters(MODEL, rank, table).total) < 0).all()
    assert (routed_tokens(rank_view(MODEL, WORKLOAD, None, table, rank)) == 64).all()


def test_tokens_leave_a_node_by_their_ranks_own_share() -> None:
    plans = [Plan(16, expert_parallel=16), Plan(16, expert_parallel=8)]
    table, software = PlanTable.from_plans(plans), software_profile("shardplan")
    sent = {("expert", "all_to_all"): Traffic(np.ones(2), np.full(2, 1e9))}
    across, inside = axis_seconds(sent, CLUSTER, software, table)["expert"]
    # half of a rank's bytes are for the other node, by NCCL's sends of all ranks to all
    assert across == pytest.approx(0.5e9 / (EXCHANGE_SHARE * 0.94 * 50e9), rel=0.03)
    assert inside == pytest.approx(7 / 8 * 1e9 / (0.764 * 450e9), rel=0.03)
    # to k = 8 experts on two nodes: the other is among them but for 1 of 256 tokens, once
    once = axis_seconds(sent, CLUSTER, software, table, copies=8)["expert"]
    assert once[1] == inside
    bandwidth = float(exchange_bandwidth(CLUSTER, 16, 1, copies=8))
    assert bandwidth == pytest.approx(50e9 * 15 / 8 * 8 / (2 * (1 - 0.5**8)))
    # of two of four groups, which two nodes share: one pair in three is in one node
    limited = float(exchange_bandwidth(CLUSTER, 16, 1, copies=4, groups=(4, 2)))
    reached = 1 + 2 / 3
    nodes = reached * (1 - (1 - 1 / reached) ** 4)
    assert limited == pytest.approx(50e9 * 15 / 8 * 4 / nodes)
    assert max_experts_per_token(MODEL) == 2
    assert (expert_groups(MODEL), expert_groups(sample_model("deepseek-v3"))) == ((1, 1), (8, 4))
    assert max_experts_per_token(sample_model("llama")) == 0


@pytest.mark.parametrize("stride", [1, 8])
def test_pairs_exchange_as_fast_where_nodes_change_places(stride: int) -> None:
    """Inside a node, and between two: the share of a ring counts for any order of ranks."""
    moved = replace(CLUSTER, rank_order=(*range(8, 16), *range(8)))
    usual, other = (exchange_bandwidth(each, 2, stride, share=0.75) for each in (CLUSTER, moved))
    assert float(other) == float(usual) == (450e9 if stride == 1 else 0.75 * 50e9)


def test_another_micro_batch_hides_what_leaves_a_node() -> None:
    plans = [
        Plan(16, num_microbatches=4, expert_parallel=16),
        Plan(16, num_microbatches=4, expert_parallel=8),
    ]
    table, waits = PlanTable.from_plans(plans), software_profile("nemo")
    hides = waits.changed({"overlap.expert_exchange_between_nodes": True})
    (rank,) = even_split_contents(MODEL, 1, 1)

    def exposed(traffic: float, software: SoftwareProfile) -> Any:
        scenario = Scenario(MODEL, CLUSTER, WORKLOAD, software)
        return exposed_all_to_all_seconds(traffic, 10.0, RankView(scenario, table, rank))

    # behind passes of 10 seconds, at a quarter; the first of four micro-batches has no other
    for traffic, left in [(4.0, 1.75), (12.0, 6.375)]:
        found = exposed(traffic, hides)
        assert found.tolist() == [left, traffic], "inside a node it is waited for"
        assert exposed(traffic, waits) == traffic
        everywhere = hides.changed({"overlap.expert_exchange_inside_nodes": True})
        found = exposed(traffic, everywhere)
        assert found.tolist() == [left, left]
