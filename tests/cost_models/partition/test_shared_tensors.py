"""Stages of an encoder and a decoder: what they share, hand on and hold."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from msgspec import structs

from cost_models.activations.encoder_decoder import shared_bytes_per_token
from cost_models.communication.volumes import communication_units, rank_traffic, tensor_traffic
from cost_models.model.spec import ModelSpec
from cost_models.partition.rank_parameters import rank_parameters
from cost_models.partition.shared_tensors import bridge_stage, shared_tensors
from cost_models.partition.stages import (
    PipelineRank,
    contents_of_rank,
    distinct_rank_contents,
    states_between,
)
from cost_models.plan.plan import Plan, PlanTable, split_layers
from cost_models.plan.workload import Workload
from hardware_profiles.software.trainer import software_profile
from tests.samples import rank_view, sample_model

WORKLOAD = Workload(seq_len=64, global_batch_size=8, precision="fp32")
TABLES = [
    f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    for stack in ("encoder", "decoder")
]


def _t5() -> ModelSpec:
    model = sample_model("t5")
    assert model.num_layers % 4 == 0
    assert model.bridge_layer == model.num_layers // 2
    return model


def _ranges(model: ModelSpec, *ends: int) -> list[tuple[int, int]]:
    half = model.num_layers // 2
    places = [0, *(half + end for end in ends), model.num_layers]
    return list(pairwise(places))


@pytest.mark.parametrize(
    ("ends", "bridge", "states", "sharers"),
    [
        ((), 0, [], {}),
        ((0,), 1, [1], {"shared.weight": (0, 1)}),
        ((-1,), 1, [1], {"shared.weight": (0, 1), TABLES[0]: (0, 1)}),
        ((1,), 0, [2], {"shared.weight": (0, 1), TABLES[1]: (0, 1)}),
        (
            (-1, 1),
            1,
            [1, 2],
            {"shared.weight": (0, 1, 2), TABLES[0]: (0, 1), TABLES[1]: (1, 2)},
        ),
    ],
)
def test_what_stages_share_and_hand_on(
    ends: tuple[int, ...],
    bridge: int,
    states: list[int],
    sharers: dict[str, tuple[int, ...]],
) -> None:
    model = _t5()
    ranges = _ranges(model, *ends)
    assert bridge_stage(model, ranges) == bridge
    assert states_between(model, ranges) == states
    assert {s.weight.name: s.stages for s in shared_tensors(model, ranges)} == sharers


def test_a_decoder_alone_shares_its_tied_embedding_and_hands_one_state_on() -> None:
    model = sample_model("llama tied")
    ranges = split_layers(model.num_layers, 4)
    assert bridge_stage(model, ranges) is None
    assert states_between(model, ranges) == [1, 1, 1]
    (shared,) = shared_tensors(model, ranges)
    assert shared.stages == (0, 3)
    assert not shared_tensors(sample_model("llama"), ranges)


def _ranks(model: ModelSpec, ends: tuple[int, ...]) -> list[PipelineRank]:
    ranges = _ranges(model, *ends)
    return [
        contents_of_rank(model, ranges, range(len(ranges)), rank) for rank in range(len(ranges))
    ]


@pytest.mark.parametrize("ends", [(0,), (-1,), (1,), (-1, 1), (-2, -1, 1)])
def test_every_tensor_is_on_a_stage_and_copies_are_counted(ends: tuple[int, ...]) -> None:
    model = _t5()
    ranges = _ranges(model, *ends)
    copies = sum(
        shared.weight.numel * (len(shared.stages) - 1) for shared in shared_tensors(model, ranges)
    )
    ranks = _ranks(model, ends)
    table = PlanTable.from_plans([Plan(pipeline_parallel=len(ranks))])
    held = sum(float(rank_parameters(model, rank, table).total[0]) for rank in ranks)
    assert held == model.num_parameters + copies
    in_blocks = sum(
        block.repeats * sum(w.numel for w in block.weights)
        for rank in ranks
        for block in communication_units(model, rank)
    )
    assert in_blocks == held


def test_messages_by_hand() -> None:
    """Encoder | encoder, decoder | decoder: one state up, then two, and as much back."""
    model, m = _t5(), 4
    ranks = _ranks(model, (-1, 1))
    plan = Plan(pipeline_parallel=3, num_microbatches=m)
    views = [rank_view(model, WORKLOAD, None, plan, rank) for rank in ranks]
    sent = [rank_traffic(view)["pipeline", "send"] for view in views]
    state = 4.0 * WORKLOAD.seq_len * model.hidden_size
    embedding = 4.0 * model.vocab_size * model.hidden_size
    bias = 4.0 * model.kinds[0].shared_tables[0].numel
    assert [float(s.count[0]) for s in sent] == [m + 2, 2 * m + 4, m + 2]
    assert [float(s.size[0]) for s in sent] == [
        m * state + embedding + bias,  # up once
        3 * m * state + 2 * embedding + 2 * bias,  # up and down; one table each way
        2 * m * state + embedding + bias,  # down
    ]


def test_the_stages_of_a_rank_make_no_message_to_each_other() -> None:
    model = _t5()
    (first, last) = distinct_rank_contents(
        model, split_layers(model.num_layers, 4), 2, v_shaped=True
    )
    assert (first.hidden_states_sent, last.hidden_states_sent) == (1 + 2, 1 + 2)
    assert last.hidden_states_received == 1 + 1  # of the turn too, where the encoder ends
    assert (first.bridge, last.bridge) == ("", "between")


def test_the_encoders_output_is_reduced_once_a_stage() -> None:
    model = _t5()
    (rank,) = _ranks(model, ())
    view = rank_view(model, WORKLOAD, None, Plan(tensor_parallel=2), rank)
    with_it = tensor_traffic(view)["tensor", "all_reduce"]
    without = tensor_traffic(structs.replace(view, rank=structs.replace(rank, decoder_stages=0)))
    plain = without["tensor", "all_reduce"]
    assert float(with_it.count[0] - plain.count[0]) == 1
    assert float(with_it.size[0] - plain.size[0]) == 4 * WORKLOAD.seq_len * model.hidden_size


def test_what_layers_share_is_kept_where_it_is_made() -> None:
    model = _t5()
    software = software_profile("shardplan")
    first, last = _ranks(model, (0,))
    plans = [Plan(1, 2, 2, sequence_parallel=along, micro_batch_size=2) for along in (False, True)]
    table = PlanTable.from_plans(plans)
    positions = 4 * model.kinds[0].attention.num_heads * WORKLOAD.seq_len / 2
    found = shared_bytes_per_token(rank_view(model, WORKLOAD, software, table, first))
    assert np.asarray(found).tolist() == [positions, positions]
    eager = replace(WORKLOAD, attention_kernel="eager")
    assert not np.any(shared_bytes_per_token(rank_view(model, eager, software, table, first)))
    plain, along = np.asarray(
        shared_bytes_per_token(rank_view(model, WORKLOAD, software, table, last))
    )
    state = 4 * model.hidden_size
    norm = plain - positions / 2 - state  # of two sequences one table
    assert along == positions / 2 + (norm + state) / 2 + state
    llama = sample_model("llama")
    (rank,) = distinct_rank_contents(llama, [(0, llama.num_layers)], 1)
    assert not np.any(shared_bytes_per_token(rank_view(llama, WORKLOAD, software, table, rank)))
