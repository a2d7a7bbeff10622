"""FLOPs against the operators that torch counts while the real module runs."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from cost_models.compute.flops import (
    attention_flops_per_token,
    core_backward_flops_per_token,
    core_flops_per_token,
    forward_flops_per_token,
    model_flops_per_step,
    rule_of_thumb_ratio,
    six_n_d,
)
from cost_models.compute.hardware_flops import hardware_flops_per_step
from cost_models.model.families import model_spec
from cost_models.model.spec import Attention, ModelSpec
from cost_models.model.target_length import with_target_length
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.workload import Workload
from tests.cost_models.model.real_modules import AUTO_CLASSES
from tests.cost_models.model.test_families import ALL_CASES, CASES, tiny
from tests.samples import CONFIGS, llama

BATCH, SEQ_LEN = 2, 16


def convolution_backward(
    gradient: tuple[int, ...], inputs: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any
) -> int:
    """Twice the forward FLOP; torch's own formula treats all groups as one."""
    return 2 * 2 * math.prod(gradient) * math.prod(weight[1:])


CONVOLUTIONS = {torch.ops.aten.convolution_backward: convolution_backward}
# optional features of a family: all of them in the slow suite, here those that change the matmuls
# in another way than by their sizes
CASES_NOW = [
    param
    if param.id.endswith("-plain") or "word_embed_proj_dim" in param.id
    else pytest.param(*param.values, id=param.id, marks=pytest.mark.slow)
    for param in ALL_CASES
]


def eager_module(config: dict[str, Any]) -> PreTrainedModel:
    """The module on the CPU in fp32, attention and experts as plain matmuls."""
    values = dict(config)
    family = values.pop("model_type")
    auto_class = AUTO_CLASSES.get(family, AutoModelForCausalLM)
    module = auto_class.from_config(CONFIG_MAPPING[family](**values), attn_implementation="eager")
    if any("experts" in name for name, _ in module.named_parameters()):
        module.set_experts_implementation("eager")
    return module


def as_multiplied(config: dict[str, Any]) -> dict[str, Any]:
    """The config with the experts that the module multiplies: Llama 4's takes all of them."""
    if config["model_type"] != "llama4_text":
        return config
    return {**config, "num_experts_per_tok": config["num_local_experts"]}


def counted_flops(module: PreTrainedModel, target_seq_len: int = SEQ_LEN) -> tuple[int, int]:
    """FLOP of one forward and of one backward pass."""
    tokens = torch.randint(2, 90, (BATCH, SEQ_LEN))
    inputs = {"input_ids": tokens, "labels": tokens}
    if module.config.model_type == "t5":
        targets = torch.randint(2, 90, (BATCH, target_seq_len))
        inputs |= {"decoder_input_ids": targets, "labels": targets}
    with FlopCounterMode(display=False) as forward:
        loss = module(**inputs).loss
    with FlopCounterMode(display=False, custom_mapping=CONVOLUTIONS) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("config", CASES_NOW)
def test_flops_are_those_of_the_real_module(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    forward, backward = counted_flops(eager_module(config))
    spec = model_spec(as_multiplied(config), name="tiny")
    assert float(forward_flops_per_token(spec, SEQ_LEN)) * BATCH * SEQ_LEN == forward
    # two matmuls for each one: nothing before the first layer asks for no gradient
    linear = [kind for kind in (spec.kinds[i] for i in spec.pattern) if kind.attention.delta_rule]
    beyond = sum(  # products of the rule's backward pass beyond two for each one
        float(core_backward_flops_per_token(kind, SEQ_LEN, "eager"))
        - 2.0 * float(core_flops_per_token(kind, SEQ_LEN))
        for kind in linear
    )
    assert float(model_flops_per_step(spec, SEQ_LEN, BATCH)) == pytest.approx(
        forward + backward - beyond * BATCH * SEQ_LEN, rel=1e-12 if linear else 0.0
    )


@pytest.mark.parametrize("target_seq_len", [5, 24])
def test_targets_of_an_encoder_decoder_have_a_length_of_their_own(target_seq_len: int) -> None:
    config = dict(CONFIGS["t5"])
    forward, backward = counted_flops(eager_module(config), target_seq_len)
    workload = Workload(SEQ_LEN, BATCH, attention_kernel="eager", target_seq_len=target_seq_len)
    spec = with_target_length(model_spec(config, name="tiny"), workload)
    once = float(forward_flops_per_token(spec, SEQ_LEN)) * BATCH * SEQ_LEN
    assert once == pytest.approx(forward, rel=1e-12)
    step = float(model_flops_per_step(spec, SEQ_LEN, BATCH))
    assert step == pytest.approx(forward + backward, rel=1e-12)
    table = PlanTable.from_plans([Plan(micro_batch_size=BATCH)])
    executed = float(hardware_flops_per_step(spec, workload, table)[0])
    assert executed == pytest.approx(forward + backward, rel=1e-12)


def test_every_family_is_counted() -> None:
    assert {param.values[0]["model_type"] for param in ALL_CASES} == set(CASES)  # type: ignore[index]


def test_flash_attention_does_the_flops_of_eager_attention() -> None:
    """Scores in full: what eager attention multiplies is what the formula counts for both."""
    attention = Attention(num_heads=4, num_kv_heads=2, head_dim=8, value_head_dim=8)
    query = torch.randn(BATCH, 4, SEQ_LEN, 8)
    key = value = torch.randn(BATCH, 4, SEQ_LEN, 8)
    with FlopCounterMode(display=False) as counter:
        scores = (query @ key.transpose(-1, -2)).softmax(-1)
        eager = scores @ value
    ours = float(attention_flops_per_token(attention, SEQ_LEN)) * BATCH * SEQ_LEN
    assert ours == counter.get_total_flops()
    flash = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=1.0)
    torch.testing.assert_close(flash, eager)


def test_narayanan_formula_for_gpt() -> None:
    """arXiv:2104.04473, eq. 3 without recomputation: 72 B s l h^2 (1 + s/6h + V/12lh)."""
    layers, hidden, vocab, seq_len, batch = 24, 2304, 51200, 2048, 512
    spec = model_spec(
        {
            "model_type": "gpt2",
            "n_embd": hidden,
            "n_layer": layers,
            "n_head": 24,
            "vocab_size": vocab,
            "n_positions": seq_len,
        },
        name="1.7B",
    )
    published = (
        72
        * batch
        * seq_len
        * layers
        * hidden**2
        * (1 + seq_len / (6 * hidden) + vocab / (12 * layers * hidden))
    )
    assert float(model_flops_per_step(spec, seq_len, batch)) == pytest.approx(published, rel=1e-12)


def test_rule_of_thumb() -> None:
    assert six_n_d(175e9, 300e9) == 3.15e23  # GPT-3: 3.14e23 in arXiv:2005.14165, table D.1
    short, long = (float(rule_of_thumb_ratio(llama(), n)) for n in (1, 4096))
    assert short < long  # attention scores are what 6 N D leaves out


def test_projections_around_the_embedding_are_counted() -> None:
    """OPT-350m embeds in fewer features than its hidden size."""
    narrow = model_spec(tiny("opt", word_embed_proj_dim=16), name="opt")
    wide = model_spec(tiny("opt"), name="opt")
    hidden, vocab = narrow.hidden_size, narrow.vocab_size
    difference = float(forward_flops_per_token(wide, 8) - forward_flops_per_token(narrow, 8))
    assert difference == 2 * vocab * (hidden - 16) - 2 * (2 * hidden * 16)


def hardware_flops(spec: ModelSpec, plan: Plan, **workload: Any) -> float:
    sizes = Workload(SEQ_LEN, BATCH, attention_kernel="eager", **workload)
    return float(np.ravel(hardware_flops_per_step(spec, sizes, PlanTable.from_plans([plan])))[0])


def test_narayanan_formula_with_recomputation() -> None:
    """arXiv:2104.04473, eq. 3: 96 B s l h^2 (1 + s/6h + V/16lh), a layer computed again in full."""
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 96, "n_positions": 40}
    spec = model_spec({"model_type": "gpt2", **sizes}, name="tiny")
    published = 96 * BATCH * SEQ_LEN * 3 * 32**2 * (1 + SEQ_LEN / (6 * 32) + 96 / (16 * 3 * 32))
    assert hardware_flops(spec, Plan(recompute="full")) == pytest.approx(published, rel=1e-12)


def test_a_mixture_trains_the_matrices_of_the_chosen_experts() -> None:
    """Forward once and backward twice, as for a dense model of the parameters that are active."""
    spec = model_spec(CONFIGS["mixtral"], name="tiny")
    expected = float(model_flops_per_step(spec, SEQ_LEN, BATCH))
    assert hardware_flops(spec, Plan()) == expected
    # each rank of a layer has the router, whose tokens all of them route
    router = 2.0 * spec.hidden_size * spec.kinds[0].feed_forward.num_experts * spec.num_layers
    more = 3.0 * router * BATCH * SEQ_LEN
    cut = Plan(tensor_parallel=2, sequence_parallel=True)
    assert hardware_flops(spec, cut) == pytest.approx(expected + more, rel=1e-12)
    whole = replace(cut, expert_tensor_parallel=False)
    assert hardware_flops(spec, whole) == pytest.approx(expected, rel=1e-12)
