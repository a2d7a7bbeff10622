"""Full training with some parts frozen: embedding, first layers, norms, all but the head.

A frozen weight has no gradient, no optimizer state and no master copy: it is stored in compute
precision, replicated on every data rank. Layers before the first trained one have no backward pass:
they are ``forward_only``, save no activations and cost a forward pass only. A frozen layer after it
still computes the gradient of its input.
"""

from __future__ import annotations

from dataclasses import replace

from cost_models.model.spec import LayerKind, ModelSpec, Weight
from cost_models.plan.workload import _LAYERS
from hardware_profiles.errors import InputError


def with_frozen_parts(model: ModelSpec, freeze: str) -> ModelSpec:
    """Return the model with the named parts frozen; layers that differ in them become kinds."""
    if not freeze:
        return model
    words = freeze.split(",")
    layers = _frozen_layers(model, words)
    norms = "norms" in words
    _check_tied(model, words)
    every = "all-but-head" in words
    embedding = _frozen(model.embedding, every or "embedding" in words, norms)
    head = _frozen(model.head, "head" in words, norms)
    below = 0
    if all(w.frozen for w in embedding):
        trained = (
            i
            for i, kind in enumerate(model.pattern)
            if i not in layers and not _is_all_norms(model.kinds[kind], norms)
        )
        below = next(trained, model.num_layers)
    kinds: dict[tuple[int, bool, bool], LayerKind] = {}
    pattern = []
    for number, kind in enumerate(model.pattern):
        key = (kind, number in layers, number < below)
        if key not in kinds:
            weights = _frozen(model.kinds[kind].weights, key[1], norms)
            kinds[key] = replace(model.kinds[kind], weights=weights, forward_only=key[2])
        pattern.append(list(kinds).index(key))
    found = replace(
        model, embedding=embedding, head=head, kinds=tuple(kinds.values()), pattern=tuple(pattern)
    )
    if not found.num_trainable_parameters:
        raise InputError(f"freeze = {freeze}: no parameter of {model.name} is left to train")
    if found.num_trainable_parameters == found.num_parameters:
        raise InputError(f"freeze = {freeze}: {model.name} has no such part")
    return found


def without_adapters_before(model: ModelSpec, first: int) -> ModelSpec:
    """Return a model with adapters from layer ``first`` on; the layers before are forward-only.

    LLaMA-Adapter (Zhang et al., arXiv:2303.16199, sec. 3.1) adapts the topmost layers.
    """
    kinds = list(model.kinds)
    pattern = list(model.pattern)
    idle: dict[int, int] = {}
    for number, index in enumerate(model.pattern[:first]):
        if index not in idle:
            kind = model.kinds[index]
            own = tuple(w for w in kind.weights if not w.is_adapter)
            idle[index] = len(kinds)
            kinds.append(replace(kind, weights=own, forward_only=True))
        pattern[number] = idle[index]
    return replace(model, kinds=tuple(kinds), pattern=tuple(pattern))


def with_trained_layers(
    model: ModelSpec, count: int, *, copies: bool = False, ends: bool = False
) -> ModelSpec:
    """Return the model with a few trained layers, and ends that are trained with them or not.

    The last ``count`` layers, as for LISA, which draws others every few steps (Pan et al.,
    arXiv:2403.17919, alg. 1); or copies of layers, one behind each of ``count`` groups, as for
    LLaMA Pro (Wu et al., arXiv:2401.02415, sec. 3.1). All layers pass gradients on, as recomputed
    ones do under transformers (enable_input_require_grads). Left out: states that LISA's optimizer
    keeps of layers that it drew before.
    """
    layers = model.num_layers
    if not 0 < count <= layers or (copies and layers % count):
        most = f"a divisor of {layers}" if copies else f"1 to {layers}"
        raise InputError(f"trained layers of {model.name} = {count} (must be {most})")
    group = layers // count
    kinds, frozen = list(model.kinds), len(model.kinds)
    kinds += [replace(kind, weights=_frozen(kind.weights, True, False)) for kind in model.kinds]
    pattern: list[int] = []
    for number, kind in enumerate(model.pattern):
        trained = not copies and number >= layers - count
        pattern.append(kind if trained else frozen + kind)
        if copies and (number + 1) % group == 0:
            pattern.append(kind)
    used = sorted(set(pattern))
    return replace(
        model,
        embedding=_frozen(model.embedding, not ends, False),
        head=_frozen(model.head, not ends, False),
        kinds=tuple(kinds[kind] for kind in used),
        pattern=tuple(used.index(kind) for kind in pattern),
    )


def _frozen_layers(model: ModelSpec, words: list[str]) -> set[int]:
    """Return the numbers of the completely frozen layers."""
    if "all-but-head" in words:
        return set(range(model.num_layers))
    found: set[int] = set()
    for match in filter(None, map(_LAYERS.fullmatch, words)):
        first, last = int(match[1]), int(match[2])
        if last >= model.num_layers:
            raise InputError(
                f"freeze = {match[0]}: {model.name} has layers 0 to {model.num_layers - 1}"
            )
        found.update(range(first, last + 1))
    return found


def _check_tied(model: ModelSpec, words: list[str]) -> None:
    """Refuse to freeze and train one tensor at once, or to freeze layers that share tables."""
    if model.bridge:
        raise InputError(
            f"freeze = {','.join(words)}: {model.name} is an encoder and a decoder, whose layers "
            "share tables (must be a model of one stack)"
        )
    if not model.tie_embeddings:
        return
    if "all-but-head" in words:
        raise InputError(
            f"freeze = all-but-head: the output projection of {model.name} is its embedding; name "
            f"layers:0-{model.num_layers - 1}, which trains both"
        )
    if ("head" in words) != ("embedding" in words):
        raise InputError(
            f"freeze = {','.join(words)}: the output projection of {model.name} is its embedding; "
            "name embedding,head or neither"
        )


def _is_all_norms(kind: LayerKind, norms: bool) -> bool:
    return norms and all(w.part == "norm" for w in kind.weights)


def _frozen(weights: tuple[Weight, ...], wholly: bool, norms: bool) -> tuple[Weight, ...]:
    return tuple(
        replace(w, frozen=True) if wholly or (norms and w.part == "norm") else w for w in weights
    )
