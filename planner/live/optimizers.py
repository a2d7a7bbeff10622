"""Optimizers of training scripts, by the names of their classes."""

from __future__ import annotations

from typing import Any, Final

from hardware_profiles.errors import InputError
from planner.exchange.targets.huggingface import MORE_OPTIMIZERS, OPTIMIZERS
from planner.live.wrappers import class_names

# classes of torch.optim, bitsandbytes, transformers, apex and others: the optimizer here
CLASSES: Final = {
    name: optimizer
    for optimizer, names in {
        "adamw": "adamw adamw32bit fusedadam deepspeedcpuadam zeroredundancyoptimizer",
        "adam": "adam adam32bit",
        "sgd": "sgd fusedsgd",
        "lamb": "lamb fusedlamb",
        "lion": "lion pagedlion",
        "adafactor": "adafactor",
        "muon": "muon",
        "adamw_8bit": "adamw8bit adamwfp8 adam8bit",
        "adamw_4bit": "adamw4bit adam4bit",
        "paged_adamw": "pagedadamw pagedadam pagedadamw32bit pagedadam32bit",
        "paged_adamw_8bit": "pagedadamw8bit pagedadam8bit",
        "lion_8bit": "lion8bit pagedlion8bit",
        "ademamix": "ademamix ademamix32bit",
        "ademamix_8bit": "ademamix8bit",
    }.items()
    for name in names.split()
}
# TrainingArguments.optim of transformers, where it is not the name of a class
NAMES: Final = {
    **{theirs: ours for ours, theirs in OPTIMIZERS.items()},
    **MORE_OPTIMIZERS,
    "adamw_anyprecision": "adamw",
    "paged_lion_32bit": "lion",
    "paged_lion_8bit": "lion_8bit",
}
WRAPPED: Final = ("optimizer", "optim")  # attributes of accelerate's and DeepSpeed's wrappers


def optimizer_of(optimizer: Any) -> tuple[str, str | None, list[str]]:
    """Return the name of an optimizer, its kernel if it states one, and notes.

    ``optimizer``: a live optimizer, its class, or a name of ours or of ``TrainingArguments.optim``.

    >>> optimizer_of("AdamW8bit")[:2], optimizer_of("adamw_torch_fused")[:2]
    (('adamw_8bit', None), ('adamw', 'fused'))
    """
    if isinstance(optimizer, str):
        kernel = "fused" if "fused" in optimizer else None
        return _named([optimizer]), kernel, []
    if isinstance(optimizer, type):
        return _named([kind.__name__ for kind in optimizer.__mro__]), None, []
    inner = next((getattr(optimizer, one) for one in WRAPPED if hasattr(optimizer, one)), None)
    known = [name for name in class_names(optimizer) if name.lower() in CLASSES]
    if inner is not None and not known:
        return optimizer_of(inner)
    name = _named(class_names(optimizer))
    settings = {**getattr(optimizer, "defaults", {})}
    for group in getattr(optimizer, "param_groups", [])[:1]:
        settings |= {key: value for key, value in group.items() if key != "params"}
    if name == "sgd" and settings.get("momentum"):
        name = "sgd_momentum"
    if name == "adafactor" and settings.get("beta1") is not None:
        name = "adafactor_momentum"
    kernel = None
    if settings.get("fused"):
        kernel = "fused"
    elif settings.get("foreach") is not None:
        kernel = "foreach" if settings["foreach"] else "for-loop"
    return name, kernel, []


def _named(names: list[str]) -> str:
    """Return the optimizer of the first name that is known."""
    for name in names:
        found = NAMES.get(name.lower()) or CLASSES.get(name.lower())
        plain = name.lower().replace("_", "").replace("-", "")
        if found or plain in CLASSES:
            return found or CLASSES[plain]
        if name.lower() in CLASSES.values():
            return name.lower()
    raise InputError(
        f"optimizer {names[0]!r} is not known (must be one of "
        f"{', '.join(dict.fromkeys(CLASSES.values()))}); name the one with the most similar states"
    )
