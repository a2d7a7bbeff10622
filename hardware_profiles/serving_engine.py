"""Serving profiles: the few numbers in which inference engines differ, as data with a source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path

from hardware_profiles.reading import Fields, read_toml

FOLDER = Path(__file__).parent / "serving"


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
