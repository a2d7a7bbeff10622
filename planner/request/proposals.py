"""Words that a shell proposes for MODEL and CLUSTER while they are typed.

The catalogues are read when a word is completed, so that the help needs none of them.
"""

from __future__ import annotations

import re
from typing import Final

# of a cluster: what stands before the name of the accelerator, a count without its x, the name
_CLUSTER: Final = re.compile(r"((?:\d+(?:\.\.\d+)?[x*×])*)(\d*(?:\.\.\d*)?)(.*)", re.IGNORECASE)
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
    ['H100-SXM-80GB', 'H100-SXM-96GB']
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


def _split(start: str) -> tuple[str, str]:
    """Return the names before the last comma, with it, and the rest."""
    before, comma, last = start.rpartition(",")
    return before + comma, last


def _beginning(names: list[str], start: str, before: str = "") -> list[str]:
    return [before + name for name in names if name.lower().startswith(start.lower())]
