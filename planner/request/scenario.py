"""Training scenarios from requests: checked values, and an assumption for every default taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from cost_models.memory.optimizer_states import BLOCK, MIN_8BIT_ELEMENTS, RULES
from cost_models.model.lora import adapted
from cost_models.model.spec import ModelSpec
from cost_models.plan.workload import (
    MAX_ADAPTER_RANK,
    AttentionKernel,
    KeptPrecision,
    Optimizer,
    Precision,
    Quantisation,
    Workload,
    check_freeze,
    check_targets,
    require_consistent,
)
from cost_models.scenario import Scenario
from hardware_profiles.cluster.schema import Accelerator, Cluster
from hardware_profiles.errors import InputError, did_you_mean
from hardware_profiles.software.trainer import software_profile
from planner.request.requests import AdapterOptions, CommonOptions, LayerOptions, part
from planner.request.stage_layers import stage_ranges

DEFAULT_SEQ_LEN = 4096
DEFAULT_SOFTWARE = "shardplan"
MAX_SEQ_LEN = 10**8
MAX_BATCH = 10**7


@dataclass(frozen=True, slots=True)
class AssumedScenario:
    """A scenario with the assumptions made for omitted options."""

    scenario: Scenario
    assumptions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(AdapterOptions, LayerOptions, CommonOptions):
    """All training options of a model whose layers are known."""


def training_options(request: object) -> TrainingOptions:
    """Return the training options of a request for a fit or a plan."""
    return TrainingOptions(**part(request, TrainingOptions))


def adapter_fields(options: AdapterOptions) -> dict[str, Any]:
    """Return the fields of a workload that LoRA or QLoRA sets; none without adapters."""
    if options.lora is not None and options.qlora is not None:
        raise InputError("--lora and --qlora: choose one of them")
    if options.lora is None and options.qlora is None:
        if options.lora_alpha is not None or options.lora_targets is not None:
            raise InputError("--lora-alpha and --lora-targets belong to --lora or --qlora")
        if options.quantisation is not None:
            raise InputError("--quantisation belongs to --qlora")
        return {}
    if options.qlora is None and options.quantisation is not None:
        raise InputError("--quantisation belongs to --qlora: --lora keeps the base unquantised")
    kind = "lora" if options.qlora is None else "qlora"
    rank = check_count(kind, getattr(options, kind), MAX_ADAPTER_RANK)
    alpha = 2.0 * rank if options.lora_alpha is None else float(options.lora_alpha)
    if not 0.0 <= alpha <= 1e6:
        raise InputError(f"lora_alpha = {alpha:g} (must be a number from 0 to 1e6)")
    return {
        "adapter": kind,
        "adapter_rank": rank,
        "adapter_alpha": alpha,
        "adapter_targets": check_targets(options.lora_targets or "all", "lora_targets"),
        "quantisation": check_choice(
            "quantisation", options.quantisation or "nf4", get_args(Quantisation)
        ),
    }


def build_scenario(
    model: ModelSpec,
    cluster: Cluster,
    options: TrainingOptions | None = None,
    *,
    micro_batch_size: int = 1,
    stage_recompute_layers: tuple[int, ...] | None = None,
) -> AssumedScenario:
    """Return the scenario of a request: checked values, and defaults for omitted options.

    ``micro_batch_size`` sets the default global batch. ``stage_recompute_layers``: recomputed
    layers of each pipeline stage; None: as the plan says.
    """
    options = options or TrainingOptions()
    adapters = adapter_fields(options)
    assumptions = [*model.assumptions, *cluster.notes]

    def default(value: str, why: str) -> str:
        assumptions.append(f"{value} ({why})")
        return value

    length = options.seq_len
    if length is None:
        longest = model.max_seq_len or DEFAULT_SEQ_LEN
        length = min(longest, DEFAULT_SEQ_LEN)
        default(f"seq_len {length}", f"default: the model's longest, at most {DEFAULT_SEQ_LEN}")
    batch = options.global_batch_size
    if batch is None:
        batch = cluster.num_gpus * micro_batch_size
        default(f"global_batch_size {batch}", "default: one micro-batch for each accelerator")
    precision = options.precision
    if precision is None:
        precision = default_precision(cluster.accelerator)
        default(
            f"precision {precision}",
            "default: 16-bit compute with fp32 master weights where the device has it",
        )
    optimizer = options.optimizer or default("optimizer adamw", "default").split()[1]
    kernel = (
        options.attention_kernel
        or default("attention_kernel flash", "default: torch's SDPA").split()[1]
    )
    trainer = (
        options.software
        or default(f"software {DEFAULT_SOFTWARE}", "default: the bundled executor").split()[1]
    )
    workload = Workload(
        seq_len=check_count("seq_len", length, MAX_SEQ_LEN),
        global_batch_size=check_count("global_batch_size", batch, MAX_BATCH),
        precision=check_choice("precision", precision, get_args(Precision)),  # type: ignore[arg-type]
        optimizer=check_choice("optimizer", optimizer, get_args(Optimizer)),  # type: ignore[arg-type]
        attention_kernel=check_choice("attention_kernel", kernel, get_args(AttentionKernel)),  # type: ignore[arg-type]
        master_weights=options.master_weights is not False,
        optimizer_state_precision=check_choice(
            "optimizer_state_precision",
            options.optimizer_state_precision or "auto",
            get_args(KeptPrecision),
        ),  # type: ignore[arg-type]
        gradient_precision=check_choice(
            "gradient_precision", options.gradient_precision or "auto", get_args(KeptPrecision)
        ),  # type: ignore[arg-type]
        freeze=check_freeze(options.freeze or "", "freeze"),
        **adapters,
    )
    require_consistent(workload)
    assumptions += _about_optimizer(workload)
    if workload.precision == "fp8":
        copies = software_profile(trainer).fp8.weight_copies
        assumptions.append(
            "fp8 as in Transformer Engine: matrices of layers and their inputs; weights stay in "
            "16 bits, with two fp8 copies in addition, which ZeRO-3 also shards"
            if copies
            else "fp8: matrices of layers and their inputs, rounded again in each pass; weights "
            "stay in 16 bits"
        )
    every = software_profile(trainer).frozen.quantises_every_matrix
    model = adapted(model, workload, quantises_every_matrix=every)
    shared = software_profile(trainer).sharding.frozen_weights
    if workload.freeze:
        assumptions.append(
            f"{workload.freeze} frozen: in the precision of the computation, "
            + ("also sharded by ZeRO-3" if shared else "whole on every data rank")
        )
    if adapters:
        assumptions.append(
            "ZeRO-3 also shards the frozen base"
            if shared
            else "the frozen base is whole on every data rank: ZeRO shards only the adapters"
        )
    if model.max_seq_len is not None and workload.seq_len > model.max_seq_len:
        if model.max_seq_len_is_hard:
            raise InputError(
                f"seq_len = {workload.seq_len}: {model.name} has {model.max_seq_len} learned "
                f"positions (must be 1 to {model.max_seq_len})"
            )
        assumptions.append(
            f"seq_len {workload.seq_len} is longer than the {model.max_seq_len} "
            "that the model was trained for"
        )
    stages = None if options.layers is None else stage_ranges(options.layers, model)
    scenario = Scenario(
        model,
        cluster,
        workload,
        software_profile(trainer),
        stages,
        stage_recompute_layers,
    )
    if any(kind.feed_forward.num_experts for kind in model.kinds):
        assumptions.append(
            "experts receive equal numbers of tokens (balanced routing, none dropped)"
        )
    return AssumedScenario(scenario, tuple(assumptions))


def _about_optimizer(workload: Workload) -> list[str]:
    """Return notes on optimizer states that differ between tensors."""
    rule, notes = RULES[workload.optimizer], []
    if rule.whole_matrices:
        notes.append(
            "muon updates the matrices of layers, AdamW embedding, head, norms and biases; a "
            "matrix is gathered whole for its update"
        )
    if rule.factored:
        notes.append("adafactor keeps rows and columns of the part of a matrix that a rank holds")
    if rule.eight_bit:
        notes.append(
            f"8-bit states have an fp32 scale for {BLOCK} elements; parts of tensors below "
            f"{MIN_8BIT_ELEMENTS} keep fp32 states (bitsandbytes)"
        )
    if rule.paged:
        notes.append(
            "paged states are in host memory where the device is full: the peak is without them"
        )
    return notes


def default_precision(accelerator: Accelerator) -> str:
    """Return a 16-bit precision if the accelerator computes in one, else fp32."""
    if accelerator.device == "cpu":
        return "fp32"
    known = {**accelerator.peak_flops, **accelerator.achievable_flops}
    for precision in ("bf16", "fp16"):
        if precision in known:
            return precision
    return "fp32"


def check_count(name: str, value: int, high: int) -> int:
    """Return a whole number from 1 to ``high``, or raise."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        raise InputError(f"{name} = {value!r} (must be a whole number from 1 to {high:,})")
    return value


def check_choice(name: str, value: str, known: tuple[str, ...]) -> str:
    """Return ``value`` if it is a known word, else raise with a suggestion."""
    if value not in known:
        hint = did_you_mean(str(value), known)
        raise InputError(f"{name} = {value!r} (must be one of {', '.join(known)}). {hint}".strip())
    return value
