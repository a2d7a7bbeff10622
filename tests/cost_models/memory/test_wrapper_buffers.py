"""Buffers of DDP and DeepSpeed: by hand, and on the memory of real torch processes."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cost_models.memory.host import rank_host_bytes
from cost_models.memory.ledger import (
    EMBEDDING,
    LATER_BACKWARD,
    LOSS_BACKWARD,
    LOSS_FORWARD,
    OPTIMIZER,
    first,
)
from cost_models.memory.model_states import rank_weights
from cost_models.memory.optimizer_states import update_bytes
from cost_models.memory.peak import rank_timeline
from cost_models.memory.wrapper_buffers import update_with_copies, wrapper_rows
from cost_models.model.lora import adapted
from cost_models.partition.frozen_weights import frozen_bytes, frozen_layer_bytes
from cost_models.partition.rank_view import RankView
from cost_models.plan.plan import Plan, PlanTable
from hardware_profiles.software.trainer import SoftwareProfile, software_profile
from tests.allocations import peak_allocated
from tests.samples import make_scenario, rank_view

WIDTH = 256


def view_of(software: str | SoftwareProfile, plan: Plan, **workload: Any) -> RankView:
    scenario = make_scenario("llama", software="shardplan", **workload)
    profile = software_profile(software) if isinstance(software, str) else software
    return rank_view(scenario.model, scenario.workload, profile, plan)


def alive(view: RankView, moment: int) -> dict[str, float]:
    """Bytes by name of the rows that live at a moment."""
    found: dict[str, float] = {}
    for row in wrapper_rows(view):
        if row.created <= moment <= row.freed and first(row.size) > 0.0:
            found[row.name] = found.get(row.name, 0.0) + first(row.size)
    return found


def test_ddp_has_buckets_as_large_as_all_gradients() -> None:
    plan = Plan(data_parallel=4)
    view = view_of("ddp", plan)
    numel = first(view.parameters.total)
    assert alive(view, LOSS_FORWARD) == alive(view, OPTIMIZER) == {"DDP's buckets": 4.0 * numel}
    assert not alive(view_of("ddp-bucket-views", plan), OPTIMIZER)
    assert not alive(view_of("ddp", Plan()), OPTIMIZER)
    assert not alive(view_of("fsdp2", Plan(data_parallel=4, zero_stage=3)), OPTIMIZER)
    halves = view_of("ddp", plan, master_weights=False)
    assert alive(halves, OPTIMIZER) == {"DDP's buckets": 2.0 * numel}


def test_data_parallel_gathers_outputs_and_gradients_on_the_first_accelerator() -> None:
    """Four replicas of a micro-batch: fp32 logits, keys and values of 8 layers, 4 heads of 8."""
    plan = Plan(data_parallel=4)
    view = view_of("hf-trainer+data-parallel", plan)
    tokens, numel = first(view.tokens), first(view.parameters.total)
    outputs = 4.0 * tokens * (4.0 * 512 + 2.0 * 2.0 * 8 * 4 * 8)
    buckets = {"DDP's buckets": 4.0 * numel}
    assert alive(view, LOSS_FORWARD) == {"outputs of all replicas": outputs, **buckets}
    assert alive(view, LOSS_BACKWARD) == buckets
    full = view_of("hf-trainer+data-parallel", dataclasses.replace(plan, recompute="full"))
    assert alive(full, LOSS_FORWARD)["outputs of all replicas"] == 16.0 * tokens * 512
    assert not alive(view_of("hf-trainer+data-parallel", Plan()), LOSS_FORWARD)


def test_deepspeed_reduces_in_buckets_while_a_backward_pass_runs() -> None:
    two = view_of("deepspeed-zero2", Plan(data_parallel=4, zero_stage=2))
    assert not alive(two, LOSS_FORWARD)
    assert not alive(two, OPTIMIZER)
    assert alive(two, LOSS_BACKWARD) == alive(two, EMBEDDING) == {"reduce buckets": 1e9}
    three = view_of("deepspeed-zero3", Plan(data_parallel=4, zero_stage=3))
    assert alive(three, OPTIMIZER) == {"reduce buckets": 1e9}
    auto = view_of("deepspeed-zero2+deepspeed-auto-buckets", Plan(data_parallel=4, zero_stage=2))
    assert alive(auto, LOSS_BACKWARD) == {"reduce buckets": 2.0 * 64**2}


def test_deepspeed_casts_a_partition_for_the_update() -> None:
    """ZeRO-2 on 4 ranks: 2 bytes kept, 2 flattened, 4 cast; then 4 and what the update takes.

    One tensor after the other: the partition is one, whose root and quotient are whole.
    """
    kinds = {"adamw-fused": 0.0, "adamw-foreach": 4.0, "adamw-for-loop": 8.0}
    for kernels, others in kinds.items():
        view = view_of(f"deepspeed-zero2+{kernels}", Plan(data_parallel=4, zero_stage=2))
        shard = first(view.parameters.total) / 4.0
        kept = shard * 2.0
        expected = max(8.0 * shard, (4.0 + others) * shard)
        assert kept + first(update_with_copies(view, update_bytes(view))) == expected
    whole = view_of("deepspeed-bf16-optimizer", Plan(data_parallel=4, zero_stage=1))
    fused = np.zeros(1)
    assert first(update_with_copies(whole, fused)) == 0.0
    one = view_of("deepspeed-zero2", Plan())  # a partition of a single rank
    assert first(update_with_copies(one, 0.0)) == 6.0 * first(one.parameters.total)


def test_zero_3_of_deepspeed_keeps_16_bit_gradients_and_updates_groups() -> None:
    """An fp32 gradient and temporaries of a group at once, whole or half of a shard."""
    plan = Plan(data_parallel=4, zero_stage=3)
    for kernels, others in (("adamw-for-loop", 8.0), ("adamw-foreach", 4.0)):
        view = view_of(f"deepspeed-zero3+{kernels}", plan)
        shard = first(view.parameters.total) / 4.0
        assert first(update_with_copies(view, update_bytes(view))) == (4.0 + others) * shard
        halves = view_of(view.software.changed({"optimizer.group_elements": shard / 2.0}), plan)
        assert first(update_with_copies(halves, update_bytes(halves))) == (4.0 + others) * shard / 2


def test_zero_3_of_deepspeed_has_16_bit_shards_next_to_fp32_ones() -> None:
    plan = Plan(data_parallel=4, zero_stage=3)
    for software, each in (("deepspeed-zero3", 6.0), ("fsdp2", 4.0)):
        view = view_of(software, plan)
        weights = sum(first(row.size) for row in rank_weights(view))
        assert weights == each * first(view.parameters.total) / 4.0


def test_bf16_optimizer_has_whole_gradients_in_both_precisions() -> None:
    view = view_of("deepspeed-bf16-optimizer", Plan(data_parallel=4, zero_stage=1))
    numel = first(view.parameters.total)
    at_update = rank_timeline(view)[OPTIMIZER]
    assert first(at_update.gradients) == 4.0 * numel
    assert alive(view, OPTIMIZER) == {"gradients in compute precision": 2.0 * numel}
    assert not alive(view, LOSS_FORWARD)


def test_nanotron_frees_its_16_bit_gradients_after_a_backward_pass() -> None:
    """They are whole beside the fp32 buffer at its end, and gone at the update and next loss."""
    view = view_of("nanotron", Plan(data_parallel=4, zero_stage=1))
    numel = first(view.parameters.total)
    assert first(rank_timeline(view)[EMBEDDING].gradients) == 4.0 * numel
    assert alive(view, EMBEDDING) == {"gradients in compute precision": 2.0 * numel}
    assert not alive(view, OPTIMIZER)
    assert not alive(view, LOSS_FORWARD)


def test_internevo_keeps_gradients_in_16_bits() -> None:
    view = view_of("internevo", Plan(data_parallel=4, zero_stage=1))
    at_update = rank_timeline(view)[OPTIMIZER]
    assert first(at_update.gradients) == 2.0 * first(view.parameters.total) / 4.0


def test_zero_1_of_deepspeed_keeps_gradients_whole_to_the_update() -> None:
    one, two = (
        rank_timeline(view_of(f"deepspeed-zero{stage}", Plan(data_parallel=4, zero_stage=stage)))
        for stage in (1, 2)
    )
    assert first(one[EMBEDDING].gradients) == 4.0 * first(two[EMBEDDING].gradients)
    assert first(one[OPTIMIZER].gradients) == first(two[OPTIMIZER].gradients)


def test_no_shard_has_fp32_weights_alone() -> None:
    plan = Plan(data_parallel=4)
    for software, each in (("fsdp1-no-shard", 4.0), ("ddp", 6.0)):
        view = view_of(software, plan)
        weights = sum(first(row.size) for row in rank_weights(view))
        assert weights == each * first(view.parameters.total)


def test_offload_takes_what_is_sharded_frozen_weights_too() -> None:
    plan = Plan(data_parallel=4, zero_stage=3, offload="weights")
    scenario = make_scenario("llama", software="hf-trainer", adapter="lora", adapter_rank=4)
    scenario = dataclasses.replace(scenario, model=adapted(scenario.model, scenario.workload))
    for software, leaves in (("hf-trainer", True), ("shardplan", False)):
        profile = software_profile(software)
        view = rank_view(scenario.model, scenario.workload, profile, plan)
        rows = {row.name: first(row.size) for row in rank_weights(view)}
        whole, layer = first(frozen_bytes(view)), first(frozen_layer_bytes(view))
        assert rows["frozen base"] == (0.0 if leaves else whole)
        assert rows.get("frozen shards in transfer", 0.0) == (2.0 * layer if leaves else 0.0)
        assert 0.0 < 2.0 * layer < whole
        memory = first(rank_host_bytes(view).memory)
        resident = dataclasses.replace(plan, offload="optimizer")
        stays = view.with_table(PlanTable.from_plans([resident]))
        assert (memory - first(rank_host_bytes(stays).memory) >= whole) == leaves


def test_zero_3_keeps_weights_that_it_gathered_on_one_rank_too() -> None:
    """The first run of a step releases only what is used again after a billion elements."""
    scenario = make_scenario("llama", software="hf-trainer", adapter="lora", adapter_rank=4)
    model = adapted(scenario.model, scenario.workload)
    software, rest = software_profile("hf-trainer+deepspeed-zero3"), "weights that are not released"

    def kept(plan: Plan) -> float:
        view = rank_view(model, scenario.workload, software, plan)
        return alive(view, LOSS_BACKWARD).get(rest, 0.0)

    sharded = kept(Plan(data_parallel=4, zero_stage=3))
    assert sharded > scenario.model.num_parameters  # frozen ones, 2 bytes each, less a layer
    assert kept(Plan(zero_stage=3, offload="weights")) == sharded
    assert kept(Plan()) == 0.0


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)))


@pytest.mark.parametrize("views", [False, True])
def test_torch_has_buckets_next_to_gradients(alone: None, views: bool) -> None:
    """Gradients have storages of their own, next to the buckets, unless they are views of these."""
    model = layers()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
    for _ in range(2):  # buckets are made anew after the first step
        wrapped.zero_grad()
        wrapped(torch.randn(1, WIDTH)).sum().backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    storages = {each.untyped_storage().data_ptr() for each in gradients}
    own = all(each.untyped_storage().nbytes() == 4 * each.numel() for each in gradients)
    assert own == (not views)
    assert (len(storages) < len(gradients)) == views


@pytest.mark.parametrize(
    ("options", "copies"),
    [
        ({"foreach": False}, 3.0 / 8.0),
        ({"foreach": True}, 1.0),
        ({"fused": True}, 0.0),
    ],
)
def test_temporaries_of_adamw_are_those_of_its_kernels(
    options: dict[str, bool], copies: float
) -> None:
    model = layers()
    numel = sum(weight.numel() for weight in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    gradients = [weight.grad for weight in model.parameters()]

    def step() -> None:
        for weight, gradient in zip(model.parameters(), gradients, strict=True):
            weight.grad = gradient
        optimizer.step()

    optimizer.step()
    assert peak_allocated(step) / (4.0 * numel) == pytest.approx(copies, abs=0.03)


def test_a_loop_over_tensors_has_temporaries_of_the_largest() -> None:
    view = view_of("adamw-for-loop", Plan())
    model = view.model
    assert first(update_bytes(view)) == 2.0 * 4.0 * model.vocab_size * model.hidden_size
    everything = view_of("adamw-foreach", Plan())
    assert first(update_bytes(everything)) == 4.0 * first(view.parameters.total)
    assert first(update_bytes(view_of("adamw-fused", Plan()))) == 0.0


def test_a_swiglu_that_nothing_fuses_keeps_what_silu_gives() -> None:
    silu = {
        name: view_of(name, Plan()).software.activations.activation_saved["silu"]
        for name in ("nanotron", "internevo", "megatron")
    }
    assert silu == {"nanotron": 1.0, "internevo": 1.0, "megatron": 0.0}


def test_fsdp2_gathers_frozen_weights_with_the_adapters_of_their_block() -> None:
    scenario = make_scenario("llama", software="hf-trainer", adapter="lora", adapter_rank=4)
    model = adapted(scenario.model, scenario.workload)

    def view_under(software: str, plan: Plan) -> RankView:
        return rank_view(model, scenario.workload, software_profile(software), plan)

    def buffers(software: str, plan: Plan, moment: int) -> float:
        return first(rank_timeline(view_under(software, plan))[moment].buffers)

    plan = Plan(data_parallel=4, zero_stage=3)
    view = view_under("hf-trainer+fsdp2", plan)
    layer, head = 4.0 * first(frozen_layer_bytes(view)), 2.0 * (512 + 1) * model.hidden_size
    trained = 4.0 * 3.0 * first(view.parameters.largest_layer)  # in fp32: gathered and reduced
    both = buffers("hf-trainer+fsdp2", plan, LATER_BACKWARD)
    assert 2.0 * layer <= both <= 2.0 * layer + trained
    assert buffers("hf-trainer+fsdp2", plan, LOSS_FORWARD) == 2.0 * head  # with the last norm
    apart = dataclasses.replace(plan, data_parallel=1)
    assert buffers("hf-trainer+fsdp2", apart, LATER_BACKWARD) < layer
    # DeepSpeed's are in its own row
    kept = view_under("hf-trainer+deepspeed-zero3", plan)
    whole = sum(alive(kept, LATER_BACKWARD).values())
    assert first(rank_timeline(kept)[LATER_BACKWARD].buffers) <= whole + trained
