"""Software profiles: the few numbers in which trainers differ, as data with a source each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from hardware_profiles.errors import InputError, did_you_mean
from hardware_profiles.reading import Fields, read_toml

FOLDER = Path(__file__).parent / "software"


@dataclass(frozen=True, slots=True)
class SoftwareProfile:
    """How one trainer runs a transformer layer. Bytes are per element or per token, as named.

    "Saved" is what autograd keeps for the backward pass, in elements of the compute precision
    unless
    a name says ``bytes``. "Accesses" are reads and writes of memory-bound operators.
    """

    name: str
    description: str
    # model states
    gradients_in_master_precision: bool  # accumulated gradients: fp32 (true) or compute precision
    whole_gradient_buffer: bool  # gradients of all weights have memory from the first step on
    largest_zero_stage: float  # beyond it the trainer shards nothing more
    replicas_apart: bool  # data parallelism without ZeRO keeps compute weights beside the master
    reduces_gradients_at_last_microbatch_under_pipeline: bool
    fused_optimizer: bool  # one kernel updates in place; without, updates make copies of shards
    splits_backward: bool  # runs the schedules whose weight gradients come after those of inputs
    # saved activations
    rms_norm_saved: float  # per element of the hidden size, in compute precision
    rms_norm_saved_fp32_bytes: float  # per element, bytes, on top (fp32 copies)
    layer_norm_saved: float
    rms_norm_in_fp32_saved: float  # norms that multiply with their weights before they cast back
    rms_norm_in_fp32_saved_fp32_bytes: float
    layer_norm_in_fp32_saved: float  # the same, and written out (Cohere)
    layer_norm_in_fp32_saved_fp32_bytes: float
    rms_norm_statistics_bytes: float  # per token and norm
    layer_norm_statistics_bytes: float
    keeps_gathered_inputs: bool  # sequence parallel: linear inputs are kept whole, not re-gathered
    activation_saved: Mapping[str, float]  # elements of the FFN size that the activation keeps
    eager_scores_bytes: float  # per head and pair of tokens, eager attention without dropout
    window_needs_mask: bool  # flash kernels without windows: a mask, every query head its own keys
    attention_dropout_bytes: float  # per head and pair of tokens, on top, with dropout
    dropout_mask_bytes: float  # per element of a hidden-size dropout
    router_saved_bytes: float  # per token and expert
    # logits and loss, bytes per logit: fp32 copies alive at the peak of the loss
    fp32_logits_copies: float
    # memory-bound work: element accesses per layer, forward
    rms_norm_accesses: float  # per norm and hidden element
    layer_norm_accesses: float
    layer_norm_in_fp32_accesses: float
    residual_accesses: float  # per residual add and hidden element
    activation_accesses: float  # per FFN element
    rotary_accesses: float  # per query/key element
    eager_scores_accesses: float  # per head and pair of tokens
    backward_access_ratio: float  # backward accesses / forward accesses
    optimizer_accesses_bytes: float  # bytes moved per parameter in the optimizer step
    # host: operators (kernels) that one pass starts
    layer_operators_forward: float
    layer_operators_backward: float
    microbatch_operators: float
    step_operators: float
    group_operators: float  # sharded weights: around each group (layer), forward and backward
    operator_seconds: float  # host seconds per operator where the machine was not measured
    # communication
    bus_efficiency: float  # achieved / nominal link bandwidth of large collectives
    data_parallel_overlap: float  # share of the backward pass that can hide gradient reduction
    tensor_parallel_overlap: float  # share of tensor-parallel traffic hidden behind compute
    # attention kernel
    flash_efficiency: float  # of the achievable matmul rate, on the FLOPs really done
    # runtime memory on a GPU, bytes
    context_bytes: float
    allocator_slack: float  # reserved / allocated - 1
    sources: Mapping[str, str] = field(default_factory=dict)


def profile_names() -> list[str]:
    """Return the names of all software profiles."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


@cache
def software_profile(name: str) -> SoftwareProfile:
    """Load a software profile by name."""
    if name not in profile_names():
        hint = did_you_mean(str(name), profile_names())
        raise InputError(
            f"software profile {name!r} is unknown. {hint} Known: {', '.join(profile_names())}"
        )
    path = FOLDER / f"{name}.toml"
    return _from_fields(Fields(read_toml(path, "a software profile"), str(path)))


def _from_fields(source: Fields) -> SoftwareProfile:
    known = [f.name for f in fields(SoftwareProfile) if f.name != "sources"]
    source.refuse_unknown(known)
    values: dict[str, Any] = {
        "name": source.text("name"),
        "description": source.text("description"),
    }
    sources: dict[str, str] = {}
    for name in known:
        if name in values:
            continue
        entry = source.sub(name)
        entry.refuse_unknown(("value", "source"))
        sources[name] = entry.text("source")
        raw = entry.values.get("value")
        if isinstance(raw, bool):
            values[name] = raw
        elif isinstance(raw, Mapping):
            table = entry.sub("value")
            values[name] = {key: table.number(key) for key in raw}
        else:
            values[name] = entry.number("value")
    return SoftwareProfile(**values, sources=sources)
