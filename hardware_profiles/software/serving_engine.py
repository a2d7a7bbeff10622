"""Profiles of serving engines: memory, kernel and link figures, each with its source."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from hardware_profiles.fields import Amount, read_toml
from hardware_profiles.software.kernels import ForwardKernels, Host
from hardware_profiles.software.profile import Profile, ProfileGroup, profile_of

FOLDER = Path(__file__).parent / "serving"


class Scheduler(ProfileGroup, frozen=True, kw_only=True):
    """Batching of requests."""

    block_tokens: Amount  # tokens of one block of the cache: a sequence has whole blocks
    prefill_chunk: Amount  # prompt tokens in one step, unless the request sets another number
    graph_sequences: Amount  # tokens of the largest captured step; larger ones are started eagerly


class ServingRuntimeMemory(ProfileGroup, frozen=True, kw_only=True):
    """Memory besides weights and cache."""

    vocab_multiple: Amount  # rows of the vocabulary are padded to a multiple
    hidden_copies: Amount  # of a step's tokens, besides the tensors between two matrices
    sampler_bytes_per_logit: Amount  # logits, their fp32 copy, sorted, with indices and workspace
    latent_workspace_tokens: Amount  # latents of earlier chunks whose keys are unpacked at once
    context_bytes: Amount  # CUDA context, libraries and their workspaces
    graph_bytes: Amount  # captured CUDA graphs
    communication_bytes: Amount  # where several GPUs share a replica
    allocator_slack: Amount  # share of activations and logits


class ServingKernels(ForwardKernels, frozen=True, kw_only=True):
    """Kernels of a forward pass: bytes they move, their number, seconds of each one."""

    sampled_bytes_per_logit: Amount  # moved while the most likely token is picked
    stream_share: Amount  # of a copy's bandwidth, reached by matmuls of few rows on their weights
    per_layer: Amount
    per_expert_layer: Amount  # additional kernels of a layer with experts
    per_shared_expert_layer: Amount  # additional kernels where some experts see every token
    per_latent_attention: Amount  # additional kernels of latent attention
    per_step: Amount
    seconds: Amount  # that one kernel adds to the bytes that it moves


class ServingHost(Host, frozen=True, kw_only=True):
    """Operators that the host launches one by one without CUDA graphs."""

    layer_operators: Amount


class ServingCommunication(ProfileGroup, frozen=True, kw_only=True):
    """Collectives between the GPUs of a replica."""

    bus_efficiency: Amount  # achieved / nominal bandwidth of large collectives inside a node
    network_efficiency: Amount  # the same between nodes
    direct_all_reduce_start: Amount  # seconds; all-reduce by one kernel inside an NVLink domain
    direct_all_reduce_share: Amount  # of the link's bandwidth
    direct_all_reduce_bytes: Amount  # the largest tensor that is reduced this way


class ServingEngine(Profile, frozen=True, kw_only=True):
    """Figures of one serving engine."""

    scheduler: Scheduler
    memory: ServingRuntimeMemory
    kernels: ServingKernels
    host: ServingHost
    communication: ServingCommunication


@cache
def serving_engine(name: str = "vllm") -> ServingEngine:
    """Load the profile of an engine."""
    path = FOLDER / f"{name}.toml"
    document = read_toml(path, "a serving profile")
    return profile_of(ServingEngine, document, str(path), serving_engine)
