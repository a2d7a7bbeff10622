"""Parts of a plan that are pinned: ``--fix tp=2,pp=2,zero=1``."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from cost_models.plan.plan import FLAGS, WORDS, Plan
from hardware_profiles.errors import InputError, did_you_mean
from hardware_profiles.options import declared, meant, read_count
from planner.request.stage_layers import read_recompute, without_list

FIX: Final = "--fix"  # the option that pins
SHORT_NAMES: Final = {one.short: name for name, one in declared(Plan).items() if one.short != name}
ON: Final = {"on": True, "true": True, "1": True, "yes": True}
OFF: Final = {"off": False, "false": False, "0": False, "no": False}


def parse_fixed(text: str, where: str = FIX) -> dict[str, Any]:
    """Read ``tp=2,pp=2,zero=1`` into plan fields; ``where`` names the option in errors.

    >>> parse_fixed("tp=2,recompute=full,sp=on")
    {'tensor_parallel': 2, 'recompute': 'full', 'sequence_parallel': True}
    >>> parse_fixed("recompute=full,recompute_layers=4,2,0,0,pp=4")
    {'recompute': 'full', 'recompute_layers': (4, 2, 0, 0), 'pipeline_parallel': 4}
    """
    fixed: dict[str, Any] = {}
    names = [*SHORT_NAMES, *(f.name for f in fields(Plan))]
    for item in _items(text):
        key, separator, value = (part.strip() for part in item.partition("="))
        if not separator or not value:
            raise InputError(f"{where} {item!r}: expected name=value, for example tp=2")
        name = SHORT_NAMES.get(key, key)
        if key not in names:
            hint = did_you_mean(key, names)
            known = [one.short for one in declared(Plan).values() if one.option is not None]
            raise InputError(
                f"{where} {item!r}: {key!r} is not a part of a plan. "
                + (hint or f"Known: {', '.join(known)}")
            )
        parsed = _parse_value(name, value, where)
        if name in fixed and fixed[name] != parsed:
            raise InputError(f"{where}: {name} is given twice, as {fixed[name]} and as {parsed}")
        fixed[name] = parsed
    return check_fixed(fixed, where)


def pinned(flag: str, value: str | None = None) -> str | None:
    """Return the words of ``--fix`` for an option of ``fit``; None where it is not in a plan.

    >>> pinned("--tp", "4"), pinned("--no-sp"), pinned("--fsdp"), pinned("--seq-len")
    ('tp=4', 'sp=off', 'zero=3', None)
    """
    known = declared(Plan)
    if not any(flag in (*one.flags, *one.off_flags) for one in known.values()):
        found = meant(flag, known.values())
        if found is None:
            return None
        flag, value = found[0].flags[0], found[1] or value
    for name, one in known.items():
        if flag in one.off_flags:
            return f"{one.short}=off"
        if flag in one.flags and one.option is not None:
            if one.type is bool:
                return f"{one.short}=on"
            if one.option.example is not None:
                return one.option.example
            for word in (value or "", *reversed(one.values), "2"):
                with contextlib.suppress(InputError):
                    if parse_fixed(f"{one.short}={word}").keys() == {name}:
                        return f"{one.short}={word}"
    return None


def pinned_or_default(
    fixed: Mapping[str, Any], assumptions: list[str], name: str, default: Any, why: str
) -> Any:
    """Return a pinned field, or its default, which is appended to the assumptions."""
    if name in fixed:
        return fixed[name]
    assumptions.append(f"{name} {default} (default: {why})")
    return default


def check_fixed(fixed: Mapping[str, Any], where: str = FIX) -> dict[str, Any]:
    """Check single values as plan.json does; ``where`` names them in errors."""
    read = read_recompute(fixed)
    Plan.from_dict(without_list(read)[0], where)
    return read


def _items(text: str) -> list[str]:
    """Split at commas, but for those between the numbers of ``recompute_layers=4,2,0,0``."""
    items: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if part.isdecimal() and items and items[-1].startswith("recompute_layers"):
            items[-1] += f",{part}"
        else:
            items.append(part)
    return items


def _parse_value(name: str, value: str, where: str) -> Any:
    if name in FLAGS:
        known = {**ON, **OFF}
        if value.lower() not in known:
            raise InputError(f"{where} {name}={value[:40]}: must be on or off")
        return known[value.lower()]
    if name in WORDS or (name == "recompute_layers" and "," in value):
        return value
    try:
        return read_count(value)
    except ValueError:
        raise InputError(f"{where} {name}={value[:40]}: must be a whole number") from None
