"""The files of the catalogue: accelerators, kinds of nodes and links as data in TOML.

    data/accelerators/*.toml   [[accelerator]]  one table a device, grouped by family
    data/nodes/*.toml          [[node]]         servers, cloud instances, racks
    data/links.toml            [latency]        seconds a message by kind of link
                               [share]          of the line rate, by kind of link
    data/sources.toml          [sources]        short key = where a number was read
    data/not_priced.toml       [[not_priced]]   names of devices that are not priced, and the reason

Every number carries a kind and the key of a source; ``note`` adds words to it. Kinds: *measured* by
us; *published*: measured by others; *datasheet*: the vendor's figure, read where the source says;
*assumed*: nobody's figure, the source says why.

Memory capacity is the driver's figure, if published. Otherwise the nominal size is read as GiB
(NVIDIA cards with HBM report 99.5 to 100 % of that, AMD's the whole) and the figure is marked as
assumed. Cards with GDDR and error correction switched on report 1/16 less; B300 and GB300 report
288 · 10⁹ bytes and less. CUDA reserves a part of it: torch's total capacity is ``usable_memory``,
if published.

Prices are those of one provider on one day, if published; the user states the actual ones
(``shardplan plan --price``, or ``price`` in the accelerator of a cluster's file).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

from msgspec import Meta, Struct, defstruct

from hardware_profiles.cluster.schema import PRECISIONS, Accelerator, Figure, Kind, Node
from hardware_profiles.errors import InputError
from hardware_profiles.fields import (
    Line,
    Positive,
    convert,
    parse_toml,
    read_text,
    read_toml,
    struct_of,
)

FOLDER: Final = Path(__file__).parent / "data"


class _CatalogueFigure(Struct, frozen=True, forbid_unknown_fields=True):
    """``{ value, kind, source, note }``."""

    value: Positive
    kind: Kind
    source: Line
    note: Line | None = None


class _CatalogueShare(_CatalogueFigure, frozen=True, forbid_unknown_fields=True):
    value: Annotated[float, Meta(ge=1e-12, le=1.0)]


_Rate = Annotated[float, Meta(ge=1.0, le=1e30)]
_Count = Annotated[int, Meta(ge=1, le=10**9)]
_Rates: Final = defstruct(  # { bf16 = …, fp16 = …, kind, source, note }: rates by precision
    "Rates",
    [
        *((precision, _Rate | None, None) for precision in PRECISIONS),
        ("kind", Kind),
        ("source", str),
        ("note", str | None, None),
    ],
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
)
_OPTIONAL: Final = (
    "usable_memory",
    "host_bandwidth",
    "host_memory_bandwidth",
    "power",
    "power_limit",
    "price",
    "compute_units",
    "l2_cache",
    "systolic_array",
    "kernel_launch",
)
_FIGURES: Final[dict[str, Any]] = {
    "memory_capacity": _CatalogueFigure,
    "memory_bandwidth": _CatalogueFigure,
    "peak_flops": tuple[_Rates, ...],  # type: ignore[valid-type]
    "achievable_flops": (tuple[_Rates, ...], ()),  # type: ignore[valid-type]
    "link_bandwidth": _CatalogueFigure,
    "link_share": _CatalogueShare | None,
    **dict.fromkeys(_OPTIONAL, _CatalogueFigure | None),
}
_MEASURED: Final = ("score_seconds", "core_share")  # of a CPU process, never in a file
_Accelerator: Final = struct_of(Accelerator, without=_MEASURED, **_FIGURES)
_Listed: Final = struct_of(  # an accelerator of the catalogue
    Accelerator, without=_MEASURED, **_FIGURES, node=str, assumed_aliases=(dict[str, str], {})
)
_Node: Final = struct_of(
    Node,
    gpus_per_node=_Count,
    network_bandwidth=_CatalogueFigure,
    domain_size=(_Count | None, None),
    nodes=_Count,
    host_links=Annotated[int, Meta(ge=0, le=10**9)],
    link_bandwidth=_CatalogueFigure | None,
    peer_bandwidth=_CatalogueFigure | None,
    torus_from=_Count,
    power=_CatalogueFigure | None,
    host_memory=_CatalogueFigure | None,
    nvme=_CatalogueFigure | None,
    assumed_aliases=(dict[str, str], {}),
)


class _LinkTables(Struct, frozen=True, forbid_unknown_fields=True):
    latency: dict[str, _CatalogueFigure]
    share: dict[str, _CatalogueShare]


class LinkFigures(Struct, frozen=True):
    """Figures by kind of link: seconds of a message, share of the line rate."""

    latency: dict[str, Figure]
    share: dict[str, Figure]


class _Sources(Struct, frozen=True, forbid_unknown_fields=True):
    sources: dict[str, str]


class _NotPriced(Struct, frozen=True, forbid_unknown_fields=True):
    names: tuple[str, ...]
    reason: str


class _AllNotPriced(Struct, frozen=True, forbid_unknown_fields=True):
    not_priced: tuple[_NotPriced, ...]


def reasons_not_priced() -> dict[str, str]:
    """Return why devices are not priced, by their names."""
    path = FOLDER / "not_priced.toml"
    found = convert(read_toml(path, "devices"), _AllNotPriced, path.name)
    return {name: group.reason for group in found.not_priced for name in group.names}


class Section(NamedTuple):
    """One table ``[[accelerator]]`` or ``[[node]]`` of a file, as text."""

    path: Path
    text: str


def sections(folder: str) -> Iterator[Section]:
    """Yield the tables of all files of a folder."""
    for path in sorted((FOLDER / folder).glob("*.toml")):
        text = read_text(path, "part of the catalogue")
        yield from (Section(path, part) for part in re.split(r"(?m)^(?=\[\[)", text)[1:])


@cache
def accelerator_of(section: Section) -> tuple[Accelerator, Any, str]:
    """Return an accelerator with its table and where that is."""
    table, at = _table(section, "accelerator", _Listed)
    return _accelerator(table, at, _catalogue_source), table, at


@cache
def node_of(section: Section) -> tuple[Node, Any, str]:
    """Return a kind of node with its table and where that is."""
    table, at = _table(section, "node", _Node)
    return _node(table), table, at


@lru_cache(maxsize=1)
def link_figures() -> LinkFigures:
    """Return what the catalogue says about links."""
    path = FOLDER / "links.toml"
    found = convert(read_toml(path, "links"), _LinkTables, path.name)
    return LinkFigures(
        *(
            {link: _figure(entry, _catalogue_source) for link, entry in table.items()}
            for table in (found.latency, found.share)
        )
    )


@lru_cache(maxsize=1)
def _sources() -> dict[str, str]:
    path = FOLDER / "sources.toml"
    return convert(read_toml(path, "sources"), _Sources, path.name).sources


def _table(section: Section, key: str, kind: Any) -> tuple[Any, str]:
    """Return the table ``[[key]]`` of a section, and where it is."""
    (values,) = parse_toml(section.text, section.path)[key]
    where = f"{section.path.name}: {values.get('name')}"
    return convert(values, kind, where), where


def _figure(entry: _CatalogueFigure, cited: Callable[[str], str]) -> Figure:
    return Figure(entry.value, entry.kind, _with_note(entry, cited))


def _with_note(entry: Any, cited: Callable[[str], str]) -> str:
    source = cited(entry.source)
    return source if entry.note is None else f"{source} ({entry.note})"


def _catalogue_source(key: str) -> str:
    return _sources()[key]


def _by_precision(groups: Iterable[Any], cited: Callable[[str], str]) -> dict[str, Figure]:
    """Return the rates of several groups, each with one source."""
    rates: dict[str, Figure] = {}
    for group in groups:
        source = _with_note(group, cited)
        for precision in PRECISIONS:
            if (value := getattr(group, precision)) is not None:
                rates[precision] = Figure(value, group.kind, source)
    return rates


def accelerator_from_table(values: Mapping[str, Any], where: str) -> Accelerator:
    """Read the table [accelerator] of a cluster's file, which cites its sources in words."""
    return _accelerator(convert(values, _Accelerator, where), where, str)


def _accelerator(table: Any, where: str, cited: Callable[[str], str]) -> Accelerator:
    """Return the accelerator of a table; ``cited`` turns a source's key into words."""
    values = _plain(table, Accelerator, cited)
    values["peak_flops"] = _by_precision(table.peak_flops, cited)
    values["achievable_flops"] = _by_precision(table.achievable_flops, cited)
    if not values["peak_flops"]:
        raise InputError(f"{where}: peak_flops is missing")
    return Accelerator(**values)


def _node(table: Any) -> Node:
    """Return the node of a table, whose ``network_bandwidth`` is that of a whole server."""
    values = _plain(table, Node, _catalogue_source)
    whole = values["network_bandwidth"]
    values["network_bandwidth"] = replace(whole, value=whole.value / table.gpus_per_node)
    values["domain_size"] = table.domain_size or table.gpus_per_node
    return Node(**values)


def _plain(table: Any, cls: type, cited: Callable[[str], str]) -> dict[str, Any]:
    """Return the values of a table that a dataclass has, with figures instead of entries."""
    names = {field.name for field in fields(cls)} & set(table.__struct_fields__)
    values = {name: getattr(table, name) for name in names}
    return {
        name: _figure(value, cited) if isinstance(value, _CatalogueFigure) else value
        for name, value in values.items()
    }
