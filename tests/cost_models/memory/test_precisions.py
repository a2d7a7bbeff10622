"""Matmuls in fp8, and frozen matrices in few bits: bytes by hand, and published figures."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cost_models.activations.fp8 import (
    cast_elements,
    fp8_regions,
    fp8_weight_bytes,
    gathered_bytes,
    gathered_cast_share,
    gathered_matrix_share,
)
from cost_models.activations.operators import feed_forward_bytes
from cost_models.activations.saved import Regions, layer_regions
from cost_models.communication.traffic import TrafficOptions
from cost_models.communication.volumes import pass_traffic
from cost_models.compute.rates import rates
from cost_models.memory.model_states import rank_weights
from cost_models.model.lora import STORED_BYTES, adapted
from cost_models.partition.frozen_weights import frozen_bytes
from cost_models.partition.rank_view import RankView
from cost_models.partition.stages import even_split_contents
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.workload import Quantisation, Workload
from cost_models.pricing.estimate import price
from cost_models.scenario import Scenario
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.software.trainer import SoftwareProfile, software_profile
from tests.samples import make_scenario, rank_view, sample_model

MEGATRON = software_profile("megatron")
TWO_COPIES = MEGATRON.changed({"fp8.weight_copies": 2.0})


def first(column: Any) -> float:
    return float(np.ravel(column)[0])


# --- fp8 ------------------------------------------------------------------------------------------


def of_layer(family: str) -> tuple[Regions, Regions, Any, int]:
    model = sample_model(family)
    kind, hidden = model.kinds[0], model.hidden_size
    model = replace(model, hidden_dropout=0.0, attention_dropout=0.0)
    regions = layer_regions(model, Workload(512, 1, attention_kernel="flash"), MEGATRON, kind)
    return regions, fp8_regions(regions, kind, hidden, 2.0), kind, hidden


def test_inputs_of_matrices_are_kept_in_8_bits() -> None:
    """Two inputs of h and the product of F lose a byte each; the core's output is kept twice."""
    sixteen, eight, kind, hidden = of_layer("llama")
    ffn = kind.feed_forward.ffn_hidden_size
    heads = kind.attention.num_heads * kind.attention.value_head_dim
    assert sixteen.inputs == 2 * 2 * hidden
    assert eight.inputs == 2 * hidden
    assert first(eight.split - sixteen.split) == heads - ffn
    assert (eight.replicated, eight.routed) == (sixteen.replicated, sixteen.routed)
    assert first(eight.core) == first(sixteen.core)


def test_inputs_of_experts_too() -> None:
    sixteen, eight, kind, hidden = of_layer("mixtral")
    experts = kind.feed_forward
    assert sixteen.routed - eight.routed == experts.experts_per_token * hidden
    heads = kind.attention.num_heads * kind.attention.value_head_dim
    width = experts.experts_per_token * experts.ffn_hidden_size
    assert first(sixteen.split - eight.split) == width - heads
    assert width < feed_forward_bytes(experts, 2.0, MEGATRON)


@pytest.mark.parametrize(
    ("gpu", "recipe", "copies"),
    [
        ("H100-SXM", "fp8-delayed", 2.0),
        ("B200", "fp8-delayed", 1.0),
        ("GB300", "fp8-tensorwise", 1.0),
        ("B200", "mxfp8", 2.0 * 1.031),  # blocks along rows and along columns differ
        ("RTX-5090", "fp8-delayed", 2.0),
    ],
)
def test_one_copy_where_matmuls_read_either_direction(gpu: str, recipe: str, copies: float) -> None:
    software = software_profile(f"nemo+{recipe}")
    model = sample_model("llama")
    scenario = Scenario(model, parse_cluster(f"1x{gpu}"), Workload(64, 8, "fp8"), software)
    (rank,) = even_split_contents(model, 1, 1)
    found = first(fp8_weight_bytes(RankView(scenario, PlanTable.from_plans([Plan()]), rank)))
    matrices = sum(w.numel for w in model.kinds[0].weights if w.role == "linear")
    assert found == pytest.approx(copies * matrices * model.num_layers)


def test_two_copies_of_every_matrix_of_a_layer() -> None:
    model = sample_model("llama")
    matrices = sum(w.numel for w in model.kinds[0].weights if w.role == "linear")
    one = PlanTable.from_plans([Plan(), Plan(1, 4), Plan(4, zero_stage=2)])
    found = fp8_weight_bytes(rank_view(model, Workload(64, 8, "fp8"), TWO_COPIES, one))
    whole = 2 * model.num_layers * matrices
    assert np.asarray(found).tolist() == [whole, whole / 4, whole]


@pytest.mark.parametrize(("precision", "saved"), [("fp8", 2 + 2 - 1), ("fp4", 2 + 1 - 1)])
def test_frozen_matrices_may_lie_in_few_bits_alone(precision: str, saved: int) -> None:
    """A byte (in 4 bits, twice half of one) in the place of two and of two copies."""
    workload = Workload(64, 8, precision, adapter="lora", adapter_rank=4)
    model = adapted(sample_model("llama"), workload)
    (rank,) = even_split_contents(model, 1, 1)
    weights = model.kinds[0].weights
    matrices = sum(w.numel for w in weights if w.role == "linear" and w.frozen)
    assert 0 < matrices < sum(w.numel for w in weights if w.role == "linear")
    one = PlanTable.from_plans([Plan(), Plan(1, 4)])
    stored = TWO_COPIES.changed({"fp8.stores_frozen": True})
    kept, few = (
        frozen_bytes(view) + fp8_weight_bytes(view)
        for view in (rank_view(model, workload, each, one, rank) for each in (TWO_COPIES, stored))
    )
    less = saved * model.num_layers * matrices
    assert np.asarray(kept - few).tolist() == [less, less / 4]
    trained = rank_view(sample_model("llama"), Workload(64, 8, precision), stored, one, rank)
    assert first(frozen_bytes(trained)) == 0.0
    assert first(fp8_weight_bytes(trained)) > 0.0


@pytest.mark.parametrize(("zero_stage", "ranks"), [(0, 1), (3, 4)])
def test_trained_matrices_in_8_bits_have_no_copy_in_16(zero_stage: int, ranks: int) -> None:
    """As torchao's Int8QuantizedTrainingLinearWeight: a byte an element, and a scale a row."""
    model = sample_model("llama")
    matrices = sum(w.numel for w in model.kinds[0].weights if w.role == "linear")
    torch = software_profile("torch-trainer")
    small = torch.changed({"fp8.trained_bytes": 1.0})

    def size(software: SoftwareProfile, *, masters: bool) -> float:
        workload = Workload(64, 8, master_weights=masters)
        view = rank_view(model, workload, software, Plan(1, ranks, zero_stage=zero_stage))
        return sum(first(row.size) for row in rank_weights(view))

    saved = size(torch, masters=False) - size(small, masters=False)
    assert saved == model.num_layers * matrices / ranks
    assert size(torch, masters=True) == size(small, masters=True)  # they are updated in fp32


def test_copies_are_sharded_with_the_weights() -> None:
    """And two layers of them are gathered; without, Llama-3-70B would not fit any GPU."""
    model = sample_model("llama")
    matrices = sum(w.numel for w in model.kinds[0].weights if w.role == "linear")
    one = PlanTable.from_plans([Plan(zero_stage=3), Plan(4, zero_stage=3), Plan(8, zero_stage=3)])
    found = fp8_weight_bytes(rank_view(model, Workload(64, 8, "fp8"), TWO_COPIES, one))
    layers = model.num_layers
    assert np.asarray(found).tolist() == [
        2 * layers * matrices,
        2 * matrices * (layers / 4 + 2),
        2 * matrices * (layers / 8 + 2),
    ]


def test_copies_of_experts_are_shared_out_with_them() -> None:
    model = sample_model("mixtral")
    weights = model.kinds[0].weights
    experts = sum(w.numel for w in weights if w.role == "expert")
    others = sum(w.numel for w in weights if w.role == "linear" and w.part != "router")
    plan = Plan(8, zero_stage=3, expert_parallel=4)
    found = fp8_weight_bytes(rank_view(model, Workload(64, 8, "fp8"), TWO_COPIES, plan))
    layer = experts / 4 + others
    expected = model.num_layers * (experts / 4 / 2 + others / 8) + 2 * layer
    assert first(found) == 2 * min(expected, model.num_layers * layer)


def test_fp8_saves_activations_and_costs_weights() -> None:
    def priced(precision: str) -> Any:
        scenario = make_scenario("llama-3-8b", "8xH100-SXM", seq_len=4096, global_batch_size=8)
        workload = replace(scenario.workload, precision=precision)
        scenario = replace(scenario, workload=workload, software=MEGATRON)
        return scenario, price(scenario, PlanTable.from_plans([Plan(8, zero_stage=1)]))

    scenario, sixteen = priced("bf16")
    _, eight = priced("fp8")
    matrices = sum(w.numel for w in scenario.model.kinds[0].weights if w.role == "linear")
    more = first(eight.memory.weights) - first(sixteen.memory.weights)
    assert more == 2 * scenario.model.num_layers * matrices
    assert first(eight.memory.optimizer) == first(sixteen.memory.optimizer)
    assert 0.7 < first(eight.memory.activations) / first(sixteen.memory.activations) < 0.95
    assert first(eight.memory.logits) == first(sixteen.memory.logits)
    assert first(eight.time.compute) < first(sixteen.time.compute)


@pytest.mark.parametrize(("stage", "kept"), [(1, False), (2, True)])
def test_matrices_gathered_in_8_bits_have_no_copy_in_16(stage: int, *, kept: bool) -> None:
    def weights(*, gathers: bool) -> float:
        scenario = make_scenario("llama-3-8b", "8xH100-SXM", seq_len=4096, global_batch_size=8)
        software = MEGATRON.changed({"fp8.gathers_weights": gathers})
        workload = replace(scenario.workload, precision="fp8")
        scenario = replace(scenario, workload=workload, software=software)
        found = price(scenario, PlanTable.from_plans([Plan(8, zero_stage=stage)]))
        return first(found.memory.weights)

    kinds = make_scenario("llama-3-8b", "8xH100-SXM", seq_len=4096, global_batch_size=8).model
    matrices = sum(w.numel for w in kinds.kinds[0].weights if w.role == "linear")
    less = 0.0 if kept else 2.0 * kinds.num_layers * matrices
    assert weights(gathers=False) - weights(gathers=True) == less


def test_experts_gathered_in_8_bits_have_no_copy_in_16() -> None:
    scenario = make_scenario("mixtral-8x7b", "8xH100-SXM", seq_len=4096, global_batch_size=8)
    scenario = replace(scenario, workload=replace(scenario.workload, precision="fp8"))
    plans = PlanTable.from_plans([Plan(8, zero_stage=1, expert_parallel=4)])

    def weights(*, gathers: bool) -> float:
        software = MEGATRON.changed({"fp8.gathers_weights": gathers})
        return first(price(replace(scenario, software=software), plans).memory.weights)

    kind = scenario.model.kinds[0]
    shares = {"linear": 1, "expert": 4}
    matrices = sum(
        w.numel / shares[w.role] for w in kind.weights if w.role in shares and w.part != "router"
    )
    less = 2.0 * scenario.model.num_layers * matrices
    assert weights(gathers=False) - weights(gathers=True) == pytest.approx(less)


def test_cores_and_head_run_at_the_rate_of_16_bits() -> None:
    chip = parse_cluster("8xH100-SXM").accelerator
    eight, sixteen = rates(chip, "fp8", MEGATRON), rates(chip, "bf16", MEGATRON)
    assert eight.matmul > sixteen.matmul
    assert eight.of_core.matmul == sixteen.matmul
    assert sixteen.of_core is sixteen


def test_casts_by_hand() -> None:
    """q, k and v share an input, gate and up another; each input and output gradient once."""
    kind = make_scenario("llama-3-8b", "8xH100-SXM").model.kinds[0]
    h, f, key = 4096, 14336, 1024
    assert cast_elements(kind, 1) == (h + h + h + f, h + 2 * key + h + 2 * f + h)
    # cut inputs and outputs are shared out, whole ones are not
    assert cast_elements(kind, 8) == (2 * h + (h + f) / 8, (h + 2 * key + 2 * f) / 8 + 2 * h)
    experts = sample_model("mixtral").kinds[0]
    # 64 for q, k and v, 64 of the output; 64 and 128 of each of two experts, not the router
    assert cast_elements(experts, 1)[0] == 64 + 64 + 2 * (64 + 128)


def test_what_is_cast_before_it_is_gathered_is_cast_by_each_rank_for_its_tokens() -> None:
    kind = make_scenario("llama-3-8b", "8xH100-SXM").model.kinds[0]
    h, f, key = 4096, 14336, 1024
    # inputs of column-cut matrices and gradients of row-cut ones are gathered, twice h each
    assert cast_elements(kind, 8, 0.5) == (h + (h + f) / 8, (h + 2 * key + 2 * f) / 8 + h)
    share = gathered_cast_share(np.array([1, 8]), True, MEGATRON, copies=True)
    assert share.tolist() == [1.0, (3 / 8 + 2) / 4], "a cast of an eighth, a copy of all"
    assert float(gathered_cast_share(8, True, MEGATRON, copies=False)) == 1 / 8
    assert float(gathered_cast_share(8, False, MEGATRON, copies=True)) == 1.0
    ours = software_profile("shardplan")
    assert float(gathered_cast_share(8, True, ours, copies=True)) == 1.0


def test_layers_gather_in_8_bits_and_scatter_in_16() -> None:
    scenario = make_scenario("llama-3-8b", "8xH100-SXM", seq_len=4096)
    eight = replace(scenario.workload, precision="fp8")
    assert gathered_bytes(eight, MEGATRON) == 1.0
    assert gathered_bytes(scenario.workload, MEGATRON) is None
    assert gathered_bytes(eight, software_profile("shardplan")) is None
    table = PlanTable.from_plans([Plan(tensor_parallel=8, sequence_parallel=True)])
    (rank,) = even_split_contents(scenario.model, 1, 1)
    view = RankView(replace(scenario, workload=eight), table, rank)
    wide, narrow = (
        pass_traffic(view, options=TrafficOptions(gather_bytes=each)) for each in (None, 1.0)
    )
    state = 2.0 * 4096 * 4096
    # a layer gathers two inputs, both again, and two gradients; embedding and head once, twice
    assert first(wide["tensor", "all_gather"].size) == (6 * 32 + 3) * state
    assert first(narrow["tensor", "all_gather"].size) == (6 * 32 / 2 + 3) * state
    assert first(narrow["tensor", "all_gather"].count) == 6 * 32 + 3
    key = "tensor", "reduce_scatter"
    assert first(narrow[key].size) == first(wide[key].size)


def test_casts_are_part_of_both_passes_in_fp8_only() -> None:
    scenario = make_scenario("llama-3-8b", "1xH100-SXM", seq_len=4096, global_batch_size=1)

    def computing(precision: Any, cast: float = 4.0, **changes: float) -> float:
        figures = {f"fp8.{name}": value for name, value in changes.items()}
        software = MEGATRON.changed({"fp8.cast_bytes": cast, **figures})
        workload = replace(scenario.workload, precision=precision)
        here = replace(scenario, workload=workload, software=software)
        return first(price(here, PlanTable.from_plans([Plan()])).time.compute)

    eight = computing("fp8")
    assert MEGATRON.fp8.cast_bytes == 4.0, "16 bits read, 8 written along rows and columns"
    assert computing("bf16") == computing("bf16", 0.0)
    h, f, key = 4096, 14336, 1024
    elements = (3 * h + f) + (3 * h + 2 * key + 2 * f)
    memory = rates(scenario.cluster.accelerator, "fp8", MEGATRON).memory
    assert eight - computing("fp8", 0.0) == pytest.approx(32 * 4096 * 4.0 * elements / memory)
    weights = sum(w.numel for w in scenario.model.kinds[0].weights)
    more = computing("fp8", weight_casts=1.0) - eight
    assert more == pytest.approx(2 * 32 * 4.0 * weights / memory, rel=1e-3), "both passes"
    scaled = computing("fp8", scaling_bytes=4.0) - eight
    inputs = 6 * h + f  # of q, k, v and the output, gate and up, down
    assert scaled == pytest.approx(32 * 4.0 * (4096 * inputs + weights) / memory, rel=1e-3)


# --- frozen matrices ------------------------------------------------------------------------------


def qlora(quantisation: Quantisation) -> tuple[Scenario, float]:
    scenario = make_scenario("llama-3-8b", "1xA100-80GB", seq_len=128, global_batch_size=1)
    options: Any = {"adapter": "qlora", "adapter_rank": 16, "adapter_alpha": 32.0}
    workload = replace(scenario.workload, quantisation=quantisation, **options)
    model = adapted(scenario.model, workload)
    matrices = sum(w.numel for w in model.kinds[0].weights if w.quantised) * model.num_layers
    return replace(scenario, model=model, workload=workload), float(matrices)


def stored_bits(quantisation: Quantisation) -> float:
    """Bits of a quantised element, of a whole model."""
    scenario, matrices = qlora(quantisation)
    (rank,) = even_split_contents(scenario.model, 1, 1)
    table = PlanTable.from_plans([Plan()])
    stored = first(frozen_bytes(RankView(scenario, table, rank)))
    plain = sum(
        w.numel
        for kind in scenario.model.pattern
        for w in scenario.model.kinds[kind].weights
        if w.frozen and not w.quantised
    )
    plain += sum(w.numel for w in (*scenario.model.embedding, *scenario.model.head))
    return 8 * (stored - 2.0 * plain) / matrices


def test_bits_of_a_frozen_element() -> None:
    """Dettmers et al., arXiv:2305.14314, sec. 3: scales cost 0.5 bits, doubly quantised 0.127."""
    assert stored_bits("nf4") == pytest.approx(4.5, rel=1e-12)
    assert stored_bits("nf4_double") == pytest.approx(4 + 0.127, abs=1e-3)
    assert 8 < stored_bits("int8") < 8.01
    assert stored_bits("int4") == pytest.approx(4 + 20 / 128, rel=1e-12)  # GPTQ, groups of 128


def test_double_quantisation_saves_3_gb_of_65_billion() -> None:
    """The same section: 0.373 bits a parameter, about 3 GB of a 65 B model."""
    saved = STORED_BYTES["nf4"][0] - STORED_BYTES["nf4_double"][0]
    assert 8 * saved == pytest.approx(0.373, abs=1e-3)
    assert saved * 65e9 == pytest.approx(3e9, rel=0.02)


def test_int8_has_a_scale_for_every_output() -> None:
    """Cut along the inputs a rank has all outputs, cut along the outputs its own."""
    scenario, matrices = qlora("int8")
    (rank,) = even_split_contents(scenario.model, 1, 1)
    kind = scenario.model.kinds[0]
    for tensor in (1, 4):
        table = PlanTable.from_plans([Plan(1, tensor)])
        eight = first(frozen_bytes(RankView(scenario, table, rank)))
        four = replace(scenario.workload, quantisation="nf4")
        nf4 = first(frozen_bytes(RankView(replace(scenario, workload=four), table, rank)))
        rows = sum(
            w.shape[0] / (tensor if w.sharding == "column" else 1)
            for w in kind.weights
            if w.quantised
        )
        expected = (1.0 - 0.5625) * matrices / tensor + 4 * rows * scenario.model.num_layers
        assert eight - nf4 == pytest.approx(expected, rel=1e-12)


def test_today_s_default_is_nf4_with_fp32_scales() -> None:
    assert Workload(1, 1).quantisation == "nf4"
    assert STORED_BYTES["nf4"] == (0.5 + 4 / 64, 0.0)


@pytest.mark.parametrize(
    ("software", "precision", "share"),
    [
        ("torchtitan+fp8-weight-gathers", "fp8", 0.5),
        ("torchtitan+fp8-weight-gathers", "bf16", 1.0),
        ("torchtitan", "fp8", 1.0),
    ],
)
def test_only_fp8_matrices_are_gathered_in_half_the_bytes(
    software: str, precision: str, share: float
) -> None:
    workload = Workload(64, 8, precision=precision)  # type: ignore[arg-type]
    assert gathered_matrix_share(workload, software_profile(software)) == share
