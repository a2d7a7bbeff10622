"""Profiles of serving engines: memory, kernel and link figures, each with its source."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from msgspec import Struct

from hardware_profiles.fields import Fields, read_toml
from hardware_profiles.software.kernels import ForwardKernels, Host
from hardware_profiles.software.profile import Profile, profile_from_fields

FOLDER = Path(__file__).parent / "engines"


class Scheduler(Struct, frozen=True, kw_only=True):
    """How requests are batched."""

    block_tokens: float  # tokens of one block of the cache: a sequence has whole blocks
    prefill_chunk: float  # prompt tokens in one step, unless the request sets another number
    graph_sequences: float  # tokens of the largest captured step; larger ones are started eagerly


class ServingMemory(Struct, frozen=True, kw_only=True):
    """Memory besides weights and cache."""

    vocab_multiple: float  # rows of the vocabulary are padded to a multiple
    hidden_copies: float  # of a step's tokens, besides the tensors between two matrices
    sampler_bytes_per_logit: float  # logits, their fp32 copy, sorted, with indices and workspace
    latent_workspace_tokens: float  # latents of earlier chunks whose keys are unpacked at once
    context_bytes: float  # CUDA context, libraries and their workspaces
    graph_bytes: float  # captured CUDA graphs
    communication_bytes: float  # where several GPUs share a replica
    allocator_slack: float  # share of activations and logits


class ServingKernels(ForwardKernels, frozen=True, kw_only=True):
    """Kernels of a forward pass: bytes they move, their number, seconds that each one adds."""

    sampled_bytes_per_logit: float  # moved while the most likely token is picked
    stream_share: float  # of a copy's bandwidth, reached by matmuls of few rows on their weights
    per_layer: float
    per_expert_layer: float  # additional kernels of a layer with experts
    per_shared_expert_layer: float  # additional kernels where some experts see every token
    per_latent_attention: float  # additional kernels of latent attention
    per_step: float
    seconds: float  # that one kernel adds to the bytes that it moves


class ServingHost(Host, frozen=True, kw_only=True):
    """Operators that the host launches one by one without CUDA graphs."""

    layer_operators: float


class ServingCommunication(Struct, frozen=True, kw_only=True):
    """Collectives between the GPUs of a replica."""

    bus_efficiency: float  # achieved / nominal bandwidth of large collectives inside a node
    network_efficiency: float  # the same between nodes
    direct_all_reduce_start: float  # seconds; all-reduce by one kernel inside an NVLink domain
    direct_all_reduce_share: float  # of the link's bandwidth
    direct_all_reduce_bytes: float  # the largest tensor that is reduced this way


class ServingEngine(Profile, frozen=True, kw_only=True):
    """How one engine serves a model."""

    scheduler: Scheduler
    memory: ServingMemory
    kernels: ServingKernels
    host: ServingHost
    communication: ServingCommunication


@cache
def serving_engine(name: str = "vllm") -> ServingEngine:
    """Load the profile of an engine."""
    path = FOLDER / f"{name}.toml"
    source = Fields(read_toml(path, "a serving profile"), str(path))
    return profile_from_fields(ServingEngine, source)
