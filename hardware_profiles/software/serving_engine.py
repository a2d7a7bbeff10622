"""Serving profiles: the few numbers in which inference engines differ, as data with a source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path

from hardware_profiles.fields import Fields, read_toml

FOLDER = Path(__file__).parent / "engines"


@dataclass(frozen=True, slots=True)
class ServingEngine:
    """How one engine serves a model."""

    name: str
    description: str
    block_tokens: float  # tokens of one block of the cache: a sequence has whole blocks
    vocab_multiple: float  # rows of the vocabulary are filled up to a multiple
    prefill_chunk: float  # tokens of prompts in one step, unless the question says otherwise
    hidden_copies: float  # of a step's tokens, beside what is between two matrices
    sampler_bytes_per_logit: float  # logits, their fp32 copy, sorted, with indices and workspace
    latent_workspace_tokens: float  # latents of earlier chunks whose keys are unpacked at once
    # on a GPU, bytes
    context_bytes: float  # CUDA context, libraries and their workspaces
    graph_bytes: float  # captured CUDA graphs
    communication_bytes: float  # where several GPUs share a replica
    allocator_slack: float  # of activations and logits
    # time on a device, forward: element accesses of memory-bound work, as in software profiles
    rms_norm_accesses: float
    rms_norm_fp32_bytes: float
    layer_norm_accesses: float
    layer_norm_in_fp32_accesses: float
    residual_accesses: float
    activation_accesses: float
    rotary_accesses: float
    dropout_accesses: float
    eager_scores_accesses: float
    sampled_bytes_per_logit: float  # moved while the likeliest token is picked
    flash_efficiency: float  # of the achievable matmul rate, on the FLOPs really done
    flash_share_since_hopper: float
    stream_share: float  # of a copy's bandwidth, that matmuls of few rows reach on their weights
    # kernels: how many, and seconds that one adds to the bytes that it moves
    layer_kernels: float
    expert_kernels: float  # more of them in a layer with experts
    shared_expert_kernels: float  # more, where some experts see every token
    latent_kernels: float  # more in latent attention
    step_kernels: float
    kernel_seconds: float
    # without CUDA graphs the host starts operators one by one
    layer_operators: float
    step_operators: float
    operator_seconds: float
    graph_sequences: float  # tokens of the largest captured step; larger ones are started eagerly
    # all-reduces of small tensors by one kernel, inside an NVLink domain
    direct_all_reduce_start: float  # seconds
    direct_all_reduce_share: float  # of the link's bandwidth
    direct_all_reduce_bytes: float  # the largest tensor that goes so
    # of what links carry, large collectives
    bus_efficiency: float
    network_efficiency: float
    sources: Mapping[str, str] = field(default_factory=dict)


@cache
def serving_engine(name: str = "vllm") -> ServingEngine:
    """Load the profile of an engine."""
    path = FOLDER / f"{name}.toml"
    source = Fields(read_toml(path, "a serving profile"), str(path))
    words = {key: source.text(key) for key in ("name", "description")}
    known = [f.name for f in fields(ServingEngine) if f.name not in (*words, "sources")]
    source.refuse_unknown((*words, *known))
    values, sources = {}, {}
    for key in known:
        entry = source.sub(key)
        entry.refuse_unknown(("value", "source"))
        values[key], sources[key] = entry.number("value"), entry.text("source")
    return ServingEngine(**words, **values, sources=sources)
