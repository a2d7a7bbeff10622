"""What frozen layers save, what FSDP1 gathers around them, and what torch and nvidia-smi show.

The counts by operator come from the modules themselves, run on fake tensors: litgpt 0.4.13 and
transformers' Llama with adapters, 512-byte rounding left out.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cost_models.activations.frozen_layers import kept_input_bytes
from cost_models.activations.live import layer_bytes
from cost_models.activations.logits import logits_bytes_per_token
from cost_models.memory.allocator import free_shares, shown_bytes
from cost_models.memory.ledger import MOMENTS, first
from cost_models.memory.optimizer_states import group_of_update
from cost_models.memory.parts import MemoryParts
from cost_models.memory.peak import rank_timeline
from cost_models.model.families import model_spec
from cost_models.model.freezing import with_frozen_parts
from cost_models.model.lora import adapted, is_adapted, quantised_bytes
from cost_models.model.presets import load_preset
from cost_models.partition.plan_stages import default_layer_ranges, pipeline_rank
from cost_models.partition.rank_view import RankView
from cost_models.partition.stages import even_split_contents
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.workload import Workload
from cost_models.pricing.estimate import price
from cost_models.scenario import Scenario
from cost_models.uncertainty import MemoryKind
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.software.trainer import SoftwareProfile, software_profile

MISTRAL = "mistral-7b"


def scenario(
    name: str, software: str, targets: str, *, gpus: int = 1, kind: str = "lora", **options: Any
) -> Scenario:
    values = {
        "seq_len": 1024,
        "global_batch_size": gpus,
        "adapter": kind,
        "adapter_rank": 8,
        "adapter_targets": targets,
        "master_weights": False,
        **options,
    }
    profile = software_profile(software)
    model = model_spec(load_preset(name).config, name=name)
    workload = Workload(**values)
    every = profile.frozen.quantises_every_matrix
    model = adapted(model, workload, quantises_every_matrix=every)
    return Scenario(model, parse_cluster(f"{gpus}xA100-SXM-80GB"), workload, profile)


def saved_per_layer(case: Scenario) -> float:
    """Bytes a token and layer without recomputation."""
    plan = Plan()
    rank = pipeline_rank(case, plan, default_layer_ranges(case, plan), 0)
    table = PlanTable.from_plans([plan])
    size = layer_bytes(RankView(case, table, rank))
    return float(size[0]) / case.workload.seq_len / case.model.num_layers  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "software", "targets", "counted"),
    [
        ("llama-2-7b", "litgpt", "q,v", 180_979.0),
        ("phi-2", "litgpt", "all", 128_228.0),
        ("phi-3-mini", "litgpt", "all", 193_028.0),
    ],
)
def test_a_frozen_layer_saves_what_its_module_does(
    name: str, software: str, targets: str, counted: float
) -> None:
    assert saved_per_layer(scenario(name, software, targets)) == pytest.approx(counted, rel=0.1)


def test_frozen_matrices_save_nothing_of_their_own() -> None:
    """Mistral, h 4096, F 14336, kv 1024: two fp32 norms, q k v out, gate, silu and up."""
    heads = 2.0 * (4096 + 1024 + 1024 + 4096) + 4.0 * 32
    mlp = 3.0 * 2.0 * 14336
    one = scenario(MISTRAL, "hf-trainer", "o")
    adapters = 3.0 * 4096  # the dropped input of one adapter, and its mask
    norms = 2.0 * (4.0 * 4096 + 4.0)
    assert saved_per_layer(one) == pytest.approx(norms + heads + mlp + adapters)


def test_frozen_norms_under_autocast_keep_their_input_alone() -> None:
    """Traced at transformers' Llama under torch.autocast: 8 h of two norms, whatever reads them."""
    heads = 2.0 * (4096 + 1024 + 1024 + 4096) + 4.0 * 32
    one = scenario(MISTRAL, "hf-trainer+autocast+fp32-frozen", "o")
    norms = 2.0 * (4.0 * 4096 + 4.0)
    assert saved_per_layer(one) == pytest.approx(norms + heads + 3.0 * 2.0 * 14336 + 3.0 * 4096)


def test_frozen_norms_of_queries_and_keys_keep_no_normalised_copy() -> None:
    """Qwen3: two norms of h 1024, 16 heads of queries and 8 of keys, each of 128; 2 bytes."""
    model = model_spec(load_preset("qwen3-0.6b").config, name="qwen3")
    case = scenario("qwen3-0.6b", "shardplan", "q", kind="none", adapter_rank=0)
    frozen = replace(case, model=with_frozen_parts(model, "norms"))
    less = saved_per_layer(replace(case, model=model)) - saved_per_layer(frozen)
    assert less == pytest.approx(2.0 * (2 * 1024 + (16 + 8) * 128))


def test_our_own_executor_keeps_inputs_of_frozen_matrices() -> None:
    assert saved_per_layer(scenario(MISTRAL, "shardplan", "q,v")) > saved_per_layer(
        scenario(MISTRAL, "hf-trainer", "q,v")
    )


def test_targets_of_a_question_are_checked() -> None:
    import planner
    from cost_models.model.lora import TARGETS
    from cost_models.plan.workload import TARGET_NAMES
    from hardware_profiles.errors import InputError

    assert set(TARGETS) == set(TARGET_NAMES)
    options = {"seq_len": 512, "lora": 8}
    answer = planner.fit("llama-3.2-1b", "1xA100-80GB", lora_targets="q, v", **options)
    assert answer.scenario.workload.adapter_targets == "q,v"
    assert "adapter_targets = q,v" in str(answer.to_dict()["not_run"])
    for wrong in ("q,q", "q,x", ","):
        with pytest.raises(InputError, match="lora_targets"):
            planner.fit("llama-3.2-1b", "1xA100-80GB", lora_targets=wrong, **options)


def test_targets_name_matrices() -> None:
    case = scenario(MISTRAL, "hf-trainer", "q,v")
    (kind,) = case.model.kinds
    matrices = [w for w in kind.weights if not w.is_adapter]
    chosen = {w.name for w in matrices if is_adapted(w, "q,v")}
    assert chosen == {"self_attn.q_proj.weight", "self_attn.v_proj.weight"}
    assert sum(w.is_adapter for w in kind.weights) == 4
    mlp = {w.name.split(".")[1] for w in matrices if is_adapted(w, "gate,up,down")}
    assert mlp == {"gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("profile", "forward"),
    [
        ("hf-trainer-early", 14.0),
        ("hf-trainer", 12.0),
        ("hf-trainer-early-foak", 10.0),
        ("hf-trainer-foak", 8.0),
        ("litgpt", 8.0),
        ("megatron", 6.0),
        ("megatron-deepspeed", 10.0),
    ],
)
def test_bytes_of_a_logit_at_the_loss(profile: str, forward: float) -> None:
    logits = logits_bytes_per_token(1000, 2.0, 1, software_profile(profile), 1e6)
    assert float(np.asarray(logits.forward)) == forward * 1000


def test_a_chunked_loss_has_copies_of_one_chunk() -> None:
    software = software_profile("torchtune-chunked")
    logits = logits_bytes_per_token(1000, 2.0, 1, software, 8192.0)
    assert float(np.asarray(logits.forward)) == pytest.approx((2.0 + 2.0 / 8.0) * 1000)
    none = logits_bytes_per_token(1000, 2.0, 1, software_profile("hf-trainer-liger"), 8192.0)
    assert float(np.asarray(none.forward)) < 2000.0


def peak(case: Scenario, plan: Plan) -> Any:
    return price(case, PlanTable.from_plans([plan])).memory


def test_fsdp1_shards_what_is_frozen_and_gathers_the_root() -> None:
    case = scenario(MISTRAL, "hf-trainer", "q,k,v,o", gpus=2)
    plan = Plan(data_parallel=2, zero_stage=3, recompute="full")
    whole = peak(scenario(MISTRAL, "hf-trainer", "q,k,v,o"), Plan(recompute="full"))
    parts = peak(case, plan)
    assert float(parts.weights[0]) == pytest.approx(float(whole.weights[0]) / 2, rel=0.01)
    root = 2.0 * 2 * 32000 * 4096
    layer = 2.0 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert float(parts.buffers[0]) == pytest.approx(root + 2 * layer, rel=0.02)
    copies = kept_input_bytes(case.model, 2.0, case.software, PlanTable.from_plans([plan]))
    assert float(copies[0]) == 2.0 * 4096  # type: ignore[index]


@pytest.mark.parametrize(
    ("trainer", "recompute", "kept"),
    [
        ("hf-trainer", "full", 1.0),
        ("hf-trainer+early-stopping-checkpoints", "full", 0.0),
        ("hf-trainer+fsdp2", "full", 0.0),
        ("hf-trainer+deepspeed-zero3", "full", 0.0),
        ("hf-trainer", "none", 0.0),
    ],
)
def test_fsdp1_keeps_inputs_of_frozen_layers_that_reentrant_checkpoints_detach(
    trainer: str, recompute: Any, kept: float
) -> None:
    case = scenario(MISTRAL, trainer, "q,k,v,o", gpus=2)
    table = PlanTable.from_plans([Plan(data_parallel=2, zero_stage=3, recompute=recompute)])
    found = kept_input_bytes(case.model, 2.0, case.software, table)
    assert float(found[0]) == kept * 2.0 * 4096  # type: ignore[index]


def test_fsdp1_gathers_no_layer_at_the_loss_but_the_one_that_comes() -> None:
    case = scenario(MISTRAL, "hf-trainer", "q,k,v,o", gpus=2)
    table = PlanTable.from_plans([Plan(data_parallel=2, zero_stage=3, recompute="full")])
    (rank,) = even_split_contents(case.model, 1, 1)
    moments = rank_timeline(RankView(case, table, rank))
    forward, backward = (float(moments[i].buffers[0]) for i in range(2))  # type: ignore[index]
    layer = 2.0 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert forward == pytest.approx(2.0 * 2 * 32000 * 4096, rel=0.001)
    assert backward - forward == pytest.approx(layer, rel=0.01)  # and its adapters


def test_no_sync_keeps_whole_gradients_of_frozen_weights_too() -> None:
    case = scenario("llama-2-7b", "litgpt", "q,v", gpus=2, global_batch_size=4)
    plan = Plan(data_parallel=2, zero_stage=3, recompute="full", num_microbatches=2)
    parts = peak(case, plan)
    assert float(parts.gradients[0]) == pytest.approx(2.0 * 6.742e9, rel=0.01)
    once = scenario("llama-2-7b", "litgpt", "q,v", gpus=2)
    one = peak(once, Plan(data_parallel=2, zero_stage=3, recompute="full"))
    assert float(one.gradients[0]) < 0.1e9


def test_nothing_is_added_up_beside_the_longest_sequences_where_they_come_first() -> None:
    case = scenario("llama-2-7b", "litgpt", "q,v", gpus=2, global_batch_size=4)
    first = replace(
        case, software=case.software.changed({"activations.longest_sequences_first": True})
    )
    plan = Plan(data_parallel=2, zero_stage=3, recompute="full", num_microbatches=2)
    table = PlanTable.from_plans([plan])
    (rank,) = even_split_contents(case.model, 1, 1)
    usual, changed = (
        [
            float(parts.gradients[0])  # type: ignore[index]
            for parts in rank_timeline(RankView(one, table, rank))
        ]
        for one in (case, first)
    )
    whole = pytest.approx(2.0 * 6.742e9, rel=0.01)
    assert usual[:-3] == [whole] * 5
    assert changed[:-3] == [0.0] * 5
    shards = 4096 * 8 * 4 * 32.0 * 2 / 2  # of the adapters: h r, A and B of q and v, 32 layers
    assert changed[-3:] == usual[-3:] == [whole, whole, shards]  # the update reads shards
    assert float(peak(first, plan).allocated[0]) < float(peak(case, plan).allocated[0])


def test_a_projection_of_its_own_is_gathered_beside_the_last_layer() -> None:
    """torchtune, custom_sharded_layers: the root holds nothing, the loss in chunks its gradient."""
    case = scenario("llama-3-8b", "torchtune-chunked", "", gpus=8, kind="none", seq_len=4096)
    apart = replace(case, software=case.software.changed({"sharding.flat_parameters": False}))
    table = PlanTable.from_plans([Plan(data_parallel=8, zero_stage=3, recompute="full")])
    (rank,) = even_split_contents(case.model, 1, 1)
    moments = rank_timeline(RankView(apart, table, rank))
    head, layer = 2.0 * 128256 * 4096, 2.0 * 218_112_000
    at = dict(zip(MOMENTS, moments, strict=True))
    # projection, its gradient and the copy that is reduced; the layer that comes next
    assert float(at["head"].buffers[0]) == pytest.approx(3 * head + layer, rel=1e-4)  # type: ignore[index]
    assert float(at["head"].logits[0]) == 2.0 * 128256 * 4096  # type: ignore[index]
    assert float(at["backward"].buffers[0]) == pytest.approx(3 * layer, rel=0.01)  # type: ignore[index]


def test_bytes_of_a_quantised_element() -> None:
    assert quantised_bytes("nf4") == 0.5 + 4 / 64
    assert quantised_bytes("nf4_double") == pytest.approx(
        0.5 + 0.127 / 8, rel=0.001
    )  # QLoRA sec. 3
    assert quantised_bytes("int4") == pytest.approx(4.15625 / 8)


def test_qlora_of_other_trainers_quantises_every_matrix_of_a_layer() -> None:
    ours = scenario(MISTRAL, "shardplan", "q,v", kind="qlora")
    theirs = scenario(MISTRAL, "hf-trainer", "q,v", kind="qlora")

    def small(case: Scenario) -> int:
        return sum(w.numel for kind in case.model.kinds for w in kind.weights if w.quantised)

    assert small(ours) == 4096 * (4096 + 1024)
    assert small(theirs) == 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336


def test_an_optimizer_in_the_backward_pass_keeps_no_gradients() -> None:
    from dataclasses import replace

    usual = scenario(MISTRAL, "torchtune", "q,v", adapter="none", adapter_rank=0)
    fused = replace(usual, software=usual.software.changed({"optimizer.in_backward": True}))
    plan = Plan(recompute="full")
    less = float(peak(usual, plan).allocated[0]) - float(peak(fused, plan).allocated[0])
    assert less > 0.5 * 2.0 * 7.24e9


def test_an_update_in_the_backward_pass_has_temporaries_of_a_layer_at_most() -> None:
    software = "hf-trainer+deepspeed-zero3+update-in-backward"
    case = scenario(MISTRAL, software, "q,v", adapter="none", adapter_rank=0)
    plan = Plan(zero_stage=3)
    rank = pipeline_rank(case, plan, default_layer_ranges(case, plan), 0)
    layer = 2.0 * 4096 * 5120 + 3.0 * 4096 * 14336 + 2.0 * 4096
    view = RankView(case, PlanTable.from_plans([plan]), rank)
    assert float(first(group_of_update(view))) == layer


def test_an_update_in_the_backward_pass_takes_the_head_alone_on_the_last_stage() -> None:
    software = "hf-trainer+update-in-backward"
    case = scenario("llama-3-8b", software, "q,v", adapter="none", adapter_rank=0)
    plan = Plan(pipeline_parallel=2)
    rank = pipeline_rank(case, plan, default_layer_ranges(case, plan), 1)
    view = RankView(case, PlanTable.from_plans([plan]), rank)
    assert float(first(group_of_update(view))) == pytest.approx(4096.0 * 128256, rel=1e-4)


def test_what_torch_reserves_and_the_device_shows() -> None:
    software: SoftwareProfile = software_profile("hf-trainer")
    table = PlanTable.from_plans([Plan(data_parallel=8, zero_stage=3)])
    shares, budget, outside = free_shares(software, table), 80e9, 2e9
    least, cached = first(shares.typical), first(shares.cached)

    def shown(kind: MemoryKind, states: float, transient: float) -> float:
        quarter = 0.25 * transient
        parts = MemoryParts(states, quarter, 0.0, 2 * quarter, 0.0, quarter, 0.0)
        return first(shown_bytes(kind, parts, outside, software, table, budget))

    assert shown("allocated", 6e9, 4e9) == 10e9
    assert shown("reserved", 6e9, 4e9) == pytest.approx(10e9 + cached * 4e9)
    assert shown("device", 6e9, 4e9) == shown("reserved", 6e9, 4e9) + outside
    assert shown("reserved", 60e9, 0.0) == 60e9  # states have no free blocks
    # managed memory: on the device beside torch's, as far as there is room
    states = MemoryParts(60e9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    paged = [
        first(shown_bytes(kind, states, outside, software, table, budget, size))
        for kind, size in (("reserved", 6e9), ("device", 6e9), ("device", 60e9))
    ]
    assert paged == [60e9, 68e9, 80e9]
    # near the end of memory cached blocks are given back
    assert shown("device", 6e9, 70e9) == pytest.approx(6e9 + 70e9 * (1 + least) + outside)
    assert shown("device", 58e9, 18e9) == pytest.approx(budget)
