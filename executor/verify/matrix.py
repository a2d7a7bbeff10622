"""Plans that verify the executor: all families, layouts and schedules, and combinations of them.

``python -m executor.verify --matrix`` compares each of them with a single process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from cost_models.legality.rules import require_legal
from cost_models.plan.plan import SCHEDULES, Plan
from cost_models.plan_file import PlanFile
from executor.support import SPAN_FAMILIES, own_scenario
from executor.verify.tiny_models import CONFIGS, tiny
from hardware_profiles.fields import names_in

MAX_RANKS: Final = 8
MIXTURES: Final = names_in("deepseek_v3 gpt_oss mixtral olmoe qwen2_moe qwen3_moe qwen3_next")
V_SHAPED: Final = ("zbv", "dualpipev")  # two stages per rank, in opposite order
INTERLEAVED: Final = ("interleaved_1f1b", "interleaved_zero_bubble")


@dataclass(frozen=True, slots=True)
class VerificationCase:
    """One plan and the tiny model that it trains."""

    name: str
    plan: Plan
    family: str = "llama"
    options: dict[str, Any] = field(default_factory=dict)  # of ``tiny``

    def file(self) -> PlanFile:
        """Return the plan file."""
        layers = max(4, self.plan.num_stages)
        return tiny(self.plan, self.family, **{"num_layers": layers, **self.options})


def cases() -> list[VerificationCase]:
    """Return all cases, sorted by their number of ranks; each is legal."""
    found = [
        *_families(),
        *_schedules(),
        *_replicas(),
        *_context(),
        *_experts(),
        *_adapters(),
        *_offload(),
        *_saved_results(),
        *_repeated_parts(),
        *_combinations(),
    ]
    found = list({case.name: case for case in found}.values())
    for case in found:
        assert case.plan.world_size <= MAX_RANKS, case.name
        file = case.file()
        require_legal(own_scenario(file), case.plan)
    return sorted(found, key=lambda case: case.plan.world_size)


def describe(plan: Plan) -> str:
    """Return a short description of a plan."""
    sizes = {
        "dp": plan.data_parallel,
        "rep": plan.dp_replicate,
        "cp": plan.context_parallel,
        "tp": plan.tensor_parallel,
        "pp": plan.pipeline_parallel,
        "ep": plan.expert_parallel,
    }
    words = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    words += [f"zero{plan.zero_stage}"] if plan.data_parallel > 1 else []
    words += ["sp"] if plan.sequence_parallel else []
    words += [plan.pipeline_schedule] if plan.pipeline_parallel > 1 else []
    words += [plan.context_parallel_method] if plan.context_parallel > 1 else []
    words += [] if plan.expert_tensor_parallel else ["whole-experts"]
    words += [plan.recompute] if plan.recompute != "none" else []
    every = f" of {plan.recompute_every}" if plan.recompute_every else ""
    words += [f"first{plan.recompute_layers}{every}"] if plan.recompute_layers else []
    words += [f"offload {plan.offload}"] if plan.offload != "none" else []
    return "·".join(words) or "one process"


def _case(plan: Plan, family: str = "llama", **options: Any) -> VerificationCase:
    tied = ["tied"] if options.get("tied") else []
    return VerificationCase(" ".join([family, describe(plan), *tied]), plan, family, options)


def _families() -> Iterator[VerificationCase]:
    """Every family with data, tensor and pipeline parallelism, separately and combined."""
    for number, family in enumerate(sorted(CONFIGS)):
        tied = bool(number % 2)
        if family in SPAN_FAMILIES:
            yield from _encoder_decoder(family)
            continue
        yield _case(Plan(4, zero_stage=3, num_microbatches=2), family, tied=not tied)
        yield _case(Plan(2, 1, 2, zero_stage=1, num_microbatches=2), family, tied=tied)
        sequence = Plan(1, 2, 1, sequence_parallel=True, recompute="full", num_microbatches=2)
        yield _case(sequence, family)
        everything = Plan(
            2, 2, 2, zero_stage=2, sequence_parallel=True, recompute="selective", num_microbatches=2
        )
        yield _case(everything, family, tied=tied)


def _encoder_decoder(family: str) -> Iterator[VerificationCase]:
    """Encoder-decoder models, whose stages pass on one hidden state, then two.

    Attention is eager: on a CPU, torch's fused attention does not support trained position biases
    and computes full score matrices instead, which the memory counter would see.
    """
    plans: tuple[Plan, ...] = (
        Plan(2, zero_stage=1, num_microbatches=2),
        Plan(4, zero_stage=3, num_microbatches=2),
        Plan(4, dp_replicate=2, zero_stage=2, num_microbatches=2),
        Plan(1, 2, recompute="full", num_microbatches=2),
        Plan(2, 2, zero_stage=3, sequence_parallel=True, num_microbatches=2),
        Plan(1, 1, 2, 1, "gpipe", num_microbatches=2),
        Plan(2, 1, 2, zero_stage=3, num_microbatches=2),
        Plan(1, 1, 4, 2, "interleaved_1f1b", num_microbatches=4),
        Plan(
            2, 2, 2, zero_stage=2, sequence_parallel=True, recompute="selective", num_microbatches=2
        ),
    )
    for plan in plans:
        yield _case(plan, family, tied=True, attention_kernel="eager")


def _schedules() -> Iterator[VerificationCase]:
    """Every schedule with every ZeRO stage, and with tensor parallelism and recomputation."""
    for schedule in SCHEDULES:
        virtual = 2 if schedule in (*V_SHAPED, *INTERLEAVED) else 1
        for zero in range(4):
            plan = Plan(2, 1, 2, virtual, schedule, zero, num_microbatches=4)  # type: ignore[arg-type]
            yield _case(plan, "qwen2", tied=True)
        plan = Plan(1, 2, 4, virtual, schedule, 0, True, "full", 1, 8)  # type: ignore[arg-type]
        yield _case(plan, "qwen3")


def _replicas() -> Iterator[VerificationCase]:
    for zero in (1, 2, 3):
        yield _case(Plan(4, dp_replicate=2, zero_stage=zero, num_microbatches=2), "qwen3")
    yield _case(Plan(4, 2, dp_replicate=2, zero_stage=3, sequence_parallel=True), tied=True)
    yield _case(Plan(4, 1, 2, dp_replicate=2, zero_stage=2, num_microbatches=2), tied=True)


def _context() -> Iterator[VerificationCase]:
    for method in ("ring", "ulysses", "allgather"):
        along: dict[str, Any] = {"context_parallel_method": method, "num_microbatches": 2}
        yield _case(Plan(context_parallel=2, **along), "qwen3")
        yield _case(Plan(context_parallel=4, **along), tied=True)
        yield _case(Plan(2, context_parallel=2, zero_stage=3, **along), "mistral")
        yield _case(Plan(1, 2, context_parallel=2, sequence_parallel=True, **along))
        yield _case(Plan(2, 1, 2, context_parallel=2, zero_stage=1, **along), tied=True)
        whole = Plan(1, 2, 2, context_parallel=2, sequence_parallel=True, recompute="full", **along)
        yield _case(whole, "qwen3")


def _experts() -> Iterator[VerificationCase]:
    for family in sorted(set(MIXTURES) & set(CONFIGS)):
        yield _case(Plan(2, expert_parallel=2, zero_stage=0, num_microbatches=2), family)
        yield _case(Plan(4, expert_parallel=2, zero_stage=3, num_microbatches=2), family)
        yield _case(Plan(2, 2, expert_parallel=2, zero_stage=1, num_microbatches=2), family)
        whole: dict[str, Any] = {"expert_parallel": 4, "expert_tensor_parallel": False}
        yield _case(Plan(2, 2, zero_stage=2, sequence_parallel=True, **whole), family)
        yield _case(Plan(4, 1, 2, expert_parallel=4, zero_stage=1, num_microbatches=2), family)


def _adapters() -> Iterator[VerificationCase]:
    """LoRA on a frozen base model, also quantized to 4 bits."""
    plans: tuple[tuple[str, Plan, dict[str, Any]], ...] = (
        ("llama", Plan(num_microbatches=2), {}),
        ("qwen3", Plan(1, 2, sequence_parallel=True, num_microbatches=2), {}),
        ("gpt2", Plan(2, 2, zero_stage=3), {"tied": True}),
        ("phi3", Plan(2, 2, 2, zero_stage=1, num_microbatches=2, recompute="full"), {}),
        ("qwen2", Plan(2, 1, 2, 1, "zero_bubble", 2, num_microbatches=4), {"tied": True}),
        (
            "llama",
            Plan(1, 2, sequence_parallel=True, recompute="full", num_microbatches=2),
            {"adapter_targets": "attention"},
        ),
        ("t5", Plan(1, 2, 2, num_microbatches=2, recompute="full"), {"attention_kernel": "eager"}),
    )
    for family, plan, options in plans:
        targets = " of attention" if "adapter_targets" in options else ""
        yield VerificationCase(
            f"{family} {describe(plan)} lora{targets}", plan, family, {"lora": 4, **options}
        )
    for family, plan in (
        ("llama", Plan(1, 2, sequence_parallel=True, recompute="full", num_microbatches=2)),
        ("gpt2", Plan(2, 1, 2, 1, "zero_bubble", 2, num_microbatches=4)),
    ):
        yield VerificationCase(f"{family} {describe(plan)} qlora", plan, family, {"qlora": 4})


def _offload() -> Iterator[VerificationCase]:
    """Activation and optimizer offload with every recomputation mode, with and without splits."""
    yield _case(Plan(2, zero_stage=3, num_microbatches=2, offload="optimizer"), tied=True)
    parts = Plan(2, 2, zero_stage=2, sequence_parallel=True, offload="activations")
    yield _case(parts, "qwen3")
    whole = Plan(2, 1, 2, 2, "zbv", 3, recompute="full", num_microbatches=4, offload="activations")
    yield _case(whole, tied=True)
    both = Plan(1, 2, 2, recompute="selective", num_microbatches=2, offload="optimizer+activations")
    yield _case(both, "gpt2", tied=True)


def _saved_results() -> Iterator[VerificationCase]:
    """Recomputation that saves matmul results, with every feature that has results to save."""
    ops: dict[str, Any] = {"recompute": "selective_ops", "num_microbatches": 2}
    yield _case(Plan(2, zero_stage=3, **ops), "gpt_neox")
    for family in ("llama", "gpt2", "gemma2", "olmo2", "bert"):
        yield _case(Plan(1, 2, sequence_parallel=family != "olmo2", **ops), family)
    yield _case(Plan(1, 2, 2, 2, "zbv", **{**ops, "num_microbatches": 4}), "phi", tied=True)
    everything = Plan(2, 2, 2, 1, "zero_bubble", 2, True, **ops)
    yield _case(everything, "qwen3", tied=True)
    for method in ("ring", "ulysses"):
        shared: dict[str, Any] = {"context_parallel": 2, "context_parallel_method": method}
        yield _case(Plan(1, 2, sequence_parallel=True, **shared, **ops), "mistral")
    yield _case(Plan(2, 2, expert_parallel=2, zero_stage=1, **ops), "qwen2_moe")
    yield _case(Plan(1, 2, sequence_parallel=True, **ops), "deepseek_v3")
    yield VerificationCase(
        "llama the first layer of each stage selective_ops, lora",
        Plan(1, 2, 2, recompute_layers=1, **ops),
        options={"lora": 4},
    )
    eager = {"attention_kernel": "eager"}
    yield VerificationCase("qwen2 eager attention selective_ops", Plan(1, 2, **ops), "qwen2", eager)


def _repeated_parts() -> Iterator[VerificationCase]:
    """Recomputation of some matmuls and of some modules, under every kind of parallelism."""
    second: dict[str, Any] = {"recompute": "ops:every-2nd-mm", "num_microbatches": 2}
    blocks: dict[str, Any] = {"recompute": "modules:core_attn+layernorm+mlp", "num_microbatches": 2}
    experts: dict[str, Any] = {
        "recompute": "modules:mla_up_proj+shared_experts+moe_act",
        "num_microbatches": 2,
    }
    for options in (second, blocks):
        yield _case(Plan(2, zero_stage=3, **options), "phi")
        yield _case(Plan(1, 2, **options), "olmo2")
        everything = Plan(2, 2, 2, 1, "zero_bubble", 2, True, **options)
        yield _case(everything, "qwen3", tied=True)
        plan = Plan(1, 2, sequence_parallel=True, **options)
        yield VerificationCase(f"llama {describe(plan)} lora", plan, options={"lora": 4})
    moe = {**experts, "recompute": "modules:moe"}
    for options in (second, experts, moe):
        plan = Plan(2, 2, expert_parallel=2, zero_stage=1, sequence_parallel=True, **options)
        yield _case(plan, "qwen2_moe")
        yield _case(Plan(1, 2, sequence_parallel=True, **options), "deepseek_v3")


def _combinations() -> Iterator[VerificationCase]:
    """Remaining cases: uneven stages, odd sizes, eager attention."""
    uneven = ((0, 1), (1, 4), (4, 6))
    yield VerificationCase(
        "llama uneven stages",
        Plan(1, 1, 3, num_microbatches=4),
        options={"layer_ranges": uneven, "num_layers": 6},
    )
    yield VerificationCase(
        "llama uneven stages, the first layer of each recomputed",
        Plan(1, 2, 3, recompute="full", recompute_layers=1, num_microbatches=4),
        options={"layer_ranges": uneven, "num_layers": 6},
    )
    yield VerificationCase(
        "llama uneven stages, one, none and two of their layers recomputed",
        Plan(1, 2, 3, recompute="full", num_microbatches=4),
        options={"layer_ranges": uneven, "num_layers": 6, "stage_recompute_layers": (1, 0, 2)},
    )
    half: dict[str, Any] = {"recompute_layers": 1, "recompute_every": 2, "num_microbatches": 4}
    yield VerificationCase(
        "qwen3 every other layer recomputed, virtual stages",
        Plan(2, 1, 2, 2, "interleaved_1f1b", 2, recompute="full", **half),
        "qwen3",
        {"num_layers": 8},
    )
    yield VerificationCase(
        "gpt2 zero bubble, by stage 2 and 1 attention cores recomputed",
        Plan(1, 2, 2, 1, "zero_bubble", recompute="selective", num_microbatches=4),
        "gpt2",
        {"num_layers": 4, "stage_recompute_layers": (2, 1)},
    )
    yield VerificationCase(
        "gpt2 odd vocabulary over three data ranks, tied over stages",
        Plan(3, 1, 2, zero_stage=2, num_microbatches=2),
        "gpt2",
        {"tied": True, "vocab_size": 131},
    )
    yield VerificationCase(
        "mistral eager attention",
        Plan(1, 2, recompute="selective"),
        "mistral",
        {"attention_kernel": "eager"},
    )
    yield VerificationCase(
        "llama multi-query and a padding token",
        Plan(2, zero_stage=2, num_microbatches=3),
        options={"num_key_value_heads": 1, "pad_token_id": 3},
    )
