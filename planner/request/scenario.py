"""Build a scenario from a request; every default is recorded as an assumption."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, get_args

from msgspec import Struct

from cost_models.legality.capabilities import require_runnable_workload, usual
from cost_models.memory.optimizer_states import BLOCKS, MIN_QUANTISED_ELEMENTS, OPTIMIZER_TRAITS
from cost_models.model.lora import adapted
from cost_models.model.spec import ModelSpec
from cost_models.model.target_length import require_decoder
from cost_models.plan.workload import (
    MAX_ADAPTER_RANK,
    QUANTISED,
    USUAL_RANK,
    AdapterMethod,
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
from hardware_profiles.software.trainer import (
    OPTIMIZER_KERNELS,
    SoftwareProfile,
    software_profile,
    with_engines,
)
from planner.request.stage_layers import stage_ranges

T = TypeVar("T", int, str)
DEFAULT_SEQ_LEN = 4096
DEFAULT_SOFTWARE = "shardplan"
MAX_SEQ_LEN = 10**8
MAX_BATCH = 10**7


class AssumedScenario(Struct, frozen=True):
    """A scenario with the assumptions made where the request left something open."""

    scenario: Scenario
    assumptions: tuple[str, ...]


class Adapting(Struct, frozen=True):
    """Adapters and trained parts of a frozen model; None: the default."""

    kind: str  # lora or qlora
    rank: int
    alpha: float | None = None
    targets: str | None = None
    quantisation: str | None = None
    method: str | None = None
    of_both: bool = False  # --lora and --qlora of one rank: a fix, --qlora, is appended to --lora

    def fields(self, model: ModelSpec) -> dict[str, Any]:
        """Return the fields of a workload for a model."""
        rank = check_count(self.kind, self.rank, MAX_ADAPTER_RANK)
        alpha = 2.0 * rank if self.alpha is None else float(self.alpha)
        if not 0.0 <= alpha <= 1e6:
            raise InputError(f"lora_alpha = {alpha:g} (must be a number from 0 to 1e6)")
        targets = check_targets(_plain(self.targets or default_targets(model)), "lora_targets")
        return {
            "adapter": self.kind,
            "adapter_rank": rank,
            "adapter_alpha": alpha,
            "adapter_targets": targets,
            "adapter_method": check_choice(
                "adapter_method", self.method or "lora", get_args(AdapterMethod)
            ),
            "quantisation": check_choice(
                "quantisation", self.quantisation or "nf4", get_args(Quantisation)
            ),
        }


def _plain(targets: str) -> str:
    """Return matrices as options name them, of PEFT's names.

    >>> _plain("q_proj, v_proj"), _plain("all-linear")
    ('q,v', 'all')
    """
    names = [name.strip().removesuffix("_proj") for name in targets.split(",")]
    return "all" if names == ["all-linear"] else ",".join(names)


def default_targets(model: ModelSpec) -> str:
    """Return the matrices with adapters where none are given: routed experts take none."""
    routed = any(kind.feed_forward.num_experts for kind in model.kinds)
    return "attention" if routed else "all"


def adapting(
    lora: int | None,
    qlora: int | None,
    lora_alpha: float | None,
    lora_targets: str | None,
    quantisation: str | None = None,
    adapter_method: str | None = None,
) -> Adapting | None:
    """Return what ``--lora`` and its kin ask for; None without one of them."""
    if lora is not None and qlora is not None and lora != qlora:
        raise InputError(
            f"--lora {lora} and --qlora {qlora}: choose one of them (--qlora: the adapters of "
            "--lora on a frozen base in 4 bits)"
        )
    if lora is None and qlora is None:
        if any(one is not None for one in (lora_alpha, lora_targets, adapter_method)):
            raise InputError(
                "--lora-alpha, --lora-targets and --adapter-method belong to --lora or --qlora"
            )
        if quantisation is not None:
            raise InputError("--quantisation belongs to --qlora")
        return None
    if qlora is None and quantisation is not None:
        raise InputError("--quantisation belongs to --qlora: --lora leaves the frozen base whole")
    kind, rank = ("lora", lora) if qlora is None else ("qlora", qlora)
    assert rank is not None
    both = lora is not None and qlora is not None
    return Adapting(kind, rank, lora_alpha, lora_targets, quantisation, adapter_method, both)


def build_scenario(
    model: ModelSpec,
    cluster: Cluster,
    *,
    seq_len: int | None = None,
    target_seq_len: int | None = None,
    global_batch_size: int | None = None,
    micro_batch_size: int = 1,
    precision: str | None = None,
    optimizer: str | None = None,
    optimizer_rank: int | None = None,
    optimizer_state_precision: str | None = None,
    gradient_precision: str | None = None,
    optimizer_kernel: str | None = None,
    gradient_copy: bool | None = None,
    master_weights: bool | None = None,
    attention_kernel: str | None = None,
    software: str | None = None,
    adapter: Adapting | None = None,
    freeze: str | None = None,
    layers: str | Sequence[int] | None = None,
    stage_recompute_layers: tuple[int, ...] | None = None,
) -> AssumedScenario:
    """Check what was given and fill in what was not."""
    assumptions = [*model.assumptions, *cluster.notes]

    def default(name: str, value: T, why: str) -> T:
        assumptions.append(f"{name} {value} ({why})")
        return value

    if seq_len is None:
        why = f"default: the model's longest, at most {DEFAULT_SEQ_LEN}"
        seq_len = default("seq_len", default_seq_len(model), why)
    if global_batch_size is None:
        batch = cluster.num_gpus * micro_batch_size
        why = "default: one micro-batch for each accelerator"
        global_batch_size = default("global_batch_size", batch, why)
    trainer = software or default("software", DEFAULT_SOFTWARE, "default: the bundled executor")
    if optimizer_kernel is not None:
        check_choice("optimizer_kernel", optimizer_kernel, OPTIMIZER_KERNELS)
    trainer = with_engines(trainer, optimizer_kernel, gradient_copy)
    profile = software_profile(trainer)

    def first(name: str, value: str, why: str) -> str:
        runs: str = usual(profile, name, value)
        return default(name, runs, why if runs == value else f"of {trainer}")

    why = "default: 16-bit compute with fp32 master weights where the device has it"
    precision = precision or first("precision", default_precision(cluster.accelerator), why)
    optimizer = optimizer or first("optimizer", "adamw", "default")
    kernel = attention_kernel or first("attention_kernel", "flash", "default: torch's SDPA")
    states, gradients = optimizer_state_precision or "auto", gradient_precision or "auto"
    kept = get_args(KeptPrecision)
    workload = Workload(
        seq_len=check_count("seq_len", seq_len, MAX_SEQ_LEN),
        global_batch_size=check_count("global_batch_size", global_batch_size, MAX_BATCH),
        precision=check_choice("precision", precision, get_args(Precision)),
        optimizer=check_choice("optimizer", optimizer, get_args(Optimizer)),
        optimizer_rank=check_count(
            "optimizer_rank",
            USUAL_RANK if optimizer_rank is None else optimizer_rank,
            MAX_ADAPTER_RANK,
        ),
        attention_kernel=check_choice("attention_kernel", kernel, get_args(AttentionKernel)),
        master_weights=master_weights is not False,
        optimizer_state_precision=check_choice("optimizer_state_precision", states, kept),
        gradient_precision=check_choice("gradient_precision", gradients, kept),
        freeze=check_freeze(freeze or "", "freeze"),
        target_seq_len=(
            0
            if target_seq_len is None
            else check_count("target_seq_len", target_seq_len, MAX_SEQ_LEN)
        ),
        **({} if adapter is None else adapter.fields(model)),
    )
    require_consistent(workload)
    require_decoder(model, workload)
    require_runnable_workload(profile, workload)
    model = adapted(model, workload, quantises_every_matrix=profile.frozen.quantises_every_matrix)
    assumptions += _about_optimizer(workload)
    assumptions += _about_precision(workload, profile)
    assumptions += _about_frozen(workload, profile, adapter)
    assumptions += _about_length(workload, model)
    stages = None if layers is None else stage_ranges(layers, model)
    scenario = Scenario(model, cluster, workload, profile, stages, stage_recompute_layers)
    if about := about_rates(profile):
        assumptions.append(about)
    if any(kind.feed_forward.num_experts for kind in model.kinds):
        assumptions.append(_about_routing(profile))
    return AssumedScenario(scenario, tuple(assumptions))


def _about_routing(software: SoftwareProfile) -> str:
    if spread := software.kernels.routing_spread:
        return (
            f"tokens of an expert vary by {spread:.0%} of their mean (one standard deviation): "
            "ranks wait for the one that gets most; none is dropped"
        )
    return "experts get equally many tokens (balanced routing; none is dropped)"


def _about_precision(workload: Workload, software: SoftwareProfile) -> list[str]:
    bits = workload.precision
    if bits not in QUANTISED:
        return []
    if software.fp8.weight_copies and software.fp8.gathers_weights:
        return [
            f"{bits} as in Transformer Engine: matrices of layers and their inputs; with ZeRO 1 "
            f"matrices stay in two {bits} copies alone"
        ]
    if software.fp8.weight_copies:
        return [
            f"{bits} as in Transformer Engine: matrices of layers and their inputs; weights stay "
            f"in 16 bits and two {bits} copies, which ZeRO 3 also shards"
        ]
    return [
        f"{bits}: matrices of layers and their inputs, rounded again in each pass; weights stay in "
        "16 bits"
    ]


def _about_frozen(
    workload: Workload, software: SoftwareProfile, adapter: Adapting | None
) -> list[str]:
    shared, said = software.sharding.frozen_weights, []
    if workload.freeze:
        where = "shared out by ZeRO-3 too" if shared else "whole on every data rank"
        said.append(f"{workload.freeze} frozen: in the precision of the computation, {where}")
    if adapter is None:
        return said
    if adapter.of_both:
        both = f"--lora {adapter.rank} --qlora {adapter.rank}"
        said.append(f"{both} is taken as --qlora {adapter.rank}: a base in 4 bits")
    some = workload.adapter_targets != "all"
    if adapter.targets is None and some:
        said.append(
            f"adapters on {workload.adapter_targets} (default: the matrices of routed experts are "
            "one tensor, which takes no adapter)"
        )
    if adapter.kind == "qlora" and some and not software.frozen.quantises_every_matrix:
        said.append(
            "4 bits for matrices with adapters, 16 for the others (all in 4 bits: --software "
            "hf-trainer)"
        )
    said.append(
        "ZeRO-3 shards the frozen base too"
        if shared
        else "the frozen base is whole on every data rank: ZeRO shards the adapters alone"
    )
    return said


def _about_length(workload: Workload, model: ModelSpec) -> list[str]:
    longest, length = model.max_seq_len, workload.seq_len
    if longest is None or length <= longest:
        return []
    if model.max_seq_len_is_hard:
        raise InputError(
            f"seq_len = {length}: {model.name} has {longest} learned positions (must be 1 to "
            f"{longest})"
        )
    return [f"seq_len {length} is longer than the {longest} that the model was made for"]


def _about_optimizer(workload: Workload) -> list[str]:
    """Describe the states of an optimizer that differ between tensors."""
    rule, said = OPTIMIZER_TRAITS[workload.optimizer], []
    if rule.whole_matrices:
        said.append(
            "muon updates the matrices of layers, AdamW embedding, head, norms and biases; a "
            "matrix is gathered whole for its update"
        )
    if rule.projected:
        said.append(
            f"{workload.optimizer} keeps states of rank {workload.optimizer_rank} of linear "
            "layers, AdamW's of all other tensors"
        )
    if rule.factored:
        said.append("adafactor keeps rows and columns of the part of a matrix that a rank holds")
    if rule.bits:
        source = "bitsandbytes" if rule.bits == 8 else "torchao"
        said.append(
            f"{rule.bits}-bit states have an fp32 scale for {BLOCKS[rule.bits]} elements; parts of "
            f"tensors below {MIN_QUANTISED_ELEMENTS} keep fp32 states ({source})"
        )
    if rule.paged:
        said.append(
            "paged states are in host memory where the device is full: the peak is without them"
        )
    return said


def default_seq_len(model: ModelSpec) -> int:
    """Return the tokens of a sequence where none are given."""
    return min(model.max_seq_len or DEFAULT_SEQ_LEN, DEFAULT_SEQ_LEN)


def default_precision(accelerator: Accelerator) -> str:
    """Return 16-bit compute where the accelerator has it."""
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


def check_choice(name: str, value: str, known: tuple[str, ...]) -> Any:
    """Return a known word, or raise with the nearest one."""
    if value not in known:
        hint = did_you_mean(str(value), known)
        text = f"{name} = {value!r} (must be one of {', '.join(known)})"
        raise InputError(f"{text}. {hint}" if hint else text)
    return value


def about_rates(software: SoftwareProfile) -> str:
    """Return which share of an accelerator's rates a trainer is taken to reach; empty: all.

    >>> about_rates(software_profile("torch-trainer")).partition(":")[0]
    "kernels reach 0.9 of the accelerator's rates"
    >>> about_rates(software_profile("nemo"))
    ''
    """
    share = software.kernels.rate_share
    source = software.sources["kernels.rate_share"]
    return "" if share == 1.0 else f"kernels reach {share:.3g} of the accelerator's rates: {source}"
