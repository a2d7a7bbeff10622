"""Bytes and FLOP of checkpoint policies, against torch's own selective checkpoints and counter."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from cost_models.activations.live import layer_bytes
from cost_models.communication.expert_parallel import expert_traffic, most_loaded
from cost_models.compute.hardware_flops import hardware_flops_per_step
from cost_models.model.families import model_spec
from cost_models.model.presets import load_preset
from cost_models.partition.rank_view import RankView
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.recompute import CONTAINED, MODULES, RECOMPUTE, read_setting, repeats_module
from cost_models.plan.workload import Workload
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import software_profile
from planner.request.stage_layers import read_recompute
from tests.allocations import LiveBytes
from tests.samples import make_scenario, rank_view

TOKENS = 64
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SIZES},
    "qwen2": {**SIZES},  # queries, keys and values have biases: addmm
    "qwen3": {**SIZES, "head_dim": 16},
    "gpt2": {
        "n_embd": 64, "n_inner": 160, "n_layer": 2, "n_head": 4, "vocab_size": 96,
        "n_positions": 128, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
}  # fmt: skip
ATEN = torch.ops.aten
ATTENTION = ATEN._scaled_dot_product_flash_attention_for_cpu.default


def every_second_mm() -> Any:
    """Return the contexts of torchtitan's selective op: its policy counts mm and saves odd ones."""
    counts = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *given: Any, **named: Any) -> CheckpointPolicy:
        saves = operator is ATTENTION
        if operator is ATEN.mm.default:
            counts[context.is_recompute] += 1
            saves = counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


Wrap = Callable[[Any], None]


def of_layers(layer: Any) -> None:
    layer.forward = partial(
        checkpoint, layer.forward, use_reentrant=False, context_fn=every_second_mm
    )


def of_mlps(layer: Any) -> None:
    layer.mlp.forward = partial(checkpoint, layer.mlp.forward, use_reentrant=False)


def traced(config: dict[str, Any], wrap: Wrap | None) -> tuple[float, float]:
    """Return bytes that a layer keeps for its backward pass, and FLOP of a step.

    Bytes: what two layers keep less what one keeps; rotary tables and the head cancel.
    """
    kept, flops = [], 0.0
    for layers in (1, 2):
        name = "n_layer" if config["model_type"] == "gpt2" else "num_hidden_layers"
        about = AutoConfig.for_model(**{**config, name: layers})
        about._attn_implementation = "sdpa"
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(about).to(torch.float32)
        base = model.model if hasattr(model, "model") else model.transformer
        for layer in base.layers if hasattr(base, "layers") else base.h:
            if wrap is not None:
                wrap(layer)
        tokens = torch.arange(TOKENS)[None] % 96
        with LiveBytes(model.parameters()) as living:
            loss = model(tokens, use_cache=False).logits.sum()
            kept.append(living.live)
        del loss
        with FlopCounterMode(display=False) as counter:
            model(tokens, use_cache=False).logits.sum().backward()
        flops = float(counter.get_total_flops())
    return (kept[1] - kept[0]) / TOKENS, flops


def priced(config: dict[str, Any], recompute: str) -> tuple[float, float]:
    """Return bytes that a layer keeps for a token, and hardware FLOP of a step."""
    about = AutoConfig.for_model(**config).to_dict()
    model = model_spec(about, name="small")
    workload = Workload(TOKENS, 1, precision="fp32")
    table = PlanTable.from_plans([Plan(recompute=recompute)])
    software = make_scenario(seq_len=TOKENS, global_batch_size=1).software
    kept = layer_bytes(rank_view(model, workload, software, table)) / TOKENS
    flops = hardware_flops_per_step(model, workload, table)
    return float(np.ravel(kept)[0]) / model.num_layers, float(np.ravel(flops)[0])


@pytest.mark.sampled(7)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("setting", "wrap"), [("none", None), ("ops:every-2nd-mm", of_layers), ("modules:mlp", of_mlps)]
)
def test_a_setting_keeps_and_repeats_what_torch_does(
    family: str, setting: str, wrap: Wrap | None
) -> None:
    config = {"model_type": family, **FAMILIES[family]}
    kept, flops = priced(config, setting)
    _, plain = priced(config, "none")
    measured, counted = traced(config, wrap)
    _, counted_plain = traced(config, None)
    assert kept == pytest.approx(measured, rel=1e-6)
    assert flops - plain == pytest.approx(counted - counted_plain, rel=1e-6)


def test_modules_of_a_megatron_layer_by_hand() -> None:
    """Llama-3-8B in bf16: input, norms, matrices; one kernel a norm and an activation."""
    model, workload = (
        model_spec(load_preset("llama-3-8b").config, name="llama-3-8b"),
        Workload(8192, 1, precision="bf16"),
    )
    h, f = 4096.0, 14336.0
    software = software_profile("megatron-core")

    def kept(setting: str) -> float:
        found = layer_bytes(rank_view(model, workload, software, Plan(recompute=setting)))
        return float(np.ravel(found)[0]) / 8192 / model.num_layers

    every = kept("none")
    copies = software.activations.activation_saved["default"] + 3.0
    copies = software.activations.activation_saved.get("silu", copies - 3.0) + 3.0
    assert every - kept("modules:mlp") == pytest.approx(2.0 * copies * f)
    assert every - kept("modules:layernorm") == pytest.approx(2.0 * 2.0 * h, rel=0.001)
    assert every - kept("modules:core_attn+mlp") == pytest.approx(
        every - kept("selective") + 2.0 * copies * f
    )
    log_sums = every - kept("selective")
    heads = 2.0 * (2 * 4096.0 + 2 * 1024.0)  # queries and the output; keys and values
    assert every - kept("modules:attn") == pytest.approx(heads + log_sums)
    assert kept("modules:core_attn+attn") == kept("modules:attn")


def test_experts_alone_keep_their_rows_and_their_exchange() -> None:
    """Qwen3-30B-A3B: between their matrices eight experts of 768, without another exchange."""
    model = model_spec(load_preset("qwen3-30b-a3b").config, name="qwen3-30b-a3b")
    workload, software = Workload(4096, 8, precision="bf16"), software_profile("megatron-core")

    def view(setting: str) -> RankView:
        plan = Plan(data_parallel=8, expert_parallel=8, zero_stage=1, recompute=setting)
        return rank_view(model, workload, software, plan)

    def kept(setting: str) -> float:
        return float(np.ravel(layer_bytes(view(setting)))[0]) / 4096 / model.num_layers

    saved = software.activations.activation_saved
    copies = saved.get("silu", saved["default"]) + 3.0
    loaded = float(most_loaded(model.kinds[0].feed_forward, 8, software))
    inside = loaded * 2.0 * copies * 8 * 768
    assert kept("none") - kept("modules:experts") == pytest.approx(inside)
    assert kept("modules:moe") < kept("modules:experts") < kept("modules:moe_act")
    exchanged = {
        setting: float(np.ravel(expert_traffic(view(setting))["expert", "all_to_all"].size)[0])
        for setting in ("none", "modules:experts", "modules:moe")
    }
    assert exchanged["none"] == exchanged["modules:experts"] < exchanged["modules:moe"]


def test_rows_of_experts_are_those_of_the_most_loaded_rank() -> None:
    """Of Qwen3-30B-A3B: eight rows a token, and what eight experts of 768 save of them."""
    model = model_spec(load_preset("qwen3-30b-a3b").config, name="qwen3-30b-a3b")
    workload = Workload(4096, 8, precision="bf16")

    def kept(trainer: str, ranks: int) -> float:
        plan = Plan(data_parallel=8, expert_parallel=ranks, zero_stage=1)
        found = layer_bytes(rank_view(model, workload, software_profile(trainer), plan))
        return float(np.ravel(found)[0]) / 4096 / model.num_layers

    software, mixture = software_profile("megatron-core"), model.kinds[0].feed_forward
    saved = software.activations
    copies = saved.activation_saved.get("silu", saved.activation_saved["default"]) + 3.0
    rows = 2.0 * 8 * (2048 * (1.0 + saved.expert_outputs_saved) + copies * 768)
    more = float(most_loaded(mixture, 8, software)) - 1.0
    assert more > 0.05
    assert kept("megatron-core", 8) - kept("megatron-core", 1) == pytest.approx(more * rows)
    assert kept("shardplan", 8) == kept("shardplan", 1)  # plans are compared under balanced routing


def test_named_queries_and_keys_are_kept_without_their_norms() -> None:
    """MaxText names them behind their norms: of a layer it keeps what it keeps without norms.

    The layers of Qwen3-8B and Llama-3-8B differ in these norms and in the MLP, which runs again.
    """

    def kept(preset: str, trainer: str) -> float:
        model = model_spec(load_preset(preset).config, name=preset)
        workload, software = Workload(8192, 1, precision="bf16"), software_profile(trainer)
        plan = Plan(recompute="modules:core_attn+layernorm+mlp")
        found = layer_bytes(rank_view(model, workload, software, plan))
        return float(np.ravel(found)[0]) / 8192 / model.num_layers

    assert kept("qwen3-8b", "xla") == pytest.approx(kept("llama-3-8b", "xla"))
    assert kept("qwen3-8b", "megatron-core") > kept("llama-3-8b", "megatron-core") + 2.0 * 5120


def test_a_set_of_modules_is_read_in_any_order_and_a_wrong_one_refused() -> None:
    assert read_setting("modules:mlp,layernorm") == "modules:layernorm+mlp"
    assert len(RECOMPUTE) == len(set(RECOMPUTE))
    assert set(map(read_setting, RECOMPUTE)) == {*RECOMPUTE} - {"modules:core_attn"}
    with pytest.raises(InputError, match="'mpl' is no module that is computed again"):
        read_setting("modules:mpl")
    with pytest.raises(InputError, match="must be one of none, selective, full"):
        read_setting("some")
    codes = np.arange(len(RECOMPUTE))
    for module in MODULES:
        outer = {module, *(name for name, inner in CONTAINED.items() if module in inner)}
        named = [bool(outer & {*word.partition(":")[2].split("+")}) for word in RECOMPUTE]
        named[RECOMPUTE.index("selective")] = module == "core_attn"
        assert repeats_module(codes, module).tolist() == named


def test_every_is_a_short_form_of_a_share_of_the_layers() -> None:
    assert read_recompute({"recompute": "every:3"}) == {
        "recompute": "full", "recompute_layers": 1, "recompute_every": 3
    }  # fmt: skip
    assert read_recompute({"recompute": "ops:every-2nd-mm:1/2"})["recompute"] == "ops:every-2nd-mm"
