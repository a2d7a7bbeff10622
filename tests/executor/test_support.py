"""What the executor refuses, by name and before it imports torch."""

import re
import subprocess
import sys
from dataclasses import fields, make_dataclass, replace
from typing import Any, get_args

import pytest

from cost_models.legality.executor_limits import SUPPORTED_FIELDS, TRAINED
from cost_models.legality.executor_proofs import unproven
from cost_models.plan.plan import Plan
from cost_models.plan.workload import Precision
from executor import dtypes, support
from executor.model.families import FAMILIES
from hardware_profiles.errors import InputError
from tests.executor.tiny import tiny

REFUSED: dict[str, tuple[Plan, dict[str, Any], str]] = {
    "vocabulary": (
        Plan(1, 4),
        {"vocab_size": 9, "family": "gpt2"},
        r"tensor_parallel 4 .* \(vocab_size\)",
    ),
    "offload": (Plan(2, zero_stage=3, offload="weights"), {}, r"offload weights \(only none"),
    "ZeRO++": (
        Plan(4, zero_stage=3, secondary_ranks=2),
        {},
        r"secondary_ranks = 2 \(only 1; .*priced only",
    ),
    "drives": (
        Plan(offload="optimizer", offload_device="nvme"),
        {},
        r"offload_device = nvme \(only cpu; .*priced only",
    ),
    "upcast": (Plan(), {"family": "gpt2", "reorder_and_upcast_attn": True}, "reorder_and_upcast"),
    "both ways over ranks": (
        Plan(context_parallel=2),
        {"family": "bert"},
        "context_parallel = 2 supports causal attention only",
    ),
    "untied bert": (Plan(), {"family": "bert", "tie_word_embeddings": False}, "for bert"),
    "norms behind": (
        Plan(),
        {"family": "opt", "do_layer_norm_before": False},
        "do_layer_norm_before = False for opt",
    ),
    "narrow embedding": (
        Plan(),
        {"family": "opt", "word_embed_proj_dim": 32},
        "word_embed_proj_dim = 32 for opt",
    ),
    "bidirectional": (
        Plan(),
        {"family": "gemma3_text", "use_bidirectional_attention": True},
        "use_bidirectional_attention = true",
    ),
    "capped scores with dropout": (
        Plan(),
        {"family": "gemma2", "attention_dropout": 0.1},
        r"attention_dropout = 0.1 .*attention_kernel eager",
    ),
    "heads": (Plan(1, 3), {}, "num_heads"),
    "kv heads": (Plan(1, 8), {}, "num_kv_heads"),
    "sequence": (Plan(1, 2, sequence_parallel=True), {"seq_len": 17}, "seq_len"),
    "positions": (Plan(), {"family": "gpt2", "seq_len": 33}, "learned positions"),
    "microbatches": (
        Plan(1, 1, 2, 2, "interleaved_1f1b", num_microbatches=3),
        {},
        "num_microbatches",
    ),
    "a routers' loss": (
        Plan(),
        {"family": "mixtral", "output_router_logits": True},
        "output_router_logits = true",
    ),
    "noise of routers": (
        Plan(),
        {"family": "mixtral", "router_jitter_noise": 0.1},
        r"router_jitter_noise = 0\.1 \(only 0\)",
    ),
    "fused rule": (
        Plan(),
        {"family": "qwen3_next", "attention_kernel": "flash"},
        r"attention_kernel = flash with linear attention \(only eager",
    ),
    "linear attention in fp8": (
        Plan(),
        {"family": "qwen3_next", "precision": "fp8", "num_experts": 0},
        r"qwen3_next with precision fp8 \(no linear attention",
    ),
    "linear attention over ranks": (
        Plan(context_parallel=2),
        {"family": "qwen3_next"},
        r"context_parallel = 2: the linear attention",
    ),
    "clipped queries": (Plan(), {"family": "olmoe", "clip_qkv": 8.0}, r"clip_qkv = 8\.0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_option(name: str):
    plan, options, message = REFUSED[name]
    seq_len = options.pop("seq_len", None) if (options := dict(options)) else None
    file = tiny(plan, **options)
    if seq_len is not None:
        file = replace(file, workload=replace(file.workload, seq_len=seq_len))
    with pytest.raises(InputError, match=message):
        support.check_supported(file)


@pytest.mark.parametrize(
    "name",
    [
        "upcast",
        "untied bert",
        "norms behind",
        "bidirectional",
        "a routers' loss",
        "clipped queries",
    ],
)
def test_the_planner_names_what_a_config_asks_for(name: str):
    plan, options, message = REFUSED[name]
    file = tiny(plan, **options)
    assert re.search(message, unproven(file.model, file.workload, plan) or "")


def test_another_family_is_refused_with_those_that_run():
    file = tiny(Plan())
    file = replace(file, model=replace(file.model, family="llama4"))
    with pytest.raises(InputError, match=r"llama4 .*gpt2, .*llama, mistral.*Did you mean llama"):
        support.check_supported(file)


def test_the_list_is_that_of_the_models():
    assert sorted(FAMILIES) == sorted(support.FAMILIES)
    assert sorted(dtypes.MASTER_DTYPE) == sorted(TRAINED["precision"])
    assert set(TRAINED["precision"]) < set(get_args(Precision))


def test_a_new_plan_field_is_refused_unless_at_its_default():
    wider = make_dataclass(
        "Wider", [("dummy_ranks", int, 1)], bases=(Plan,), frozen=True, slots=True
    )
    file = tiny(Plan())
    support.check_supported(replace(file, plan=wider()))
    assert unproven(file.model, file.workload, wider()) is None
    message = "dummy_ranks = 2 (only 1; other values are priced only)"
    assert unproven(file.model, file.workload, wider(dummy_ranks=2)) == message
    with pytest.raises(InputError, match=re.escape(message)):
        support.check_supported(replace(file, plan=wider(dummy_ranks=2)))


def test_supported_fields_are_fields_of_a_plan():
    assert {field.name for field in fields(Plan)} > SUPPORTED_FIELDS


def test_asking_needs_no_torch():
    code = "import executor.support, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
