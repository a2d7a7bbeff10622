"""Build a serving scenario from a request; every default is recorded as an assumption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from cost_models.model.families.t5 import LENGTHS
from cost_models.model.presets import is_preset, load_preset
from cost_models.model.spec import ModelSpec
from cost_models.serving.kv_cache import has_cache
from cost_models.serving.memory import ServingWorkload
from cost_models.serving.number_formats import (
    KV_PRECISIONS,
    SERVING_PRECISIONS,
    WEIGHT_FORMATS,
    WEIGHT_PRECISIONS,
    stored_format,
)
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

# arguments of fit() that training and serving share
SHARED: Final = ("seq_len", "precision", "attention_kernel", "layers")


def refuse_training_options(request: FitRequest) -> None:
    """Raise an InputError if an option of training is given."""
    known = {"model", "cluster", "inference", *SHARED, *declared(ServingOptions), *PLAN_FIELDS}
    given = [
        one.flags[0] if one.option else dashed(name)
        for name, one in declared(FitRequest).items()
        if name not in known and getattr(request, name) is not None
    ]
    if given:
        raise InputError(
            f"--inference and {', '.join(given)}: only training has "
            f"{'them' if len(given) > 1 else 'that'}; leave out one or the other"
        )


def build_serving(
    model: ModelSpec,
    cluster: Cluster,
    *,
    concurrency: int,
    context_len: int | None = None,
    seq_len: int | None = None,
    prefill_chunk: int | None = None,
    precision: str | None = None,
    weight_precision: str | None = None,
    kv_precision: str | None = None,
    attention_kernel: str | None = None,
    layers: str | Sequence[int] | None = None,
    prompt_len: int | None = None,
    cuda_graphs: bool | None = None,
) -> tuple[ServingScenario, list[str]]:
    """Check the request and fill in defaults; return the scenario and the assumptions."""
    about = [words for words in model.assumptions if words != LENGTHS]  # as of training
    assumptions = [*about, *cluster.notes]
    engine = serving_engine()

    def default(name: str, value: Any, why: str) -> Any:
        assumptions.append(f"{name} {value} (default: {why})")
        return value

    length = _context(model, context_len, seq_len, default)
    if prefill_chunk is None:
        prefill_chunk = int(engine.scheduler.prefill_chunk)
        if has_cache(model):
            default("prefill_chunk", prefill_chunk, "tokens of prompts in one step, as in vLLM")
    chosen = precision
    if chosen is None:
        chosen = weight_precision if weight_precision in SERVING_PRECISIONS else None
    if chosen is None:
        chosen = default("precision", default_precision(cluster.accelerator), "of the computation")
    chosen = check_choice("precision", chosen, SERVING_PRECISIONS)
    if weight_precision is None:
        weight_precision = _stored(model, chosen, default)
    if kv_precision is None:
        kv_precision = chosen
        if has_cache(model):
            default("kv_precision", chosen, "as the computation")
    workload = ServingWorkload(
        concurrency=check_count("concurrency", concurrency, MAX_BATCH),
        context_len=check_count("context_len", length, MAX_SEQ_LEN),
        prefill_chunk=check_count("prefill_chunk", prefill_chunk, MAX_SEQ_LEN),
        precision=chosen,
        weight_precision=check_choice("weight_precision", weight_precision, WEIGHT_PRECISIONS),
        kv_precision=check_choice("kv_precision", kv_precision, KV_PRECISIONS),
        attention_kernel=check_choice(
            "attention_kernel", attention_kernel or "flash", ("flash", "eager")
        ),
        prompt_len=_prompt(model, length, prompt_len, default),
        cuda_graphs=cuda_graphs is not False,
    )
    _check_format(model, workload)
    # learned positions are a rule of their own
    longest = None if model.max_seq_len_is_hard else model.max_seq_len
    if longest is not None and length > longest:
        assumptions.append(
            f"context_len {length} is longer than the {longest} that the model was made for"
        )
    assumptions += _about(model, workload)
    ranges = None if layers is None else stage_ranges(layers, model)
    return ServingScenario(model, cluster, workload, engine, ranges), assumptions


def _context(model: ModelSpec, context_len: int | None, seq_len: int | None, default: Any) -> int:
    """Return the tokens of a sequence; ``--seq-len`` is a synonym."""
    if context_len is not None and seq_len is not None and context_len != seq_len:
        raise InputError(
            f"--context-len {context_len} and --seq-len {seq_len}: with --inference they are the "
            "same, give one"
        )
    length = seq_len if context_len is None else context_len
    if length is not None:
        return length
    if model.max_seq_len is None:
        return int(default("context_len", DEFAULT_SEQ_LEN, "the model has no longest one"))
    return int(default("context_len", model.max_seq_len, "the model's longest, as in vLLM"))


def _prompt(model: ModelSpec, context_len: int, prompt_len: int | None, default: Any) -> int:
    """Return the tokens of a prompt; the whole sequence for encoders."""
    if not has_cache(model) or model.is_encoder_decoder:
        if prompt_len not in (None, context_len):
            raise InputError(
                f"prompt_len = {prompt_len}: {model.name} reads context_len tokens "
                f"(must be {context_len}, or left out)"
            )
        return context_len
    if prompt_len is not None:
        return check_count("prompt_len", prompt_len, context_len)
    default("prompt_len", max(1, context_len // 2), "half of context_len; times depend on it")
    return 0


def _stored(model: ModelSpec, precision: str, default: Any) -> str:
    """Return the format of the published weights."""
    published = stored_format(model.config)
    method = model.config.get("quantization_config")
    if published is None and isinstance(method, Mapping):
        why = f"quantization_config {method.get('quant_method')!r} is not read; choose another"
        return str(default("weight_precision", precision, why))
    if published is None and is_preset(model.name):
        published = load_preset(model.name).stored or None
    if published is not None:
        return str(default("weight_precision", published, "as the weights are published"))
    return str(default("weight_precision", precision, "as the computation"))


def _check_format(model: ModelSpec, workload: ServingWorkload) -> None:
    """Raise an InputError if the format applies to none of the model's weights."""
    stored = WEIGHT_FORMATS[workload.weight_precision]
    if not any(stored.holds(weight) for kind in model.kinds for weight in kind.weights):
        raise InputError(
            f"weight_precision = {stored.name}: {model.name} has no experts, which alone are "
            f"stored so (must be one of {', '.join(f for f in WEIGHT_FORMATS if f != stored.name)})"
        )


def _about(model: ModelSpec, workload: ServingWorkload) -> list[str]:
    """Return the assumptions of the answer in words."""
    notes = []
    stored = WEIGHT_FORMATS[workload.weight_precision]
    if stored.is_quantised:
        kept = (
            "all but the routed experts stays"
            if stored.experts_only
            else ("embeddings, output projection, router and norms stay")
        )
        notes.append(f"{kept} in {workload.precision}")
    if not has_cache(model):
        notes.append(
            f"{model.name} is an encoder: it keeps no cache; the memory is that of one forward "
            "pass, with scores of every token"
        )
        return notes
    notes.append("every sequence is as long as context_len (the cache's worst case)")
    if any(kind.attention.kv_lora_rank for kind in model.kinds):
        notes.append(
            "latent attention: every tensor-parallel rank keeps the whole latents of its sequences"
        )
    if any(kind.attention.window for kind in model.kinds):
        notes.append("layers with a window keep its tokens only")
    if model.is_encoder_decoder:
        notes.append("prompt and answer are context_len tokens each (encoder and decoder)")
    if any(kind.feed_forward.num_experts for kind in model.kinds):
        notes.append("experts get equally many tokens (balanced routing)")
    return notes
