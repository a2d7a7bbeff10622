"""What optimizers remember, against their papers, and torch's own, tensor by tensor."""

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from cost_models.legality.rules import require_legal
from cost_models.memory.ledger import MOMENTS
from cost_models.memory.optimizer_states import (
    BLOCKS,
    OPTIMIZER_TRAITS,
    StateBytes,
    is_layer_matrix,
    local_shape,
    rank_states,
    tensor_states,
    update_bytes,
)
from cost_models.model.spec import ModelSpec, Weight
from cost_models.partition.rank_parameters import rank_parameters
from cost_models.partition.stages import even_split_contents
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.workload import Optimizer, Workload
from cost_models.pricing.estimate import price
from cost_models.scenario import Scenario
from cost_models.step_time.optimizer_update import update_accesses, update_flops
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import software_profile
from tests.samples import CONFIGS, make_scenario, rank_view, sample_model

MATRIX = Weight("mlp.up_proj.weight", (11008, 4096), "linear", "column", "mlp")
NORM = Weight("norm.weight", (4096,), "vector", "replicate", "norm")
TABLE = Weight("embed_tokens.weight", (32000, 4096), "lookup", "vocab", "embedding")
EXPERTS = Weight("mlp.experts.down_proj", (8, 4096, 14336), "expert", "row", "experts")
OURS = software_profile("shardplan")


def table(**plan: Any) -> PlanTable:
    return PlanTable.from_plans([Plan(**plan)])


def states(
    optimizer: Optimizer, weight: Weight, state_bytes: float = 4.0, **plan: Any
) -> StateBytes:
    plans = table(**plan)
    shape = local_shape(weight, plans, plans.zero_stage)
    return tensor_states(OPTIMIZER_TRAITS[optimizer], weight, shape, state_bytes)


def resident(optimizer: Optimizer, weight: Weight, state_bytes: float = 4.0, **plan: Any) -> float:
    return float(np.ravel(states(optimizer, weight, state_bytes, **plan).resident)[0])


@pytest.mark.parametrize(
    ("optimizer", "elements"), [("adamw", 2), ("sgd", 0), ("sgd_momentum", 1), ("lion", 1)]
)
def test_states_as_large_as_the_weights(optimizer: Optimizer, elements: int) -> None:
    for weight in (MATRIX, NORM, TABLE, EXPERTS):
        assert resident(optimizer, weight) == 4 * elements * weight.numel
        assert resident(optimizer, weight, 2.0) == 2 * elements * weight.numel


def projected_states(gradient: torch.Tensor, rank: int) -> int:
    """Bytes after one step of GaLore (Zhao et al., arXiv:2403.03507, alg. 2), by its own storages.

    Moments of the gradient that the first singular vectors of its shorter side project; in fp32 the
    projector is a view of all vectors.
    """
    left, _, right = torch.linalg.svd(gradient.float(), full_matrices=False)
    tall = gradient.shape[0] >= gradient.shape[1]
    projector = right[:rank] if tall else left[:, :rank]
    if gradient.dtype != torch.float32:
        projector = projector.to(gradient.dtype)
    low = gradient @ projector.T if tall else projector.T @ gradient
    kept = (projector, torch.zeros_like(low), torch.zeros_like(low))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96, 64), (64, 96)])
@pytest.mark.parametrize("rank", [8, 64, 100])
def test_states_of_projected_gradients(
    shape: tuple[int, int], rank: int, dtype: torch.dtype
) -> None:
    weight = replace(MATRIX, shape=shape)
    found = tensor_states(
        OPTIMIZER_TRAITS["galore_adamw"],
        weight,
        local_shape(weight, table(), table().zero_stage),
        float(dtype.itemsize),
        float(rank),
    )
    expected = projected_states(torch.randn(shape, dtype=dtype), rank)
    assert float(np.ravel(found.resident)[0]) == expected


@pytest.mark.parametrize("optimizer", ["galore_adamw", "galore_adamw_8bit", "apollo_adamw"])
def test_states_of_projected_gradients_fall_with_their_rank(optimizer: Optimizer) -> None:
    few, many, whole = (
        make_scenario("llama", optimizer=optimizer, optimizer_rank=rank, master_weights=False)
        for rank in (2, 8, 4096)
    )
    columns = table()
    found = [
        float(price(each, columns).memory.optimizer[0])  # type: ignore[index]
        for each in (few, many, whole)
    ]
    assert found[0] < found[1] < found[2]


def test_projected_gradients_are_whole() -> None:
    scenario = make_scenario("llama", "2xA100-80GB", optimizer="galore_adamw")
    for options in ({"zero_stage": 1}, {"offload": "optimizer"}):
        plan = Plan(data_parallel=2, num_microbatches=8, **options)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="projects gradients of whole matrices"):
            require_legal(scenario, plan)
    # twice to and fro, of every matrix of a layer
    rank = even_split_contents(scenario.model, 1, 1)[0]
    one, two = (
        float(update_flops(rank_view(scenario.model, work, None, table(), rank))[0])  # type: ignore[index]
        for work in (
            replace(scenario.workload, optimizer_rank=2),
            replace(scenario.workload, optimizer_rank=4),
        )
    )
    assert two == 2 * one > 0


def test_8_bit_adam_saves_6_of_8_bytes() -> None:
    """Dettmers et al., arXiv:2110.02861, sec. 1: 75 % less; a scale for each block on top."""
    saved = 8 * MATRIX.numel - resident("adamw_8bit", MATRIX)
    assert saved == MATRIX.numel * (6 - 2 * 4 / BLOCKS[8])
    assert saved / MATRIX.numel == pytest.approx(6, rel=0.006)
    # below 4096 elements a tensor keeps fp32 states: a norm of 4096 is not small, its shards are
    assert resident("adamw_8bit", NORM) == 2 * (4096 + 4 * 16)
    assert resident("adamw_8bit", NORM, data_parallel=2, zero_stage=1) == 8 * 2048


def test_ademamix_has_a_slow_mean_beside_the_states_of_adam() -> None:
    """Pagliardini et al., arXiv:2409.03137; bitsandbytes: two means in one state, its variance."""
    assert resident("ademamix", MATRIX) == 1.5 * resident("adamw", MATRIX)
    assert resident("ademamix_8bit", MATRIX) == 1.5 * resident("adamw_8bit", MATRIX)
    # fp32 states, whatever the weights' precision
    assert Workload(1, 1, optimizer="ademamix", master_weights=False).state_bytes == 4.0


def test_4_bit_adam_has_half_a_byte_a_state_and_a_scale_for_128() -> None:
    """Li et al., arXiv:2309.01507, and torchao's Adam4bit."""
    assert resident("adamw_4bit", MATRIX) == MATRIX.numel * 2 * (0.5 + 4 / BLOCKS[4])
    assert resident("adamw_4bit", MATRIX) < 0.55 * resident("adamw_8bit", MATRIX)


def test_8_bit_lion_has_a_byte_and_a_scale_for_256() -> None:
    """Chen et al., arXiv:2302.06675, alg. 2, and bitsandbytes' Lion8bit: one state."""
    assert resident("lion_8bit", MATRIX) == 0.5 * resident("adamw_8bit", MATRIX)
    assert resident("lion_8bit", MATRIX) == MATRIX.numel * (1 + 4 / BLOCKS[8])


def test_paged_states_leave_the_device_but_for_scales_and_small_tensors() -> None:
    big, small = states("paged_adamw", MATRIX), states("paged_adamw", NORM)
    assert (float(big.resident[0]), float(big.paged[0])) == (0, 8 * MATRIX.numel)  # type: ignore[index]
    assert (float(small.resident[0]), float(small.paged[0])) == (8 * 4096, 0)  # type: ignore[index]
    eight = states("paged_adamw_8bit", MATRIX)
    assert float(eight.resident[0]) == 2 * 4 * MATRIX.numel / BLOCKS[8]  # type: ignore[index]
    assert float(eight.paged[0]) == 2 * MATRIX.numel  # type: ignore[index]


def test_adafactor_keeps_a_row_and_a_column() -> None:
    """Shazeer, Stern, arXiv:1804.04235, abstract: O(n + m) instead of O(n m)."""
    assert resident("adafactor", MATRIX) == 4 * (11008 + 4096)
    assert resident("adafactor", NORM) == 4 * 4096
    assert resident("adafactor", EXPERTS) == 4 * 8 * (4096 + 14336)
    assert resident("adafactor_momentum", MATRIX) == 4 * (MATRIX.numel + 11008 + 4096)


def test_factors_under_sharding() -> None:
    sharded = {"data_parallel": 8, "zero_stage": 3}
    assert resident("adafactor", MATRIX, **sharded) == 4 * (11008 / 8 + 4096)
    assert resident("adafactor", MATRIX, data_parallel=8) == 4 * (11008 + 4096)  # ZeRO-0
    both = {**sharded, "tensor_parallel": 4}
    assert resident("adafactor", MATRIX, **both) == 4 * (11008 / 8 / 4 + 4096)
    row = replace(MATRIX, shape=(4096, 11008), sharding="row")
    assert resident("adafactor", row, **both) == 4 * (4096 / 8 + 11008 / 4)
    # eight experts over eight ranks: one each; over 16, which have to share rows
    assert resident("adafactor", EXPERTS, **sharded) == 4 * (4096 + 14336)
    wide = {"data_parallel": 16, "zero_stage": 3}
    assert resident("adafactor", EXPERTS, **wide) == 4 * 8 * (4096 / 16 + 14336)
    apart = {"data_parallel": 8, "zero_stage": 3, "expert_parallel": 8}
    assert resident("adafactor", EXPERTS, **apart) == 4 * (4096 + 14336)


def test_muon_keeps_momentum_of_matrices_and_adamw_of_all_else() -> None:
    """Liu et al., arXiv:2502.16982, sec. 2.2."""
    assert resident("muon", MATRIX) == 4 * MATRIX.numel
    assert resident("muon", EXPERTS) == 4 * EXPERTS.numel
    assert resident("muon", NORM) == 8 * NORM.numel
    assert resident("muon", TABLE) == 8 * TABLE.numel
    head = Weight("lm_head.weight", (32000, 4096), "linear", "vocab", "head")
    assert resident("muon", head) == 8 * head.numel


@pytest.mark.parametrize("family", ["llama", "llama tied", "gpt2", "mixtral", "t5"])
def test_a_whole_model_by_tensor_is_the_model_by_parameter(family: str) -> None:
    """Every tensor is met once, in every layout: the sum has as many elements as the rank."""
    model = sample_model(family)
    plans = [Plan(), Plan(4, zero_stage=3), Plan(2, 2, zero_stage=1)]
    if family == "mixtral":
        plans.append(Plan(4, 2, zero_stage=2, expert_parallel=4, expert_tensor_parallel=False))
    if family != "t5":
        plans.append(Plan(2, 1, 2, zero_stage=1, num_microbatches=2))
    workload = Workload(8, 8, optimizer="paged_adamw")  # by tensor, though every element has two
    for plan in plans:
        columns = PlanTable.from_plans([plan])
        for rank in even_split_contents(model, plan.pipeline_parallel, 1):
            found = rank_states(rank_view(model, workload, None, columns, rank))
            parameters = rank_parameters(model, rank, columns)
            shards = plan.shard_ranks if plan.zero_stage else 1
            experts = plan.expert_shard_ranks if plan.zero_stage else 1
            elements = (
                parameters.total - parameters.expert_total
            ) / shards + parameters.expert_total / experts
            total = float(np.ravel(found.resident + found.paged)[0])
            assert total == pytest.approx(8 * float(np.ravel(elements)[0]), rel=1e-12)


def _torch_states(model: ModelSpec, optimizer: str) -> float:
    """Bytes that torch's optimizer keeps of tensors of these shapes, without its step counts."""
    parameters = [
        torch.nn.Parameter(torch.zeros(weight.shape))
        for kind in model.pattern
        for weight in model.kinds[kind].weights
    ]
    parameters += [
        torch.nn.Parameter(torch.zeros(weight.shape)) for weight in (*model.embedding, *model.head)
    ]
    made: torch.optim.Optimizer = {
        "adafactor": torch.optim.Adafactor,
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
    }[optimizer](parameters, lr=1e-3)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    made.step()
    kept = [value for state in made.state.values() for name, value in state.items()]
    return float(sum(v.numel() * 4 for v in kept if torch.is_tensor(v) and v.dim()))


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw", "sgd"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_states_are_those_of_torch(family: str, optimizer: Optimizer) -> None:
    model = sample_model(family)
    workload = Workload(8, 8, optimizer=optimizer)
    found = rank_states(rank_view(model, workload, None, table()))
    assert float(found.resident[0]) == _torch_states(model, optimizer)  # type: ignore[index]


def memory(optimizer: Optimizer, scenario: Scenario, plan: Plan) -> float:
    workload = replace(scenario.workload, optimizer=optimizer)
    priced = price(replace(scenario, workload=workload), PlanTable.from_plans([plan]))
    return float(priced.memory.optimizer[0])  # type: ignore[index]


def test_what_a_7_billion_model_needs() -> None:
    """Bytes a parameter of optimizer states, on one GPU; fp32 master weights take 4 more."""
    scenario = make_scenario("llama-3-8b", "1xA100-80GB", seq_len=128, global_batch_size=1)
    parameters = scenario.model.num_parameters
    each = {name: memory(name, scenario, Plan()) / parameters for name in OPTIMIZER_TRAITS}
    assert each["adamw"] == 8
    assert each["sgd"] == 0
    assert each["sgd_momentum"] == each["lion"] == 4
    assert each["adamw_8bit"] == pytest.approx(2 + 8 / BLOCKS[8], rel=1e-3)
    assert each["adafactor"] == pytest.approx(0, abs=0.04)
    assert each["paged_adamw"] == pytest.approx(0, abs=0.04)
    outside = 2 * scenario.model.vocab_size * scenario.model.hidden_size / parameters
    assert each["muon"] == pytest.approx(4 + 4 * outside, rel=1e-4)


def test_pure_bf16_training_takes_8_bytes_a_parameter() -> None:
    """torchtune's full finetune in bf16: weights, gradients and both states in bf16."""
    scenario = make_scenario("llama-3-8b", "1xA100-80GB", seq_len=128, global_batch_size=1)
    workload = replace(scenario.workload, master_weights=False)
    parts = price(replace(scenario, workload=workload), table()).memory
    total = float((parts.weights + parts.gradients + parts.optimizer)[0])  # type: ignore[index]
    assert total == 8 * scenario.model.num_parameters


def test_gradients_in_bf16_halve_them_and_their_traffic() -> None:
    scenario = make_scenario("llama-3-8b", seq_len=128, global_batch_size=8)
    plan = PlanTable.from_plans([Plan(8, zero_stage=1)])
    half = replace(scenario, workload=replace(scenario.workload, gradient_precision="bf16"))
    usual, halved = price(scenario, plan), price(half, plan)
    assert halved.memory.gradients[0] == usual.memory.gradients[0] / 2  # type: ignore[index]
    assert halved.memory.optimizer[0] == usual.memory.optimizer[0]  # type: ignore[index]
    assert halved.time.data_communication[0] < usual.time.data_communication[0]  # type: ignore[index]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", get_args(Optimizer))
def test_a_table_equals_its_rows(optimizer: Optimizer) -> None:
    scenario = make_scenario("mixtral", "8xA100-80GB", seq_len=64, global_batch_size=64)
    scenario = replace(scenario, workload=replace(scenario.workload, optimizer=optimizer))
    plans = [
        Plan(8, zero_stage=3, num_microbatches=8),
        Plan(4, 2, zero_stage=1, num_microbatches=16),
        Plan(2, 4, zero_stage=0, num_microbatches=32),
        Plan(8, zero_stage=2, num_microbatches=8, expert_parallel=4),
    ]
    together = price(scenario, PlanTable.from_plans(plans))
    for row, plan in enumerate(plans):
        alone = price(scenario, PlanTable.from_plans([plan]))
        assert alone.peak[0] == together.peak[row]
        assert alone.memory.optimizer[0] == together.memory.optimizer[row]  # type: ignore[index]
        assert alone.step[0] == together.step[row]
        assert np.isfinite(alone.peak[0])


def test_updates_over_lists_make_copies_and_can_be_the_peak() -> None:
    scenario = make_scenario("llama-3-8b", "1xA100-80GB", seq_len=1, global_batch_size=1)
    fused, listed = scenario, replace(scenario, software=OURS.changed({"optimizer.fused": False}))
    plan = PlanTable.from_plans([Plan()])
    first, second = price(fused, plan), price(listed, plan)
    assert MOMENTS[int(second.moment[0])] == "optimizer"
    assert second.memory.buffers[0] == 4 * scenario.model.num_parameters  # type: ignore[index]
    assert second.memory.allocated[0] > first.memory.allocated[0]  # type: ignore[index]


def test_torch_makes_the_copies_that_are_priced() -> None:
    """torch over lists of tensors: bytes beside weights, gradients and states, traced."""
    from executor.counters.live_tensors import MemoryTracker

    for name, kind in (("adamw", torch.optim.AdamW), ("adafactor", torch.optim.Adafactor)):
        weights = [torch.nn.Parameter(torch.ones(256, 512)) for _ in range(4)]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        made: torch.optim.Optimizer = kind(weights, lr=1e-3, foreach=True)  # type: ignore[operator]
        made.step()
        with MemoryTracker(weights, [made]) as tracker:
            made.step()
        peak = tracker.result()
        copies = OPTIMIZER_TRAITS[name].foreach_copies * 4 * 256 * 512 * 4  # type: ignore[index]
        beside = peak.peak_bytes - peak.end_bytes
        assert copies <= beside < 1.02 * copies + 20_000, name


def test_muon_takes_a_whole_matrix_and_its_products() -> None:
    model = sample_model("llama")
    workload = Workload(8, 8, optimizer="muon")
    found = update_bytes(rank_view(model, workload, OURS, table()))
    rows, columns = CONFIGS["llama"]["intermediate_size"], CONFIGS["llama"]["hidden_size"]
    assert float(found[0]) == (4 + 4) * rows * columns + 4 * columns**2  # type: ignore[index]
    assert all(is_layer_matrix(w) for w in model.kinds[0].weights if w.role == "linear")


def test_muon_multiplies_whole_matrices() -> None:
    """By hand: attention of 64 x 64 (two of 64 x 32), an MLP of 128 x 64, eight layers."""
    model = sample_model("llama")
    workload = Workload(8, 8, optimizer="muon")

    def product(rows: int, columns: int) -> int:
        return 5 * (4 * rows**2 * columns + 2 * rows**3)

    whole = 8 * (2 * product(64, 64) + 2 * product(32, 64) + 3 * product(64, 128))
    plans = [Plan(), Plan(4, zero_stage=1), Plan(4)]
    found = update_flops(rank_view(model, workload, None, PlanTable.from_plans(plans)))
    assert np.asarray(found).tolist() == [whole, whole / 4, whole]
    none = update_flops(rank_view(model, Workload(8, 8), None, PlanTable.from_plans(plans)))
    assert np.asarray(none).tolist() == [0, 0, 0]


def test_bytes_that_an_update_moves() -> None:
    """fp32 AdamW: weight, states and gradient read and written by the update: 32, the norm 4."""

    def moved(**options: Any) -> float:
        return update_accesses(Workload(8, 8, **options), OURS)

    assert moved() == 36
    assert moved(optimizer="lion") == moved(optimizer="sgd_momentum") == 28
    assert moved(optimizer="sgd") == 20
    assert moved(optimizer="adamw_8bit") == 24
    assert moved(master_weights=False) == 2 * 2 + 3 * 2 + 4 * 2
    assert moved(gradient_precision="bf16") == 30
    assert update_accesses(Workload(8, 8), software_profile("megatron")) == 40, "clips before"


def test_adamw_over_lists_of_tensors_takes_its_steps_one_by_one() -> None:
    """torch 2.4: 20 reads and writes, against 7 of one kernel; norm and clipping 3."""
    trainer = software_profile("hf-trainer")
    assert not trainer.optimizer.fused
    assert update_accesses(Workload(8, 8), trainer) == 4.0 * (20 + 3)
    assert update_accesses(Workload(8, 8, master_weights=False), trainer) == 2.0 * (20 + 3)
    assert update_accesses(Workload(8, 8), trainer.changed({"optimizer.fused": True})) == 4.0 * (
        7 + 3
    )
