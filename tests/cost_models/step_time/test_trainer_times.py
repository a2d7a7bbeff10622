"""What trainers do differently with a step's time, each switched on and off."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cost_models.communication.volumes import (
    rank_traffic,
    scattered_stage_messages,
)
from cost_models.compute.kernel_launch import operator_seconds
from cost_models.compute.layer import LayerWork, layer_seconds, trained_elements
from cost_models.compute.rates import rates
from cost_models.partition.rank_view import RankView
from cost_models.partition.stages import even_split_contents
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.recompute import FULL
from cost_models.pricing.estimate import price
from cost_models.scenario import Scenario
from cost_models.step_time.tensor_parallel_overlap import tensor_seconds
from hardware_profiles.software.trainer import software_profile
from tests.samples import make_scenario, rank_view

MEGATRON = software_profile("megatron")


def megatron(figures: dict[str, Any]) -> Scenario:
    scenario: Scenario = make_scenario(
        "gpt2", "2x8xA100-80GB", seq_len=1024, global_batch_size=32, software="megatron"
    )
    return replace(scenario, software=scenario.software.changed(figures))


def table(**plan: Any) -> PlanTable:
    return PlanTable.from_plans([Plan(**plan)])


# --- stage messages -------------------------------------------------------------------------------


def test_a_trainer_may_wait_around_each_message() -> None:
    """Once a micro-batch at both ends of a pipeline: m + p - 1 times a step."""
    plans = table(pipeline_parallel=2, data_parallel=8, micro_batch_size=1, num_microbatches=4)
    steps = [
        float(price(megatron({"host.message_seconds": seconds}), plans).step[0])
        for seconds in (0.0, 0.01)
    ]
    assert steps[1] - steps[0] == pytest.approx((4 + 2 - 1) * 0.01, rel=0.05)


@pytest.mark.parametrize("sequence", [False, True])
def test_each_tensor_rank_sends_its_part_to_the_next_stage(sequence: bool) -> None:
    scenario = megatron({})
    plans = table(
        tensor_parallel=4,
        pipeline_parallel=2,
        data_parallel=2,
        num_microbatches=4,
        sequence_parallel=sequence,
    )
    rank = even_split_contents(scenario.model, 2, 1)[0]
    view = RankView(scenario, plans, rank)
    whole = rank_traffic(view)
    parts = scattered_stage_messages(whole, view)
    send, before = parts["pipeline", "send"], whole["pipeline", "send"]
    gather, none = parts["tensor", "all_gather"], whole["tensor", "all_gather"]
    assert send.count == before.count
    if sequence:  # split already
        assert send.size == before.size
        assert none.count > 0
        assert (gather.count, gather.size) == (none.count, none.size)
    else:
        assert send.size == before.size / 4
        assert none.count == 0
        assert (gather.count, gather.size) == (before.count, before.size)
    assert {key: parts[key] for key in whole if key[0] == "data"} == {
        key: whole[key] for key in whole if key[0] == "data"
    }


def test_scattered_messages_cost_the_network_less() -> None:
    plans = table(
        tensor_parallel=8, pipeline_parallel=2, num_microbatches=32, sequence_parallel=False
    )
    slow, quick = (
        price(megatron({"pipeline.scatters_messages": on}), plans).time for on in (False, True)
    )
    assert quick.pipeline_communication[0] < slow.pipeline_communication[0]  # type: ignore[index]
    assert quick.tensor_communication[0] > slow.tensor_communication[0]  # type: ignore[index]
    assert quick.step[0] < slow.step[0]


def test_deepspeeds_first_pipelines_send_masks_and_whole_gradients() -> None:
    """A middle stage sends a part and a mask forward, a whole gradient back."""
    scenario = make_scenario(
        "gpt2-xl",
        "4x8xA100-80GB",
        seq_len=1024,
        global_batch_size=32,
        software="megatron+deepspeed-2020-messages",
        precision="fp16",
    )
    plans = table(tensor_parallel=5, pipeline_parallel=4, data_parallel=2, num_microbatches=4)
    rank = even_split_contents(scenario.model, 4, 1)[1]
    view = RankView(scenario, plans, rank)
    whole = rank_traffic(view)
    sent = scattered_stage_messages(whole, view)["pipeline", "send"]
    message = 2.0 * 1024 * scenario.model.hidden_size
    assert sent.count == whole["pipeline", "send"].count == 2 * 4
    assert sent.size == pytest.approx(4 * (message / 5 + message + 2.0 * 1024**2))


@pytest.mark.parametrize(
    ("software", "precision", "size"),
    [
        ("megatron", "fp16", 2.0),
        ("megatron", "bf16", 4.0),
        ("nanotron", "fp16", 4.0),
        ("torch-trainer", "fp16", 4.0),
        ("internevo", "bf16", 2.0),
    ],
)
def test_bytes_of_reduced_gradients(software: str, precision: Any, size: float) -> None:
    """Megatron's buffers have the precision of the weights, unless that is bf16."""
    scenario = make_scenario(
        "gpt2", "8xA100-80GB", software=software, precision=precision, global_batch_size=8
    )
    stage = 1 if software == "internevo" else 0
    plans = table(data_parallel=8, zero_stage=stage)
    view = RankView(scenario, plans, even_split_contents(scenario.model, 1, 1)[0])
    assert np.all(view.reduction_bytes == size)


# --- operators ------------------------------------------------------------------------------------


def test_a_fused_softmax_refuses_numbers_of_matrices_that_its_warps_do_not_take() -> None:
    """25 heads, as GPT-2 XL on one GPU, or 4 heads over 4 ranks with one sequence."""
    scenario = make_scenario("gpt2", "8xA100-80GB", seq_len=1024, global_batch_size=32)
    scenario = replace(scenario, workload=replace(scenario.workload, attention_kernel="eager"))
    heads = scenario.model.kinds[0].attention.num_heads
    assert heads % 4 == 0
    taken, refused = table(), table(tensor_parallel=heads)
    (rank,) = even_split_contents(scenario.model, 1, 1)

    def operators(plans: PlanTable, software: Any = MEGATRON, kernel: str = "eager") -> float:
        workload = replace(scenario.workload, attention_kernel=kernel)
        found = operator_seconds(rank_view(scenario.model, workload, software, plans, rank), 1.0)
        return float(found[0][0])

    layers = sum(rank.kind_counts)
    more = MEGATRON.host.unfused_softmax_operators
    # both add the operators outside the layers, which go with a layer's
    assert operators(refused) - operators(taken) == pytest.approx(layers * more, rel=0.05)
    assert operators(refused, kernel="flash") == operators(taken, kernel="flash")
    any_number = MEGATRON.changed({"host.fused_softmax_batch": 0.0})
    assert operators(refused, any_number) == operators(taken, any_number)


# --- collectives behind computation ---------------------------------------------------------------


def test_the_reduction_of_inputs_gradients_hides_behind_the_gradients_of_weights() -> None:
    plans, every = table(tensor_parallel=4), np.array([6.0])
    waits = MEGATRON.changed({"overlap.tensor_reduction": False})
    hides = MEGATRON.changed({"overlap.tensor_reduction": True})
    assert tensor_seconds(every, np.array([2.0]), waits, plans) == (3.0, 3.0)
    assert tensor_seconds(every, np.array([2.0]), hides, plans) == (3.0, 1.0)
    assert tensor_seconds(every, np.array([9.0]), hides, plans) == (3.0, 0.0)
    full = table(tensor_parallel=4, recompute="full")
    assert full.recompute[0] == FULL
    assert tensor_seconds(every, np.array([9.0]), waits, full) == (2.0, 4.0)  # once more
    # with sequence parallelism four collectives forward, six backward: two inputs come again
    along = PlanTable.from_plans([Plan(tensor_parallel=8, sequence_parallel=True)])
    forward, backward = tensor_seconds(np.array([10.0]), np.array([9.0]), hides, along)
    assert (float(forward[0]), float(backward[0])) == (4.0, 2.0)  # these and their scattering hide
    keeps = hides.changed({"activations.keeps_gathered_inputs": True})
    forward, backward = tensor_seconds(np.array([8.0]), np.array([9.0]), keeps, along)
    assert (float(forward[0]), float(backward[0])) == (4.0, 0.0)
    assert tensor_seconds(every, np.array([9.0]), hides, full) == (2.0, 2.0)


def test_a_split_backward_pass_has_no_gradients_of_weights_to_hide_behind() -> None:
    hides = MEGATRON.changed({"overlap.tensor_reduction": True})
    plan = Plan(tensor_parallel=4, pipeline_parallel=2, num_microbatches=4)
    for schedule, left in (("1f1b", 0.0), ("zero_bubble", 3.0)):
        plans = PlanTable.from_plans([replace(plan, pipeline_schedule=schedule)])  # type: ignore[arg-type]
        assert tensor_seconds(np.array([6.0]), np.array([9.0]), hides, plans) == (3.0, left)


def test_overlap_hides_its_share_of_the_traffic() -> None:
    half = MEGATRON.changed({"overlap.tensor_parallel": 0.5, "overlap.tensor_reduction": False})
    assert tensor_seconds(np.array([6.0]), np.array([9.0]), half, table()) == (1.5, 1.5)


# --- gradients that are added up ------------------------------------------------------------------


def test_adding_up_gradients_moves_its_bytes_for_every_trained_parameter() -> None:
    scenario = megatron({})
    kind = scenario.model.kinds[0]
    rate = rates(scenario.cluster.accelerator, "bf16", MEGATRON)

    def backward(accumulated: float) -> float:
        one = layer_seconds(
            LayerWork(
                kind,
                scenario.model.hidden_size,
                1024,
                1024.0,
                tensor_parallel=2,
                sequence_parallel=False,
                recompute_full=False,
                recompute_core=False,
                kernel="flash",
                compute_bytes=2.0,
                rate=rate,
                software=MEGATRON.changed({"gradients.accumulation_bytes": accumulated}),
            )
        )
        return float(one.backward)

    matrices = sum(w.numel for w in kind.weights if w.role == "linear")
    assert float(trained_elements(kind, 1)) == matrices
    assert float(trained_elements(kind, 2)) == matrices / 2
    expected = 6.0 * matrices / 2 / rate.memory
    assert backward(6.0) - backward(0.0) == pytest.approx(expected)


def test_frozen_matrices_have_no_gradients_to_add_up() -> None:
    kind = megatron({}).model.kinds[0]
    frozen = replace(kind, weights=tuple(replace(w, frozen=True) for w in kind.weights))
    assert float(np.asarray(trained_elements(frozen, 1))) == 0.0


@pytest.mark.parametrize(("at_last", "fewer"), [(True, True), (False, False)])
def test_zero_2_reduces_once_under_a_pipeline_where_the_trainer_does(
    at_last: bool, fewer: bool
) -> None:
    scenario = megatron({"gradients.reduced_once_under_pipeline": at_last})
    plans = [
        Plan(pipeline_parallel=2, data_parallel=8, zero_stage=stage, num_microbatches=4)
        for stage in (1, 2)
    ]
    first, second = price(scenario, PlanTable.from_plans(plans)).time.data_communication
    assert bool(second == first) is fewer
