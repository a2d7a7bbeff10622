"""Parse the CLUSTER argument.

    8xA100-80GB            one node of eight
    16x8xH100-SXM          16 nodes of eight; ``describe`` repeats total and nodes
    A100-80GB:8            the same as 8xA100-80GB, and so is A100-80GBx8
    32xp5.48xlarge         32 instances of a known kind of node; one without the number
    gb200-nvl72            one rack of 18 nodes of 4 in one NVLink domain; 2xgb200-nvl72
    cluster.toml           see ``cluster_file.py``
    here, here:8           this machine's GPUs, or 8 CPU processes on it
    8xH100-SXM@500W        any of these, with boards held to 500 watts

``NxNAME`` is one node (or one NVLink domain, one TPU pod) where N fits into the usual one of that
accelerator, and whole usual nodes where N is a multiple of them; any other N is refused, because
its readings differ. A name that leaves the board or its memory open (``H100``) is the usual one
that the catalogue declares (``assumed_aliases``). Conventions, and the network between nodes where
no instance or file gives it, are entered in ``Cluster.notes``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from hardware_profiles.cluster.build import build_cluster
from hardware_profiles.cluster.catalogue import (
    covers_accelerators,
    is_accelerator,
    is_known,
    match_accelerator,
    match_node,
    usual_node,
)
from hardware_profiles.cluster.power_limit import with_power_limit
from hardware_profiles.cluster.schema import MAX_GPUS, Accelerator, Cluster, Node
from hardware_profiles.errors import InputError

EXAMPLES: Final = (
    "8xA100-80GB (one node), 16x8xH100-SXM (16 nodes of 8), 32xp5.48xlarge, gb200-nvl72, "
    "a .toml file, here"
)
_COUNT: Final = re.compile(r"([+-]?[\d.,_]+)\s*[x*\u00d7]\s*(?=\S)", re.IGNORECASE)
_AFTER: Final = re.compile(r"^(?P<name>.*[^:\s])\s*:\s*(?P<count>[+-]?\d+)$")
_TIMES: Final = re.compile(
    r"^(?P<name>.*[^x*\u00d7\s])\s*[x*\u00d7]\s*(?P<count>\d+)$", re.IGNORECASE
)
_POWER_LIMIT: Final = re.compile(
    r"(?P<cluster>.+?)\s*@\s*(?P<watts>\d+(\.\d+)?)\s*W", re.IGNORECASE
)
_GLUED: Final = re.compile(r"(?P<count>\d{1,6})(?P<name>[A-Za-z].*)")
_TPU: Final = re.compile(
    r"(?:tpu[- _]?)?v(?P<version>4|5p|5e|5litepod|6e|7)-(?P<count>\d{1,6})", re.IGNORECASE
)
_TWO_CORES: Final = ("4", "5p")


def parse_cluster(text: str) -> Cluster:
    """Return the cluster that a text names; see the head of this file.

    >>> cluster = parse_cluster("16x8xH100-SXM")
    >>> cluster.num_nodes, cluster.gpus_per_node, cluster.accelerator.name
    (16, 8, 'H100-SXM-80GB')
    >>> parse_cluster("16xH100-SXM-80GB").notes[0]
    '16xH100-SXM-80GB is taken as 2 nodes of 8, as usual'
    >>> parse_cluster("12xH100-SXM")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    hardware_profiles.errors.InputError: 12xH100-SXM: nodes of H100-SXM-80GB usually hold 8...
    """
    words = text.strip()
    if not words:
        raise InputError(f"a cluster is expected, such as {EXAMPLES}")
    if held := _POWER_LIMIT.fullmatch(words):
        return with_power_limit(parse_cluster(held["cluster"]), float(held["watts"]))
    if words.lower() == "here" or words.lower().startswith("here:"):
        return _here(words)
    if words.lower().endswith(".toml") or os.sep in words:
        from hardware_profiles.cluster.cluster_file import read_cluster_file

        return read_cluster_file(Path(words))
    counts, name = _counts(words)
    if not counts and (meant := _meant(name)):
        raise InputError(f"{words}: write {meant}")
    if node := match_node(name):
        return _of_nodes(words, counts, node.entry, node.note)
    found = match_accelerator(name)
    notes: tuple[str, ...] = () if found.note is None else (found.note,)
    num_nodes, gpus_per_node = _layout(words, counts, name, found.entry)
    if num_nodes > 1 and len(counts) == 1 and counts[0] > _domain_size(found.entry):
        notes += (f"{words} is taken as {num_nodes} nodes of {gpus_per_node}, as usual",)
    return build_cluster(
        found.entry, num_nodes=num_nodes, gpus_per_node=gpus_per_node, name=words, notes=notes
    )


def _meant(name: str) -> str | None:
    """Return a cluster that a name stands for elsewhere: ``8H100``, and TPUs as Google names them.

    Google counts the two cores of a chip up to v5p (cloud.google.com/tpu/docs, "TPU versions").

    >>> _meant("8H100"), _meant("v5p-64"), _meant("tpu-v6e-8"), _meant("H100")
    ('8xH100', '32xTPU-v5p (Google counts cores, two a chip)', '8xTPU-v6e', None)
    """
    if (glued := _GLUED.fullmatch(name)) and not is_accelerator(name):
        return f"{glued['count']}x{glued['name']}" if covers_accelerators(glued["name"]) else None
    if (tpu := _TPU.fullmatch(name)) is None:
        return None
    version, count = tpu["version"].lower().replace("litepod", "e"), int(tpu["count"])
    if version not in _TWO_CORES:
        return f"{count}xTPU-v{version}"
    return f"{max(1, count // 2)}xTPU-v{version} (Google counts cores, two a chip)"


def accelerator_name(words: str) -> str:
    """Return the accelerator's name in a cluster's words, or that of a known kind of node.

    >>> accelerator_name("16x8xH100"), accelerator_name("4090"), accelerator_name("p5.48xlarge")
    ('H100', '4090', 'H100-SXM-80GB')
    """
    name = _counts(re.sub(r"@[\d.]+\s*W$", "", words.strip(), flags=re.IGNORECASE))[1]
    node = None if covers_accelerators(name) else match_node(name)
    return name if node is None else node.entry.accelerator


def _counts(words: str) -> tuple[tuple[int, ...], str]:
    """Return the numbers before (or after) the name, and the name."""
    counts: list[int] = []
    position = 0
    while (found := _COUNT.match(words, position)) and not is_known(words[position:]):
        counts.append(_number(words, found.group(1)))
        position = found.end()
    name = words[position:].strip()
    whole = _TIMES.match(words)  # 3090x2: a name of digits before the count
    if counts and whole and is_accelerator(whole["name"]) and not is_accelerator(name):
        counts, name = [], words
    after = _AFTER.match(name)
    if after is None and (times := _TIMES.match(name)) and is_accelerator(times["name"]):
        after = times
    if not counts and after is not None:
        counts, name = [_number(words, after.group("count"))], after.group("name")
    # a name has a letter other than the x of counts, or is one of digits alone ("4090")
    lettered = re.search(r"[a-wyz]", name, re.IGNORECASE) or is_accelerator(name)
    if len(counts) > 2 or not re.fullmatch(r"[\w.\- :]+", name) or not lettered:
        if "+" in words:
            raise InputError(
                f"{words!r}: accelerators of two kinds in one cluster are not priced. Price each "
                "kind alone: shardplan plan takes several clusters with commas between them"
            )
        raise InputError(f"{words!r} is no cluster. Write it as {EXAMPLES}")
    return tuple(counts), name


def _number(words: str, digits: str) -> int:
    """Return a count from 1 to MAX_GPUS."""
    whole = digits.isascii() and digits.isdigit() and len(digits) <= 12
    if not whole or not 1 <= int(digits) <= MAX_GPUS:
        shown = digits if len(digits) <= 20 else digits[:17] + "..."
        raise InputError(f"{words[:60]}: {shown} must be a whole number from 1 to {MAX_GPUS:,}")
    return int(digits)


def _layout(
    words: str, counts: tuple[int, ...], name: str, accelerator: Accelerator
) -> tuple[int, int]:
    """Return nodes and accelerators per node."""
    if len(counts) == 2:
        return counts[0], counts[1]
    if not counts:
        raise InputError(
            f"{words}: how many? Write 1x{name} for one, 8x{name} for a node of 8, 2x8x{name} for "
            "two nodes"
        )
    usual = usual_node(accelerator)
    (count,) = counts
    if usual is None or count <= usual.gpus_per_node:
        return 1, count
    num_nodes, left = divmod(count, usual.gpus_per_node)
    if not left:
        return num_nodes, usual.gpus_per_node
    size = usual.gpus_per_node
    even = next(each for each in range(size, 0, -1) if count % each == 0)
    full = " or ".join(f"{n}x{size}x{name} ({n * size})" for n in (num_nodes, num_nodes + 1))
    raise InputError(
        f"{words}: nodes of {accelerator.name} usually hold {size}. "
        f"Write {count // even}x{even}x{name} for {count // even} nodes, "
        f"or 1x{count}x{name} if one node really holds {count}. Full nodes: {full}"
    )


def _domain_size(accelerator: Accelerator) -> int:
    """Return how many accelerators the fast link of the usual node connects."""
    usual = usual_node(accelerator)
    return MAX_GPUS if usual is None else usual.domain_size


def _of_nodes(words: str, counts: tuple[int, ...], node: Node, note: str | None) -> Cluster:
    """Return a cluster of a known kind of node."""
    if len(counts) > 1:
        raise InputError(
            f"{words}: {node.name} says already that a node holds {node.gpus_per_node}; "
            f"write {counts[0]}x{node.name}"
        )
    units = counts[0] if counts else 1
    return build_cluster(
        match_accelerator(node.accelerator).entry,
        num_nodes=units * node.nodes,
        gpus_per_node=node.gpus_per_node,
        node=node,
        name=words,
        notes=() if note is None else (note,),
    )


def _here(words: str) -> Cluster:
    from hardware_profiles.cluster.local_machine import describe_here
    from hardware_profiles.cluster.measurement import MAX_PROCESSES

    _, _, digits = words.partition(":")
    if words.lower() == "here":
        return describe_here(None)
    if not (digits.isascii() and digits.isdigit() and 1 <= int(digits[:9]) <= MAX_PROCESSES):
        raise InputError(
            f"{words}: here:N takes a whole number from 1 to {MAX_PROCESSES} (the processes that "
            "one machine is measured and used with)"
        )
    return describe_here(int(digits[:9]))
