"""Serving scenarios from requests with ``--inference``; an assumption for every default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cost_models.model.families.t5 import LENGTHS
from cost_models.model.presets import is_preset, load_preset
from cost_models.model.spec import ModelSpec
from cost_models.serving.kv_cache import has_cache
from cost_models.serving.memory import (
    KV_PRECISIONS,
    SERVING_PRECISIONS,
    WEIGHT_PRECISIONS,
    ServingWorkload,
)
from cost_models.serving.number_formats import WEIGHT_FORMATS, stored_format
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import InputError
from hardware_profiles.options import dashed, declared
from hardware_profiles.software.serving_engine import serving_engine
from planner.request.requests import FitRequest, ServingOptions
from planner.request.scenario import (
    DEFAULT_SEQ_LEN,
    MAX_BATCH,
    MAX_SEQ_LEN,
    check_choice,
    check_count,
    default_precision,
)
from planner.request.stage_layers import stage_ranges
from planner.serving.scenario import PLAN_FIELDS, ServingScenario

# options of ``fit`` that training and serving share
SHARED: Final = ("seq_len", "precision", "attention_kernel", "layers")


def refuse_training_options(request: FitRequest) -> None:
    """Raise an InputError if an option that only training has is given."""
    known = {"model", "cluster", "inference", *SHARED, *declared(ServingOptions), *PLAN_FIELDS}
    named = [
        one.flags[0] if one.option else dashed(name)
        for name, one in declared(FitRequest).items()
        if name not in known and getattr(request, name) is not None
    ]
    if named:
        raise InputError(
            f"--inference and {', '.join(named)}: only training has "
            f"{'them' if len(named) > 1 else 'it'}; omit one or the other"
        )


def build_serving(
    request: FitRequest, model: ModelSpec, cluster: Cluster
) -> tuple[ServingScenario, list[str]]:
    """Return the serving scenario of a request and the assumptions for omitted options."""
    # LENGTHS is about training
    about = [words for words in model.assumptions if words != LENGTHS]
    assumptions = [*about, *cluster.notes]
    engine = serving_engine()

    def default(name: str, value: Any, why: str) -> Any:
        assumptions.append(f"{name} {value} (default: {why})")
        return value

    length = _context(model, request.context_len, request.seq_len, default)
    prefill_chunk = request.prefill_chunk
    if prefill_chunk is None:
        prefill_chunk = int(engine.scheduler.prefill_chunk)
        if has_cache(model):
            default("prefill_chunk", prefill_chunk, "tokens of prompts in one step, as in vLLM")
    precision, weight_precision = request.precision, request.weight_precision
    if precision is None and weight_precision in SERVING_PRECISIONS:
        precision = weight_precision
    if precision is None:
        precision = default(
            "precision", default_precision(cluster.accelerator), "of the computation"
        )
    precision = check_choice("precision", precision, SERVING_PRECISIONS)
    if weight_precision is None:
        weight_precision = _stored(model, precision, default)
    kv_precision = request.kv_precision
    if kv_precision is None:
        kv_precision = precision
        if has_cache(model):
            default("kv_precision", precision, "as the computation")
    workload = ServingWorkload(
        concurrency=check_count(
            "concurrency", 1 if request.concurrency is None else request.concurrency, MAX_BATCH
        ),
        context_len=check_count("context_len", length, MAX_SEQ_LEN),
        prefill_chunk=check_count("prefill_chunk", prefill_chunk, MAX_SEQ_LEN),
        precision=precision,  # type: ignore[arg-type]
        weight_precision=check_choice("weight_precision", weight_precision, WEIGHT_PRECISIONS),  # type: ignore[arg-type]
        kv_precision=check_choice("kv_precision", kv_precision, KV_PRECISIONS),  # type: ignore[arg-type]
        attention_kernel=check_choice(  # type: ignore[arg-type]
            "attention_kernel", request.attention_kernel or "flash", ("flash", "eager")
        ),
        prompt_len=_prompt(model, length, request.prompt_len, default),
        cuda_graphs=request.cuda_graphs is not False,
    )
    _check_format(model, workload)
    # a legality rule covers learned positions
    longest = None if model.max_seq_len_is_hard else model.max_seq_len
    if longest is not None and length > longest:
        assumptions.append(
            f"context_len {length} is longer than the {longest} that the model was trained for"
        )
    assumptions += _about(model, workload)
    ranges = None if request.layers is None else stage_ranges(request.layers, model)
    return ServingScenario(model, cluster, workload, engine, ranges), assumptions


def _context(model: ModelSpec, context_len: int | None, seq_len: int | None, default: Any) -> int:
    """Return the tokens of a sequence; ``--seq-len`` is a synonym of ``--context-len``."""
    if context_len is not None and seq_len is not None and context_len != seq_len:
        raise InputError(
            f"--context-len {context_len} and --seq-len {seq_len}: with --inference they are the "
            "same, give one"
        )
    length = seq_len if context_len is None else context_len
    if length is not None:
        return length
    if model.max_seq_len is None:
        return int(default("context_len", DEFAULT_SEQ_LEN, "the model declares no maximum"))
    return int(default("context_len", model.max_seq_len, "the model's longest, as in vLLM"))


def _prompt(model: ModelSpec, context_len: int, prompt_len: int | None, default: Any) -> int:
    """Return the tokens of a prompt: the whole context if nothing is generated after it."""
    if not has_cache(model) or any(kind.cross_attention for kind in model.kinds):
        if prompt_len not in (None, context_len):
            raise InputError(
                f"prompt_len = {prompt_len}: {model.name} reads context_len tokens "
                f"(must be {context_len}, or omitted)"
            )
        return context_len
    if prompt_len is not None:
        return check_count("prompt_len", prompt_len, context_len)
    default("prompt_len", max(1, context_len // 2), "half of context_len; times depend on it")
    return 0


def _stored(model: ModelSpec, precision: str, default: Any) -> str:
    """Return the format in which the weights are published."""
    stored = stored_format(model.config)
    method = model.config.get("quantization_config")
    if stored is None and isinstance(method, Mapping):
        why = (
            f"quantization_config {method.get('quant_method')!r} is not supported; "
            "give --weight-precision"
        )
        return str(default("weight_precision", precision, why))
    if stored is None and is_preset(model.name):
        stored = load_preset(model.name).stored or None
    if stored is not None:
        return str(default("weight_precision", stored, "as the weights are published"))
    return str(default("weight_precision", precision, "as the computation"))


def _check_format(model: ModelSpec, workload: ServingWorkload) -> None:
    """Raise an InputError if the weight format applies to none of the model's weights."""
    stored = WEIGHT_FORMATS[workload.weight_precision]
    others = ", ".join(name for name in WEIGHT_FORMATS if name != stored.name)
    if not any(stored.holds(weight) for kind in model.kinds for weight in kind.weights):
        raise InputError(
            f"weight_precision = {stored.name}: {model.name} has no experts, and only experts are "
            f"stored in it (must be one of {others})"
        )


def _about(model: ModelSpec, workload: ServingWorkload) -> list[str]:
    """Return the assumptions of the answer."""
    notes = []
    stored = WEIGHT_FORMATS[workload.weight_precision]
    if stored.is_quantised:
        kept = (
            "everything but the routed experts stays"
            if stored.experts_only
            else ("embeddings, output projection, router and norms stay")
        )
        notes.append(f"{kept} in {workload.precision}")
    if not has_cache(model):
        notes.append(
            f"{model.name} is an encoder without a cache; the memory is that of one forward pass "
            "with output scores for every token"
        )
        return notes
    notes.append("every sequence has context_len tokens (largest cache)")
    if any(kind.attention.kv_lora_rank for kind in model.kinds):
        notes.append(
            "latent attention: every tensor-parallel rank caches the full latents of its sequences"
        )
    if any(kind.attention.window for kind in model.kinds):
        notes.append("sliding-window layers cache only the tokens of their window")
    if any(kind.cross_attention for kind in model.kinds):
        notes.append("prompt and answer have context_len tokens each (encoder and decoder)")
    if any(kind.feed_forward.num_experts for kind in model.kinds):
        notes.append("experts receive equal numbers of tokens (balanced routing)")
    return notes
