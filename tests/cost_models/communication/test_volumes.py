"""Traffic: tables price as rows do, sums worked out by hand, and every family has a finite number.

The executor's parity tests compare the numbers with the collectives that really run.
"""

import itertools

import numpy as np
import pytest

from cost_models.communication.traffic import Traffic, TrafficOptions
from cost_models.communication.volumes import (
    AXES,
    KINDS,
    data_traffic,
    pass_traffic,
    rank_traffic,
    shared_gradient_traffic,
)
from cost_models.model.families import model_spec
from cost_models.model.lora import adapted
from cost_models.model.spec import ModelSpec, Weight
from cost_models.partition.rank_view import RankView
from cost_models.partition.stages import PipelineRank, even_split_contents
from cost_models.partition.tensor_sharding import data_shard, shard_dim, tensor_parallel_shape
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.recompute import WORDS
from cost_models.plan.workload import Workload
from hardware_profiles.software.trainer import software_profile
from tests.samples import CONFIGS, make_scenario, rank_view

WORKLOAD = Workload(seq_len=64, global_batch_size=8)


def _model(name: str) -> ModelSpec:
    return model_spec(CONFIGS[name], name=name, where="test")


def _traffic(
    model: ModelSpec, plans: list[Plan], rank: PipelineRank
) -> dict[tuple[str, str], Traffic]:
    return rank_traffic(rank_view(model, WORKLOAD, None, PlanTable.from_plans(plans), rank))


def _plans(pipeline_parallel: int) -> list[Plan]:
    return [
        Plan(d, t, pipeline_parallel, 1, "1f1b", z, sp and t > 1, recompute, 1, 8)
        for d, t, z, sp, recompute in itertools.product(
            (1, 2, 3), (1, 2, 4), (0, 1, 2, 3), (False, True), (*WORDS, "modules:core_attn+mlp")
        )
    ]


@pytest.mark.parametrize("pipeline_parallel", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_table_is_priced_as_its_rows(name: str, pipeline_parallel: int):
    model, plans = _model(name), _plans(pipeline_parallel)
    for rank in even_split_contents(model, pipeline_parallel, 1):
        table = _traffic(model, plans, rank)
        assert {axis for axis, _ in table} <= set(AXES)
        assert {kind for _, kind in table} <= set(KINDS)
        for key, traffic in table.items():
            assert np.isfinite(traffic.size).all()
            assert (np.asarray(traffic.size) >= 0).all()
            assert ((np.asarray(traffic.count) > 0) == (np.asarray(traffic.size) > 0)).all(), key
        for row in range(0, len(plans), 17):
            alone = _traffic(model, [plans[row]], rank)
            for key, traffic in table.items():
                assert traffic.count[row] == alone[key].count[0]
                assert traffic.size[row] == alone[key].size[0]


def test_a_single_rank_sends_nothing():
    model = _model("llama")
    (rank,) = even_split_contents(model, 1, 1)
    traffic = _traffic(model, [Plan(num_microbatches=8)], rank)
    assert all(float(t.count[0]) == float(t.size[0]) == 0 for t in traffic.values())


def test_zero_by_hand():
    """Without padding: w P for the reduction, c P for each gathering (ZeRO, sec. 7)."""
    model = _model("llama")
    (rank,) = even_split_contents(model, 1, 1)
    numel, layers, m = model.num_parameters, model.num_layers, 4
    for stage in range(4):
        plan = Plan(2, zero_stage=stage, num_microbatches=m)
        found = {
            kind: (float(t.count[0]), float(t.size[0]))
            for (axis, kind), t in _traffic(model, [plan], rank).items()
            if axis == "data"
        }
        reduces = m if stage >= 2 else 1
        if stage == 0:
            assert found["all_reduce"] == (layers + 2, 4 * numel)
            continue
        assert found["reduce_scatter"] == (reduces * (layers + 2), reduces * 4 * numel)
        if stage < 3:
            assert found["all_gather"] == (layers + 2, 2 * numel)
        else:
            of_layers = layers * sum(w.numel for w in model.kinds[0].weights)
            assert found["all_gather"] == (
                m * (2 * layers + 2),
                2 * m * (2 * of_layers + numel - of_layers),
            )


def test_whole_gradients_are_summed_instead_of_scattered():
    """DeepSpeed: the bytes of ZeRO-0 under ZeRO-1, as often as it would scatter under ZeRO-2."""
    model = _model("llama")
    plans = [Plan(2, zero_stage=stage, num_microbatches=4) for stage in range(4)]
    view = rank_view(model, WORKLOAD, None, PlanTable.from_plans(plans))
    usual, found = (
        pass_traffic(view, options=TrafficOptions(all_reduces=on)) for on in (False, True)
    )
    whole = usual["data", "all_reduce"].size[0]
    assert found["data", "all_reduce"].size.tolist() == [whole, whole, 4 * whole, 0.0]
    scattered = usual["data", "reduce_scatter"].size[3]
    assert found["data", "reduce_scatter"].size.tolist() == [0.0, 0.0, 0.0, scattered]
    gathered = (table["data", "all_gather"].size.tolist() for table in (usual, found))
    assert next(gathered) == next(gathered)


def test_habits_of_other_trainers_by_hand():
    """Llama: queries, keys and values read the same, and so do gate and up."""
    model = _model("llama")
    layers, m = model.num_layers, 4
    plan = Plan(2, tensor_parallel=2, sequence_parallel=True, zero_stage=3, num_microbatches=m)
    view = rank_view(model, WORKLOAD, None, plan)

    def counts(**options: bool) -> dict[tuple[str, str], float]:
        found = pass_traffic(view, options=TrafficOptions(**options))
        return {key: float(t.count[0]) for key, t in found.items()}

    ours, own = counts(), counts(gathers_per_matrix=True)
    more = m * layers * ((3 - 1) + (2 - 1))
    # forward, again for the gradients of weights; the gradients of inputs
    assert own["tensor", "all_gather"] == ours["tensor", "all_gather"] + 2 * more
    assert own["tensor", "reduce_scatter"] == ours["tensor", "reduce_scatter"] + more
    kept = counts(regathers_inputs=False)
    assert kept["tensor", "all_gather"] == ours["tensor", "all_gather"] - m * (2 * layers + 1)
    whole = counts(gathers_logits=True)
    assert whole["tensor", "all_gather"] == ours["tensor", "all_gather"] + m
    assert whole["tensor", "all_reduce"] == ours["tensor", "all_reduce"] - 2 * m
    once = counts(reduces_once=True)
    assert ours["data", "reduce_scatter"] == m * once["data", "reduce_scatter"]
    for key in (("data", "all_gather"), ("tensor", "all_gather")):
        assert once[key] == ours[key]


def test_shares_of_uneven_tensors():
    model = _model("gpt2")
    weights = {w.name: w for w in (*model.embedding, *model.kinds[0].weights)}
    fused = weights["attn.c_attn.weight"]
    assert (shard_dim(fused), fused.shape) == (1, (64, 192))
    assert [float(x) for x in tensor_parallel_shape(fused, 4)] == [64, 48]
    assert float(data_shard(fused, 4, 3)) == 22 * 48
    bias = weights["attn.c_attn.bias"]
    assert float(data_shard(bias, 4, 1)) == 48
    output = weights["attn.c_proj.weight"]
    assert [float(x) for x in tensor_parallel_shape(output, 4)] == [16, 64]


def test_biases_of_experts_and_tables_of_biases_are_cut_along_their_outputs():
    model = _model("llama")
    assert all(shard_dim(w) in (None, 0, 1) for kind in model.kinds for w in kind.weights)
    of_experts = Weight("mlp.experts.gate_up_proj_bias", (8, 64), "vector", "column", "experts")
    assert shard_dim(of_experts) == 1
    stored_in_out = Weight("a", (8, 32, 64), "expert", "column", "experts", transposed=True)
    assert shard_dim(stored_in_out) == 2
    of_buckets = Weight("relative_attention_bias.weight", (32, 8), "lookup", "column")
    assert shard_dim(of_buckets) == 1


def test_copies_of_the_shards_sum_their_gradients_by_hand():
    """HSDP: every rank its shard, once a step (HSDP: arXiv:2304.11277, sec. 3.2.2)."""
    model = _model("llama")
    (rank,) = even_split_contents(model, 1, 1)
    plan = Plan(8, dp_replicate=2, zero_stage=2, num_microbatches=4)
    found = _traffic(model, [plan], rank)["replicate", "all_reduce"]
    assert float(found.count[0]) == model.num_layers + 2
    assert float(found.size[0]) * plan.shard_ranks == 4 * model.num_parameters


def test_a_tied_table_is_gathered_once():
    """ZeRO-3: its forward and backward pass as a projection follow each other."""
    model = model_spec(CONFIGS["llama"] | {"tie_word_embeddings": True}, name="tied")
    (rank,) = even_split_contents(model, 1, 1)
    found = _traffic(model, [Plan(2, zero_stage=3)], rank)["data", "all_gather"]
    layers = model.num_layers * sum(w.numel for w in model.kinds[0].weights)
    assert float(found.count[0]) == 2 * model.num_layers + 1
    assert float(found.size[0]) == 2 * (2 * layers + model.num_parameters - layers)


@pytest.mark.parametrize(
    ("software", "share"), [("hf-trainer+fsdp2", 0.5), ("hf-trainer+fsdp2+fp32-reductions", 1.0)]
)
def test_gradients_that_shards_reduce_in_16_bits_move_half_as_much(software: str, share: float):
    (rank,) = even_split_contents(_model("llama"), 1, 1)

    def reduced(software: str, plan: Plan, kind: str) -> float:
        scenario = make_scenario(_model("llama"), software=software)
        found = pass_traffic(RankView(scenario, PlanTable.from_plans([plan]), rank))
        return float(found["data", kind].size[0])

    for stage, kind, expected in ((3, "reduce_scatter", share), (0, "all_reduce", 1.0)):
        plan = Plan(data_parallel=2, zero_stage=stage)
        wide = reduced("shardplan", plan, kind)
        assert reduced(software, plan, kind) == pytest.approx(expected * wide)


def test_frozen_weights_that_zero_3_shards_are_gathered_in_every_pass():
    """By every trainer whose wrapper shards them; quantised ones as they are stored."""
    passes, compute = 2 * 4, 2

    def gathered(software: str, adapter: str, stage: int = 3) -> float:
        load = Workload(64, 8, adapter=adapter, adapter_rank=8)
        model = adapted(_model("llama"), load)
        plan = Plan(data_parallel=2, num_microbatches=4, zero_stage=stage)
        profile, table = software_profile(software), PlanTable.from_plans([plan])
        view = rank_view(model, load, profile, table)
        found = pass_traffic(view)["data", "all_gather"]
        trained = pass_traffic(rank_view(model, load, None, table))["data", "all_gather"]
        layers = passes * model.num_layers if stage == 3 else 0
        each = 7 if "deepspeed" in software else 1
        assert float((found.count - trained.count)[0]) in (0.0, each * layers)
        return float((found.size - trained.size)[0])

    for software in ("hf-trainer+fsdp1", "hf-trainer+fsdp2", "hf-trainer+deepspeed-zero3"):
        assert gathered(software, "lora") == passes * compute * _model("llama").num_parameters
        assert 0.0 < gathered(software, "qlora") < 0.5 * gathered(software, "lora")
        assert gathered(software, "lora", stage=2) == 0.0
    assert gathered("shardplan", "lora") == 0.0  # whole on every rank


def test_a_buffer_of_all_gradients_is_cut_evenly():
    """An adapter of 8 rows on 64 ranks: 64 rows of tensors by themselves, none in a buffer."""
    workload = Workload(64, 64, adapter="lora", adapter_rank=8)
    model = adapted(_model("llama"), workload)
    trained = sum(w.numel for kind in model.kinds for w in kind.weights if not w.frozen)
    sizes, plan = {}, Plan(data_parallel=64, zero_stage=1)
    for software in ("nemo", "torch-trainer"):
        view = rank_view(model, workload, software_profile(software), plan)
        sizes[software] = float(data_traffic(view)["data", "all_gather"].size[0])
    assert sizes["nemo"] == pytest.approx(2.0 * trained * model.num_layers)
    assert sizes["torch-trainer"] > 2.0 * sizes["nemo"]


def test_deepspeed_gathers_matrices_one_by_one():
    (rank,) = even_split_contents(_model("llama"), 1, 1)
    count, size = {}, {}
    for software in ("hf-trainer+fsdp2", "hf-trainer+deepspeed-zero3"):
        view = RankView(
            make_scenario(_model("llama"), software=software),
            PlanTable.from_plans([Plan(data_parallel=2, zero_stage=3)]),
            rank,
        )
        found = pass_traffic(view)["data", "all_gather"]
        count[software], size[software] = float(found.count[0]), float(found.size[0])
    (layer, apart), layers = count.values(), _model("llama").num_layers
    assert (layer, apart) == (2 * layers + 2, 2 * 7 * layers + 2)
    assert len({*size.values()}) == 1


@pytest.mark.parametrize(
    ("software", "share"),
    [("megatron", 1.0), ("megatron-deepspeed", 0.5), ("megatron+deepspeed-bf16-optimizer", 1.0)],
)
def test_deepspeeds_stages_sum_a_tied_tables_gradient_in_16_bits(software: str, share: float):
    model = model_spec(CONFIGS["gpt2"], name="tied")
    first, _ = even_split_contents(model, 2, 1)
    table = PlanTable.from_plans([Plan(1, 1, 2, num_microbatches=2)])

    def sent(software: str) -> float:
        scenario = make_scenario(model, software=software)
        found = shared_gradient_traffic(RankView(scenario, table, first))
        return float(found["pipeline", "send"].size[0])

    assert sent(software) == pytest.approx(share * sent("shardplan"))
    assert sent(software) > 0
