"""Words that a shell proposes for MODEL, CLUSTER and parts of a plan while they are typed.

The catalogues are read when a word is completed, so that the help needs none of them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hardware_profiles.options import Declared

# of a cluster: what stands before the name of the accelerator, a count without its x, the name
_CLUSTER: Final = re.compile(r"((?:\d+(?:\.\.\d+)?[x*×])*)(\d*(?:\.\.\d*)?)(.*)", re.IGNORECASE)
DEGREES: Final = (1, 2, 4, 8, 16, 32, 64)
USUAL: Final = "8x"  # accelerators where no number was typed


def models(start: str) -> list[str]:
    """Return the presets whose name begins so, after a slash the hub ids; of several, the last.

    >>> models("llama-2-7")
    ['llama-2-7b', 'llama-2-70b']
    >>> models("gpt2,meta-llama/Llama-2-7b-h")
    ['gpt2,meta-llama/Llama-2-7b-hf']
    """
    from cost_models.model.presets import all_presets

    before, last = _split(start)
    presets = all_presets()
    names = [preset.name for preset in presets]
    if "/" in last:
        names = [alias for preset in presets for alias in preset.aliases if "/" in alias]
    return _beginning(names, last, before)


def accelerator_names(start: str) -> list[str]:
    """Return the accelerators whose name begins so.

    >>> accelerator_names("h100-s")
    ['H100-SXM-80GB', 'H100-SXM-96GB', 'H100-SXM-64GB']
    """
    from hardware_profiles.cluster.catalogue import accelerators

    return _beginning([accelerator.name for accelerator in accelerators()], start)


def clusters(start: str) -> list[str]:
    """Return clusters that begin so: ``8x`` and the accelerators; of several, the last one.

    >>> clusters("2x8xH200-S")
    ['2x8xH200-SXM-141GB']
    >>> clusters("8xL40S,4xL40")[:2]
    ['8xL40S,4xL40S', '8xL40S,4xL40']
    """
    before, last = _split(start)
    found = _CLUSTER.fullmatch(last)
    assert found is not None  # its last part takes any text
    counts, count, name = found.groups()
    number = f"{counts}{count}x" if count else counts or USUAL
    if count and name:
        return []  # 8H100 is no cluster
    return [f"{before}{number}{one}" for one in accelerator_names(name)]


def plan_parts(start: str) -> list[str]:
    """Return the parts of a plan whose name begins so, or the values of the last one.

    >>> plan_parts("tp=2,z"), plan_parts("zero=")
    (['tp=2,zero='], ['zero=0', 'zero=1', 'zero=2', 'zero=3'])
    >>> plan_parts("sp="), plan_parts("tensor_")
    (['sp=on', 'sp=off'], ['tensor_parallel='])
    """
    from cost_models.plan.plan import Plan
    from hardware_profiles.options import declared

    before, last = _split(start)
    name, equals, value = last.partition("=")
    parts = {part: one for part, one in declared(Plan).items() if one.option is not None}
    by_name = {one.short: one for one in parts.values()} | parts
    if equals:
        one = by_name.get(name)
        return [] if one is None else _beginning(_values(one), value, f"{before}{name}=")
    given = {word.partition("=")[0] for word in before.split(",")}
    left = [one for one in parts.values() if not given & {one.short, one.name}]
    names = [one.short for one in left if one.short.startswith(name)]
    names = names or [one.name for one in left if one.name.startswith(name)]
    return [f"{before}{one}=" for one in names]


def _values(one: Declared) -> list[str]:
    """Return the values of a part of a plan; of a number the usual ones."""
    from hardware_profiles.options import possible_values

    return list(possible_values(one)) or [str(number) for number in DEGREES]


def prices(start: str) -> list[str]:
    """Return the accelerators that begin so, each before its price.

    >>> prices("L40S=0.9,h100-s")
    ['L40S=0.9,H100-SXM-80GB=', 'L40S=0.9,H100-SXM-96GB=', 'L40S=0.9,H100-SXM-64GB=']
    """
    before, last = _split(start)
    return [] if "=" in last else [f"{before}{name}=" for name in accelerator_names(last)]


def failures(start: str) -> list[str]:
    """Return the figures of ``--failures`` that begin so.

    >>> failures("mtbf=50000,s")
    ['mtbf=50000,stall=', 'mtbf=50000,storage=']
    """
    from hardware_profiles.software.failures import SHORT

    before, last = _split(start)
    return _beginning([f"{name}=" for name in SHORT], last, before)


def _split(start: str) -> tuple[str, str]:
    """Return the names before the last comma, with it, and the rest."""
    before, comma, last = start.rpartition(",")
    return before + comma, last


def _beginning(names: list[str], start: str, before: str = "") -> list[str]:
    return [before + name for name in names if name.lower().startswith(start.lower())]
