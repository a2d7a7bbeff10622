"""Low-rank adapters over a frozen model (LoRA: Hu et al., arXiv:2106.09685).

A matrix W of a layer gets two small ones, A (r, in) and B (out, r): y = x W + (alpha / r) x A B.
Only these are trained. QLoRA (Dettmers et al., arXiv:2305.14314) stores the matrices W in 4 bits.

Sharding: if W is sharded along its outputs, so is B; if along its inputs, so is A. The other matrix
is replicated on every tensor-parallel rank, and each rank's gradient of it is a partial sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from cost_models.model.adapter_methods import FIRST, METHODS, SECOND
from cost_models.model.freezing import with_frozen_parts
from cost_models.model.spec import LayerKind, ModelSpec, Weight
from cost_models.plan.workload import AdapterMethod, Quantisation, Workload
from hardware_profiles.errors import InputError

ADAPTED_PARTS: Final = {"all": ("attention", "mlp", "shared_experts"), "attention": ("attention",)}
# QLoRA, sec. 3: 4 bits an element, one fp32 scale for each block of 64; double quantisation keeps
# scales in 8 bits, with one fp32 number for 256 of them
BLOCK: Final = 64
BLOCK_OF_SCALES: Final = 256
QUANTISED_BYTES: Final = 0.5 + 4.0 / BLOCK
# Bytes of an element, and of a row (output) of its matrix. int8: one fp32 scale a row (Dettmers et
# al., LLM.int8, arXiv:2208.07339, sec. 2.1; bitsandbytes Int8Params.SCB). int4: groups of 128 with
# an fp16 scale and a 4-bit zero point (GPTQ, Frantar et al., arXiv:2210.17323). int2: groups of 64,
# a scale and a zero point of 8 bits (mobiusml/hqq: BaseQuantizeConfig, quant_zero, quant_scale)
GROUP: Final = 128
STORED_BYTES: Final[dict[Quantisation, tuple[float, float]]] = {
    "nf4": (QUANTISED_BYTES, 0.0),
    "nf4_double": (0.5 + 1.0 / BLOCK + 4.0 / (BLOCK * BLOCK_OF_SCALES), 0.0),
    "int8": (1.0, 4.0),
    "int4": (0.5 + (2.0 + 0.5) / GROUP, 0.0),
    "int2": (0.25 + 2.0 / BLOCK, 0.0),
}
# Matrices of each target, by a part of their name; fused matrices belong to several targets
TARGETS: Final[Mapping[str, tuple[str, ...]]] = {
    "q": ("q_proj", "c_attn", "qkv", "query_key_value", "q_a_proj", "q_b_proj", ".query"),
    "k": ("k_proj", "c_attn", "qkv", "query_key_value", ".key"),
    "v": ("v_proj", "c_attn", "qkv", "query_key_value", ".value"),
    "o": ("o_proj", "self_attn.dense", "attention.dense", "attn.c_proj", "self_attention.dense"),
    "gate": ("gate_proj", "gate_up_proj"),
    "up": ("up_proj", "fc1", "c_fc", "dense_h_to_4h"),
    "down": ("down_proj", "fc2", "mlp.c_proj", "dense_4h_to_h"),
}
# elements (a multiple of the block) dequantised at once, with their temporary indices
DEQUANTISED_AT_ONCE: Final = 1 << 22


def quantised_bytes(kind: Quantisation, *, scales: bool = True) -> float:
    """Bytes of a quantised element, with its share of the scales or without."""
    return STORED_BYTES[kind][0] if scales else {"int8": 1.0, "int2": 0.25}.get(kind, 0.5)


def is_adapted(weight: Weight, targets: str) -> bool:
    """Whether a matrix gets adapters; ``targets``: "all", "attention", or names such as "q,v"."""
    if weight.role != "linear" or len(weight.shape) != 2:
        return False
    if targets in ADAPTED_PARTS:
        return weight.part in ADAPTED_PARTS[targets]
    if weight.part not in ADAPTED_PARTS["all"]:
        return False
    return any(part in weight.name for target in targets.split(",") for part in TARGETS[target])


def adapter_names(name: str) -> tuple[str, str]:
    """Return the names of A and B of a matrix.

    >>> adapter_names("self_attn.q_proj.weight")
    ('self_attn.q_proj.lora_A.weight', 'self_attn.q_proj.lora_B.weight')
    """
    stem = name.removesuffix(".weight")
    return stem + FIRST, stem + SECOND


def adapted(
    model: ModelSpec, workload: Workload, *, quantises_every_matrix: bool = False
) -> ModelSpec:
    """Return the model with the workload's adapters or frozen parts; unchanged without either.

    QLoRA quantises the adapted matrices, or every matrix of every layer, experts included.
    """
    if workload.adapter == "none":
        return with_frozen_parts(model, workload.freeze)
    kinds = tuple(_adapted_kind(kind, workload, quantises_every_matrix) for kind in model.kinds)
    if not any(w.is_adapter for kind in kinds for w in kind.weights):
        raise InputError(f"adapter = {workload.adapter}: {model.name} has no matrix to adapt")
    trained = any(w.numel for kind in kinds for w in kind.weights if w.is_adapter)
    if workload.adapter_rank and not trained:
        raise InputError(
            f"adapter_rank = {workload.adapter_rank}: {workload.adapter_method} has nothing to "
            "train (must be a block size from 2 to the inputs of a matrix)"
        )
    return replace(
        model,
        kinds=kinds,
        embedding=_frozen(model.embedding) + _shared(kinds, workload),
        bridge=_frozen(model.bridge),
        head=_frozen(model.head),
    )


def _shared(kinds: Sequence[LayerKind], workload: Workload) -> tuple[Weight, ...]:
    """Return the frozen matrices that the adapters of all layers share."""
    chosen = [w.features for kind in kinds for w in kind.weights if w.adapter]
    inputs, outputs = (max(lengths) for lengths in zip(*chosen, strict=True))
    method, name = METHODS[workload.adapter_method], f"{workload.adapter_method}_shared"
    shapes = method.shared(inputs, outputs, workload.adapter_rank)
    return tuple(
        Weight(f"{name}_{i}", shape, "lookup", "replicate", is_adapter=True, frozen=True)
        for i, shape in enumerate(shapes)
    )


def with_trained_ends(model: ModelSpec, *, copies: bool = True) -> ModelSpec:
    """Return a model with adapters that trains its embedding and output projection, too.

    The frozen originals are kept besides ``copies``, as ``modules_to_save`` of a LoraConfig has it
    (huggingface/peft, utils/other.py, ModulesToSaveWrapper).
    """
    tables = [w for w in (*model.embedding, *model.head) if w.sharding == "vocab"]
    kept = tuple(replace(w, name=f"original.{w.name}", role="lookup") for w in tables if copies)

    def trained(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
        return tuple(replace(w, frozen=False) if w in tables else w for w in weights)

    return replace(model, embedding=trained(model.embedding) + kept, head=trained(model.head))


def first_adapters(kind: LayerKind, *, of_fused_matrices: bool) -> list[Weight]:
    """Return the matrices A of a layer; of fused matrices one for all that read the same input."""
    found = [w for w in kind.weights if w.is_adapter and w.name.endswith(FIRST)]
    if not of_fused_matrices:
        return found
    return list({(w.part, w.sharding, w.shape[-1]): w for w in found}.values())


def without_adapters(model: ModelSpec) -> ModelSpec:
    """Return the base model of a model that ``adapted`` returned."""

    def before(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
        base = (weight for weight in weights if not weight.is_adapter)
        return tuple(replace(w, frozen=False, quantised=False, adapter="") for w in base)

    return _with_weights(model, before)


def trainable_part(model: ModelSpec) -> ModelSpec:
    """Return the model with its trained tensors only; unchanged if all are trained."""
    return _part(model, frozen=False) if has_frozen(model) else model


def frozen_part(model: ModelSpec, *, quantised: bool) -> ModelSpec:
    """Return the model with its frozen tensors only: the quantised or the other ones."""
    return _part(model, frozen=True, quantised=quantised)


def has_frozen(model: ModelSpec) -> bool:
    """Whether a part of the model is not trained."""
    layers = (w for kind in model.kinds for w in kind.weights)
    return any(w.frozen for w in (*model.outer, *layers))


def projection_is_frozen(model: ModelSpec) -> bool:
    """Whether the output projection is not trained; a tied one is the embedding."""
    own = [w for w in model.head if w.role == "linear" and w.sharding == "vocab"]
    return all(w.frozen for w in own) if own else embedding_is_frozen(model)


def embedding_is_frozen(model: ModelSpec) -> bool:
    """Whether the embedding's output needs no gradient."""
    return all(w.frozen for w in model.embedding)


def _part(model: ModelSpec, *, frozen: bool, quantised: bool = False) -> ModelSpec:
    def kept(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
        return tuple(w for w in weights if w.frozen == frozen and w.quantised == quantised)

    part = _with_weights(model, kept)
    tied = model.tie_embeddings and any(w.sharding == "vocab" for w in part.embedding)
    return replace(part, tie_embeddings=tied)


def _with_weights(
    model: ModelSpec, change: Callable[[tuple[Weight, ...]], tuple[Weight, ...]]
) -> ModelSpec:
    """Return the model with changed weights in every block."""
    return replace(
        model,
        kinds=tuple(replace(kind, weights=change(kind.weights)) for kind in model.kinds),
        embedding=change(model.embedding),
        bridge=change(model.bridge),
        head=change(model.head),
    )


def _adapted_kind(kind: LayerKind, workload: Workload, every: bool) -> LayerKind:
    found = []
    for weight in kind.weights:
        chosen = is_adapted(weight, workload.adapter_targets)
        matrix = every and weight.is_matrix and len(weight.shape) >= 2
        quantised = workload.adapter == "qlora" and (chosen or matrix)
        method = _method(weight, workload.adapter_method) if chosen else ""
        found.append(replace(weight, frozen=True, quantised=quantised, adapter=method))
        if chosen:
            found += _beside(weight, method, workload.adapter_rank)
    return replace(kind, weights=tuple(found))


def _method(weight: Weight, method: AdapterMethod) -> str:
    """Return the tensors that adapt a matrix."""
    last = weight.sharding == "row" and weight.part != "attention"
    return (METHODS[method].of_last if last else "") or method


def _beside(weight: Weight, method: str, rank: int) -> list[Weight]:
    """Return the tensors that adapt a matrix; those along its sharded dimension are sharded."""
    inputs, outputs = weight.features
    along = {"column": "o", "row": "i"}.get(weight.sharding)
    own, found = {"i": inputs, "o": outputs}, []
    for suffix, shape in METHODS[method].tensors(inputs, outputs, rank).items():
        cut = along in shape
        found.append(
            Weight(
                weight.name.removesuffix(".weight") + suffix,
                tuple(n if isinstance(n, int) else own[n] for n in shape),
                "linear" if suffix in (FIRST, SECOND) else "vector",
                weight.sharding if cut else "replicate",
                weight.part,
                is_adapter=True,
                parts=weight.parts if cut else (),
                reads_source=weight.reads_source,
            )
        )
    return found


def _frozen(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
    return tuple(replace(weight, frozen=True) for weight in weights)
