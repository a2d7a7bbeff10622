"""Fields in an error as they are typed: ``tensor_parallel = 3`` as ``--tp 3`` or ``tp=3``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from hardware_profiles.options import Declared

FILE: Final = re.compile(r"\S+\.\w+: ")  # whose keys are named as they are


def in_options(text: str, own: Iterable[Declared], pinned: Mapping[str, Declared]) -> str:
    """Return an error with the options of a command in place of names of fields.

    ``own``: the options of the command; ``pinned``: fields that ``--fix`` takes, if no option
    gives them. A name of one word is replaced where a value follows, since it may be plain English.

    >>> from cost_models.plan.plan import Plan
    >>> from hardware_profiles.options import declared
    >>> text = "zero_stage = 3: needs data_parallel >= 2"
    >>> in_options(text, declared(Plan).values(), {}), in_options(text, (), declared(Plan))
    ('--zero 3: needs --dp >= 2', 'zero=3: needs dp >= 2')
    """
    if FILE.match(text):
        return text
    given = [one for one in own if one.flags]
    for one in (one for one in given if one.off_flags):
        text = re.sub(rf"(?<![\w'-]){one.name} = (false|off)\b", one.off_flags[0], text, flags=re.I)
        text = re.sub(rf"(?<![\w'-]){one.name} = (true|on)\b", one.flags[0], text, flags=re.I)
    flags = {one.name: (one.flags[0], " = ", " ") for one in given}
    shorts = {n: (one.short, " ?= ?", "=") for n, one in pinned.items() if one.option is not None}
    for name, (typed, equals, joint) in {**shorts, **flags}.items():
        start = rf"(?<![\w'-])(?:plan: )?{name}"
        text = re.sub(rf"{start}{equals}(?=[^\s=])", f"{typed}{joint}", text)
        text = re.sub(rf"{start}(?![\w=])", typed, text) if "_" in name else text
    return text
