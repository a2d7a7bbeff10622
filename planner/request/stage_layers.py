"""Layers of each stage, and which of them recompute, as typed: ``3,5,5,3``, ``full:1/2``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from cost_models.model.spec import ModelSpec
from cost_models.partition.recomputed_layers import read_recompute_layers_by_stage
from cost_models.plan.plan import Plan
from cost_models.plan.recompute import WORDS, read_setting
from hardware_profiles.errors import InputError

LIST: Final = re.compile(r"\d+(,\d+)+")
SHARE: Final = re.compile(r"(.+):(\d{1,6})/(\d{1,6})")
EVERY: Final = re.compile(r"every:(\d{1,6})")

Ranges = tuple[tuple[int, int], ...]


def stage_ranges(layers: str | Sequence[int], model: ModelSpec) -> Ranges:
    """Read ``3,5,5,3`` into the layers [first, last) of each stage; every layer is in one."""
    counts = _counts(layers)
    text = ",".join(str(count) for count in counts)
    if sum(counts) != model.num_layers:
        raise InputError(
            f"layers = {text}: {sum(counts)} in all, but {model.name} has {model.num_layers} "
            f"(must add up to {model.num_layers})"
        )
    ends = list(accumulate(counts))
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def layers_option(ranges: Ranges) -> str:
    """Return the option that gives such stages.

    >>> layers_option(((0, 3), (3, 8)))
    '--layers 3,5'
    """
    return "--layers " + ",".join(str(last - first) for first, last in ranges)


def _counts(layers: str | Sequence[int]) -> list[int]:
    words: Sequence[Any] = layers.split(",") if isinstance(layers, str) else layers
    shown = layers if isinstance(layers, str) else ",".join(map(str, words))
    wrong = InputError(
        f"layers = {shown[:60]} (must be the layers of every stage, each a whole number from 1, "
        "such as 3,5,5,3; 0 for a first or last stage of embedding or head alone)"
    )
    try:
        counts = [int(word) if isinstance(word, str) else word for word in words]
    except ValueError:
        raise wrong from None
    if not counts or any(type(n) is not int or n < 0 for n in counts) or 0 in counts[1:-1]:
        raise wrong
    return counts


def read_recompute(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return plan options with ``full:n/k`` and numbers of stages read into plain values.

    >>> read_recompute({"recompute": "full:1/2"}) == read_recompute({"recompute": "every:2"})
    True
    >>> read_recompute({"recompute": "full:1/2"})
    {'recompute': 'full', 'recompute_layers': 1, 'recompute_every': 2}
    >>> read_recompute({"recompute_layers": "4,2,0,0"})
    {'recompute_layers': (4, 2, 0, 0)}
    """
    read = dict(options)
    layers, words = options.get("recompute_layers"), options.get("recompute")
    if isinstance(layers, str):
        read["recompute_layers"] = _numbers(layers)
    elif isinstance(layers, (list, tuple)):
        read["recompute_layers"] = read_recompute_layers_by_stage(list(layers), "recompute_layers")
    if isinstance(words, str):
        if every := EVERY.fullmatch(words):
            words = f"full:1/{every[1]}"
        found, (whole, colon, _) = SHARE.fullmatch(words), words.partition(":")
        if found is None and not (colon and whole in WORDS):
            read["recompute"] = read_setting(words)
            return read
        if found is None or not 1 <= int(found[2]) <= int(found[3]):
            raise InputError(
                f"recompute = {words[:60]} (must be such as full:1/2, the first n of every k "
                "layers of a stage, with 1 <= n <= k)"
            )
        for name in ("recompute_layers", "recompute_every"):
            if read.get(name):
                raise InputError(f"recompute = {words} and {name}: choose one of them")
        read["recompute"] = read_setting(found[1])
        read["recompute_layers"], read["recompute_every"] = int(found[2]), int(found[3])
    return read


def _numbers(text: str) -> int | tuple[int, ...]:
    if text.isdecimal():
        return int(text)
    if LIST.fullmatch(text) is None:
        raise InputError(
            f"recompute_layers = {text[:60]} (must be a whole number, for every stage, or one for "
            "each stage, such as 4,2,0,0)"
        )
    return read_recompute_layers_by_stage(
        [int(number) for number in text.split(",")], "recompute_layers"
    )


def without_list(fixed: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[int, ...] | None]:
    """Take the numbers of the stages, which are no part of a plan, out of its options."""
    rest, layers = dict(fixed), fixed.get("recompute_layers")
    if not isinstance(layers, tuple):
        return rest, None
    del rest["recompute_layers"]
    return rest, layers


def recompute_option(plan: Plan) -> str:
    """Return the options for a plan's recomputation.

    >>> recompute_option(Plan(recompute="full", recompute_layers=1, recompute_every=2))
    '--recompute full:1/2'
    """
    if plan.recompute_every:
        return f"--recompute {plan.recompute}:{plan.recompute_layers}/{plan.recompute_every}"
    words = f"--recompute {plan.recompute}"
    return f"{words} --recompute-layers {plan.recompute_layers}" if plan.recompute_layers else words


def stage_recompute_options(by_stage: tuple[int, ...] | None) -> list[str]:
    """Return the option for the recomputed layers of each stage, if any.

    >>> stage_recompute_options((4, 2, 0, 0))
    ['--recompute-layers 4,2,0,0']
    """
    return [] if by_stage is None else ["--recompute-layers " + ",".join(map(str, by_stage))]


def recompute_cell(plan: Plan) -> str:
    """Return the recompute setting of a plan for a table, with the number of layers if not all.

    >>> recompute_cell(Plan(recompute="full", recompute_layers=18))
    'full 18'
    """
    word, layers, every = plan.recompute, plan.recompute_layers, plan.recompute_every
    return f"{word} {layers}" * bool(layers) + f"/{every}" * bool(every) or str(word)
