"""Adapters of peft, quantised matrices of bitsandbytes, and frozen parts of a live module."""

from __future__ import annotations

import re
from typing import Any, Final

from torch import nn

from cost_models.model.lora import TARGETS
from hardware_profiles.errors import InputError
from planner.live.wrappers import class_names

LORA: Final = re.compile(r"\.?lora_[A-Za-z_]+\.")
NOT_PRICED: Final = "are not priced: LoRA and QLoRA are"
_LAYER: Final = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")


def has_adapters(module: nn.Module) -> bool:
    """Whether peft wraps a module, or has put its layers into it."""
    return any("BaseTunerLayer" in class_names(part) for part in module.modules())


def adapter_options(module: nn.Module) -> dict[str, Any]:
    """Return rank, alpha, matrices and quantisation as options of ``fit``; {} if it has none."""
    layers = {
        name: part for name, part in module.named_modules() if "BaseTunerLayer" in class_names(part)
    }
    if not layers:
        return {}
    first = next(iter(layers.values()))
    if not hasattr(first, "lora_A"):
        raise InputError(f"adapters of {type(first).__name__} {NOT_PRICED}")
    active = next(iter(first.r))
    rank, alpha = int(first.r[active]), float(first.lora_alpha[active])
    targets = ",".join(
        target
        for target, parts in TARGETS.items()
        if any(part in name for name in layers for part in parts)
    )
    if not targets:
        names = ", ".join(sorted({name.rpartition(".")[2] for name in layers})[:4])
        raise InputError(f"adapters on {names}: no known matrices of attention and MLP")
    kind = _quantisation(module)
    found: dict[str, Any] = {"lora_alpha": alpha, "lora_targets": targets}
    if kind is None:
        return {"lora": rank, **found}
    return {"qlora": rank, "quantisation": kind, **found}


def _quantisation(module: nn.Module) -> str | None:
    """Return how the frozen matrices are quantised; None if they are not."""
    for parameter in module.parameters():
        if type(parameter).__name__ == "Params4bit":
            double = bool(getattr(parameter, "compress_statistics", False))
            return "nf4_double" if double else "nf4"
        if type(parameter).__name__ == "Int8Params":
            return "int8"
    return None


def frozen_parts(module: nn.Module) -> str | None:
    """Return the frozen parts in the words of ``freeze``: embedding, head, norms, layers:0-3.

    "": all parameters are trained; None: frozen in another way.
    """
    parameters = dict(module.named_parameters())
    frozen = {name for name, one in parameters.items() if not one.requires_grad}
    if not frozen:
        return ""
    layers: dict[int, list[bool]] = {}
    for name in parameters:
        if found := _LAYER.search(name):
            layers.setdefault(int(found[1]), []).append(name in frozen)
    whole = [number for number, flags in sorted(layers.items()) if all(flags)]
    embedding = _parameters_of(module, "get_input_embeddings", parameters)
    head = _parameters_of(module, "get_output_embeddings", parameters)
    outside = {name for name in parameters if not _LAYER.search(name)}
    if set(parameters) - frozen <= head and frozen:
        return "all-but-head"
    parts = ["embedding"] if embedding and embedding <= frozen else []
    if head and outside - embedding <= frozen:
        parts.append("head")
    explained = {name for name in frozen if name in embedding or name in outside}
    for first, last in _ranges(whole):
        parts.append(f"layers:{first}-{last}")
        explained |= {
            name for name in frozen if (m := _LAYER.search(name)) and first <= int(m[1]) <= last
        }
    if explained < frozen or not parts:
        return None
    return ",".join(parts)


def _parameters_of(module: nn.Module, getter: str, parameters: dict[str, Any]) -> set[str]:
    """Return the names of the parameters of the part that a method of transformers returns."""
    part = getattr(module, getter, lambda: None)()
    own = {id(one) for one in part.parameters()} if part is not None else set()
    return {name for name, one in parameters.items() if id(one) in own}


def _ranges(numbers: list[int]) -> list[tuple[int, int]]:
    """Return runs of consecutive numbers.

    >>> _ranges([0, 1, 2, 5])
    [(0, 2), (5, 5)]
    """
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found
