"""The cluster of a row."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any, Final

from msgspec.structs import replace as replace_cells

from cost_models.units import GIB
from hardware_profiles.cluster.build import build_cluster
from hardware_profiles.cluster.catalogue import (
    find_accelerator,
    match_accelerator,
    match_node,
    nodes,
    normalised,
    usual_node,
)
from hardware_profiles.cluster.local_machine import describe_here
from hardware_profiles.cluster.power_limit import with_power_limit
from hardware_profiles.cluster.schema import Accelerator, Cluster, Figure, Node
from hardware_profiles.errors import InputError, NeedsMeasurement
from planner.validation.rows.reading import Reading, Unpriceable
from planner.validation.rows.runs_file import Row
from planner.validation.rows.stand_ins import usual_card
from planner.validation.rows.words import look_up, words_table

# words for the server, or the rack, around an accelerator
BOARDS: Final = re.compile(
    r"\b(?:[hd]gx|nvl\d+|superchip|super ?pod|gpus?|oam|hls\w*|grace (?:hopper|blackwell))\b[\s-]*",
    re.IGNORECASE,
)
BESIDE: Final = re.compile(r"\s*\([^)]*\)|\s+x\s*\d+$", re.I)  # a cloud or a count after a name
SEPARATORS: Final = re.compile(r"\s*(?:[/+,;&]|\band\b)\s*", re.IGNORECASE)  # "V100 + T4"
COUNT: Final = re.compile(r"^\s*\d+\s*[x×*]?\s*(?=[a-z])|\bmixed\b", re.IGNORECASE)
MEMORY: Final = re.compile(r"\b(\d+) ?GI?B?\b", re.IGNORECASE)  # in a name: "V100 (16GB)"
VARIANT: Final = re.compile(r"\b(?:laptop|mobile|max|super|ti|nvl|pcie)\b", re.IGNORECASE)
INSTANCE: Final = re.compile(r"\b\w+\.\d*x?large\b", re.IGNORECASE)  # of AWS
# around a name: how many, the kind of its memory, its power, the instance
AROUND: Final = re.compile(
    r"^\s*\d+\s*[x×*]\s*(?=[a-z])|(?<![a-z])[x×*]\s*\d+$|\bhbm\w*|\bgddr\w*|\b\d+ ?w\b|\bsxm\d?\W*$"
    rf"|{INSTANCE.pattern}",
    re.IGNORECASE,
)
CUSTOM: Final = re.compile(r"\bcustom\b ?", re.IGNORECASE)  # Leonardo's A100
# machines whose nodes have one kind of accelerator: "JUPITER-Booster", "Leonardo"
PLACE: Final = re.compile(r"([A-Za-z]{5,})(?:-Booster|-\d+)?")
SLICE: Final = re.compile(r"\b(tpu\d*x?|v\d[a-z]*)-\d+\b", re.IGNORECASE)  # "v5e-256"
HERE: Final = "here"  # in the column gpu: the CPU processes or GPUs of this machine
Key = tuple[Any, ...]


def cluster_of(reading: Reading) -> tuple[Cluster, Key]:
    """Return the cluster of a row and a key that is equal for equal clusters."""
    row = reading.row
    if row.words("gpu") == HERE:
        return _this_machine(reading.need("num_gpus")), (HERE, row.num_gpus)
    accelerator = accelerator_of(reading)
    total = reading.need("num_gpus")
    if row.node is None and (kinds := _nodes_in(row.gpu or "")):  # "p3.8xlarge (V100)"
        row = replace_cells(row, node=" + ".join(kind.name for kind in kinds))
    if row.node is None or not _is_one_node(row.node):
        alone = _nodes_in(row.node) if row.node else []  # "4 x p3.8xlarge"
        kind = alone[0] if len(alone) == 1 else _node_of_site(row, accelerator)
        row = replace_cells(row, node=kind.name) if kind is not None else row
    accelerator = _slowest_of_nodes(reading, accelerator)
    named = None if row.node is None else match_node(row.node)
    several = [] if named is not None or row.node is None else _nodes_of(row.node)
    if row.node is not None and named is None and not several:
        reading.defaults.append(f"node {row.node!r} is unknown: that of {accelerator.name}")
    usual = usual_node(accelerator) if named is None else named.entry
    each = row.get("gpus_per_node")
    if each is None:
        most = min(usual.gpus_per_node if usual else 8, total)
        each = max(size for size in range(1, most + 1) if total % size == 0)
        each = reading.value("gpus_per_node", each, "usual node, or the largest that divides")
    each = min(each, total)
    if total % each and usual and total % usual.gpus_per_node == 0:  # a rack: its trays
        each = usual.gpus_per_node
    if total % each:
        whole = max(size for size in range(1, each) if total % size == 0)
        reading.defaults.append(f"nodes of {whole}: {total} are no whole ones of {each}")
        each = whole
    speed = row.get("inter_link_gbps_per_gpu") if total > each else None
    if speed is None and several and total > each:
        speed = min(several)
        reading.defaults.append(f"network of {speed:.4g} Gb/s an accelerator, the slowest of them")
    node = None if named is None else row.node
    key = (accelerator.name, total // each, each, speed, node, row.power)
    return _build(*key), key


def _is_one_node(name: str) -> bool:
    """Whether a name is that of one kind of node, which an accelerator need not choose."""
    return _node_called(name) is not None


def _node_of_site(row: Row, accelerator: Accelerator) -> Node | None:
    """Return the kind of node of a site that a row names, or where its project trains."""
    words = " ".join(map(row.words, ("gpu", "node", "framework", "model", "notes")))
    if row.node is None and (usual := look_up(words_table().sites, row)) is not None:
        words = f"{words} {usual.value.lower()}"
    for kind in nodes():
        site, _, family = kind.name.rpartition("-")
        named = "-" in site and re.search(rf"\b{site.lower().replace('-', '[ _-]?')}\b", words)
        if named and normalised(row.gpu or "").removeprefix("nvidia").startswith(family.lower()):
            return kind
        place, card = PLACE.fullmatch(kind.name), kind.accelerator.partition("-")[0]
        here = place is not None and re.search(rf"\b{place[1].lower()}\b", words)
        if here and card == accelerator.name.partition("-")[0]:
            return kind
    return None


def _nodes_of(words: str) -> list[float]:
    """Return the Gb/s an accelerator of several kinds of nodes that a cell names; none of one.

    A collective of all ranks takes the slowest of their links.
    """
    kinds = _nodes_in(words)
    return [kind.network_bandwidth.value * 8e-9 for kind in kinds] if len(kinds) > 1 else []


def _nodes_in(words: str) -> list[Node]:
    """Return the kinds of nodes that a cell names, next to counts; none if it names others, too."""
    found = []
    for part in SEPARATORS.split(words):
        instance = INSTANCE.search(part)
        name = instance[0] if instance else COUNT.sub("", part).strip()
        try:
            found.append(match_node(name))
        except InputError:  # one of several kinds
            return []
    kinds = [one.entry for one in found if one is not None]
    return kinds if len(kinds) == len(found) else []


def _node_called(name: str) -> Node | None:
    """Return the kind of node of that name, which is not a part of it."""
    with suppress(InputError):  # of several kinds
        found = match_node(name)
        return found.entry if found is not None else None
    return None


def _slowest_of_nodes(reading: Reading, accelerator: Accelerator) -> Accelerator:
    """Return the accelerator, or a slower one of several kinds of nodes that a cell names."""
    kinds = _nodes_in(reading.row.node or "")
    if len(kinds) < 2:
        return accelerator
    known = [find_accelerator(kind.accelerator) for kind in kinds]
    slowest = min([accelerator, *known], key=lambda entry: entry.peak_flops["fp16"].value)
    if slowest is not accelerator:
        told = f"node {reading.row.node}: priced as {slowest.name} alone, the slowest of them"
        reading.defaults.append(told)
    return slowest


@cache
def _this_machine(processes: int) -> Cluster:
    try:
        return describe_here(processes)
    except (InputError, NeedsMeasurement) as error:
        raise Unpriceable(f"gpu here: {error}; shardplan fit MODEL here measures it") from None


@cache
def _build(
    name: str,
    num_nodes: int,
    gpus_per_node: int,
    gigabits: float | None,
    node: str | None,
    watts: float | None,
) -> Cluster:
    kind = None if node is None else match_node(node)
    network = None
    if gigabits is not None:
        network = Figure(gigabits * 1e9 / 8.0, "published", "inter_link_gbps_per_gpu of the row")
    cluster = build_cluster(
        find_accelerator(name),
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        node=None if kind is None else kind.entry,
        network_bandwidth=network,
    )
    if watts is None:
        return cluster
    try:
        return with_power_limit(cluster, watts)
    except InputError as error:
        raise Unpriceable(str(error)) from None


def accelerator_of(reading: Reading) -> Accelerator:
    """Return the accelerator that ``gpu`` and ``gpu_mem_gb`` name, and record the convention."""
    row = reading.row
    name, memory = row.get("gpu"), row.get("gpu_mem_gb")
    if name is None:
        name = usual_card(reading)
        row = replace_cells(row, gpu=name)
    name = CUSTOM.sub("", name)
    if memory is None and (stated := MEMORY.search(name)):
        memory = float(stated[1])
        row = replace_cells(row, gpu_mem_gb=memory)
    exact = [name] if _leaves_nothing_open(name) else []
    plain = MEMORY.sub("", BESIDE.sub("", name)).strip(" -")  # "A100-64GB (Leonardo)"
    names = [f"{word}-{memory:g}GB" for word in (name, plain)] if memory is not None else []
    entry = look_up(words_table().gpu, row)
    usual = [entry.accelerator] if entry else []
    if entry and (smaller := smaller_accelerator(row)) is not None:
        reading.defaults.append(f"{entry.accelerator} (its memory is not said: or {smaller.name})")
    known = usual + names if entry and entry.before_name else names + exact + usual
    if (slowest := _slowest(reading, name)) is not None:
        reading.defaults.append(f"gpu {name}: priced as {slowest.name} alone, the slowest of them")
        return slowest
    bare = MEMORY.sub("", name).strip()
    within = () if _not_priced(bare) else _names_within(name, memory)
    alone = COUNT.sub("", BESIDE.sub("", name)).strip()
    if not known and (server := _node_called(alone)) is not None:  # "Atlas 800T A2", not an A2
        return find_accelerator(server.accelerator)
    for candidate in [*known, name, BOARDS.sub("", name), BESIDE.sub("", name), alone, *within]:
        try:
            found = match_accelerator(candidate)
        except InputError:
            continue
        resized = found.note == found.entry.memory_capacity.source  # another size of its memory
        if found.note is not None and (resized or candidate not in known):
            reading.defaults.append(found.note)
        return found.entry
    if len(kinds := _nodes_in(name)) == 1:
        return find_accelerator(kinds[0].accelerator)
    if (family := _of_family(name)) is not None:
        reading.defaults.append(f"gpu {name}: {family.name}, as other instances of its family")
        return family
    unknown = f"gpu {name!r} is not in the catalogue, which shardplan hardware lists"
    raise Unpriceable(_not_priced(name) or _not_priced(bare) or unknown)


def _names_within(name: str, memory: float | None) -> Iterator[str]:
    """Names of accelerators that may end a cell, the longest first, without the words around them.

    Last, what stands before a stated memory, unless a word after it is of another card.

    Memory that a cell states comes last in a name.

    >>> list(_names_within("8 x H100 80GB HBM3 SXM 700W", 80.0))
    ['H100-80GB', '8 x H100-80GB']
    """
    words = SLICE.sub(r"\1", BOARDS.sub("", MEMORY.sub(" ", name)))
    for _ in range(2):  # "SXM" may stand before "700W"
        words = AROUND.sub(" ", words).strip()
    parts = re.findall(r"[\w.]+", words)
    for start in range(len(parts)):
        shorter = " ".join(parts[start:])
        yield shorter if memory is None else f"{shorter}-{memory:g}GB"
    stated = MEMORY.search(name)
    if stated and not VARIANT.search(name[stated.end() :]):  # "H100 64GB MareNostrum 5"
        yield f"{name[: stated.start()].strip()}-{stated[1]}GB"


def _of_family(name: str) -> Accelerator | None:
    """Return the accelerator of the instances of a family: of g5.12xlarge that of g5.48xlarge."""
    instance = INSTANCE.search(name)
    if instance is None:
        return None
    family = f"{instance[0].partition('.')[0]}.".lower()
    kinds = {
        node.accelerator
        for node in nodes()
        if any(word.lower().startswith(family) for word in node.aliases)
    }
    return find_accelerator(kinds.pop()) if len(kinds) == 1 else None


def smaller_accelerator(row: Row) -> Accelerator | None:
    """Return the accelerator with less memory that a row's words leave open; None if none.

    A measured peak above its memory rules it out.
    """
    name, entry = row.gpu or "", look_up(words_table().gpu, row)
    said = row.gpu_mem_gb is not None or MEMORY.search(name) or _leaves_nothing_open(name)
    if said or entry is None or not entry.smaller:
        return None
    found = find_accelerator(entry.smaller)
    return found if (row.peak_memory_gib or 0.0) * GIB <= found.memory_capacity.value else None


def _slowest(reading: Reading, name: str) -> Accelerator | None:
    """Return the accelerator with the lowest peak of several that a cell names; None of one.

    Ranks that share the work evenly wait for it.
    """
    parts = SEPARATORS.split(name)
    kinds = {}
    for part in parts if len(parts) > 1 else ():
        with suppress(Unpriceable):
            row = replace_cells(reading.row, gpu=COUNT.sub("", part).strip(), gpu_mem_gb=None)
            entry = accelerator_of(Reading(row))
            kinds[entry.name] = entry
    if len(kinds) < 2:
        return None
    return min(kinds.values(), key=lambda entry: entry.peak_flops["fp16"].value)


def _not_priced(name: str) -> str | None:
    """Return why the catalogue leaves an accelerator out, if it says so."""
    try:
        match_accelerator(name)
    except InputError as error:
        return str(error) if "not priced" in str(error) else None
    return None


def _leaves_nothing_open(name: str) -> bool:
    """Whether a name is that of one accelerator without any convention."""
    try:
        return match_accelerator(name).note is None
    except InputError:
        return False
