"""The catalogue: accelerators, kinds of nodes and the latencies of links, as data in TOML files.

    data/accelerators/*.toml   [[accelerator]]  one table a device, grouped by family
    data/nodes/*.toml          [[node]]         servers, cloud instances, racks
    latencies.toml        [link]           seconds a message by kind of link
    sources.toml          [sources]        short key = where a number was read

Every number carries a kind and the key of a source; ``note`` adds words to it. Kinds: *measured* by
us; *published*: measured by others; *datasheet*: the vendor's figure, read where the source says;
*assumed*: nobody's figure, the source says why.

Memory capacity is what the driver reports, where somebody published it. Otherwise the name on the
box is read as GiB (NVIDIA cards with HBM report 99.5 to 100 % of that, AMD's the whole) and the
figure is marked as assumed. Cards with GDDR and error correction switched on report 1/16 less;
B300 and GB300 report 288 · 10⁹ bytes and less. CUDA keeps a part of it for itself: what torch calls
the total capacity is ``usable_memory``, where somebody published it.

Prices are those of one provider on one day, where somebody published them: what renting costs
is the user's to say (``shardplan plan --price``, or ``price`` in the accelerator of a cluster's
file).

Names are matched without regard to case, separators and a vendor's name; a name that several
accelerators share is an error that lists them, never a guess. ``assumed_aliases`` are names which
leave something open that one convention closes; the convention is given with the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final, Generic, TypeVar

from hardware_profiles.cluster.schema import DEVICES, KINDS, PRECISIONS, Accelerator, Figure, Node
from hardware_profiles.errors import InputError, did_you_mean
from hardware_profiles.fields import Fields, read_toml

FOLDER: Final = Path(__file__).parent / "data"
_VENDORS: Final = re.compile(
    r"^(nvidia|tesla|geforce|quadro|amd|instinct|intel|habana|google|aws)+"
)

Entry = TypeVar("Entry", Accelerator, Node)


@dataclass(frozen=True, slots=True)
class Match(Generic[Entry]):
    """What a name stands for, and the convention that was needed to say so."""

    entry: Entry
    note: str | None = None


@dataclass(frozen=True, slots=True)
class _Index(Generic[Entry]):
    """Entries by every normalised name."""

    entries: dict[str, Entry] = field(default_factory=dict)
    matches: dict[str, Match[Entry]] = field(default_factory=dict)

    def add(self, entry: Entry, assumed: Mapping[str, str], where: str) -> None:
        """Enter an entry under its name and aliases; two entries cannot share one."""
        self.entries[entry.name] = entry
        named: dict[str, str | None] = dict.fromkeys((entry.name, *entry.aliases))
        named.update(
            (alias, f"{alias} is taken as {entry.name}: {why}") for alias, why in assumed.items()
        )
        for alias, note in named.items():
            key = normalised(alias)
            other = self.matches.setdefault(key, Match(entry, note)).entry
            if other is not entry:
                raise ValueError(f"{where}: {alias} names both {other.name} and {entry.name}")


def normalised(name: str) -> str:
    """Return a name as it is compared: ``NVIDIA A100-SXM4-80GB`` → ``a100sxm480g``.

    >>> normalised("a100_80GiB"), normalised("Tesla V100-SXM2-16GB"), normalised("RTX 4090")
    ('a10080g', 'v100sxm216g', 'rtx4090')
    """
    letters = re.sub(r"[^a-z0-9.]+", "", name.lower())
    return _VENDORS.sub("", re.sub(r"(?<=\d)gi?b", "g", letters))


def accelerators() -> tuple[Accelerator, ...]:
    """Return every accelerator of the catalogue, in the order of the files."""
    return tuple(_accelerator_index()[0].entries.values())


def nodes() -> tuple[Node, ...]:
    """Return every kind of node of the catalogue."""
    return tuple(_node_index().entries.values())


def find_accelerator(name: str) -> Accelerator:
    """Return the accelerator of that name, or raise an InputError that helps to choose one.

    >>> find_accelerator("a100_80g").name
    'A100-SXM-80GB'
    >>> find_accelerator("A10")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    hardware_profiles.errors.InputError: A10: no such accelerator. Did you mean ...
    """
    return match_accelerator(name).entry


def match_accelerator(name: str) -> Match[Accelerator]:
    """Return the accelerator of that name with the convention that chose it."""
    index = _accelerator_index()[0]
    if found := index.matches.get(normalised(name)):
        return found
    if choices := _sharing(name, index.entries):
        raise InputError(_choice(name, "accelerators", choices))
    raise InputError(unknown(name, "accelerator", index.entries))


def match_node(name: str) -> Match[Node] | None:
    """Return the kind of node of that name; None if it names none, an error if several."""
    index = _node_index()
    if found := index.matches.get(normalised(name)):
        return found
    if normalised(name) in _accelerator_index()[0].matches:
        return None
    if choices := _sharing(name, index.entries):
        raise InputError(_choice(name, "kinds of nodes", choices))
    return None


def usual_node(accelerator: Accelerator) -> Node | None:
    """Return the kind of node in which an accelerator of the catalogue usually comes."""
    name = _accelerator_index()[1].get(accelerator.name)
    return None if name is None else _node_index().entries[name]


def link_latency(link: str) -> Figure:
    """Return the seconds of one message over a link, by the longest key that its name begins with.

    >>> link_latency("NVLink3").value, link_latency("InfiniBand HDR").value
    (3.4e-06, 1.4e-05)
    """
    known = _latencies()
    fitting = [key for key in known if link.lower().startswith(key.lower())]
    return known[max(fitting, key=len, default="other")]


def unknown(name: str, what: str, known: Iterable[str]) -> str:
    """Return the message for a name that nothing in the catalogue has."""
    names = list(known)
    families = dict.fromkeys(entry.split("-")[0] for entry in names)
    hint = did_you_mean(name, [*families, *names]) or "`shardplan hardware` lists them."
    shown = name or repr(name)
    return f"{shown}: no such {what}. {hint} Figures of another one go into a TOML file"


def _sharing(name: str, entries: Iterable[str]) -> list[str]:
    """Return the entries whose name begins with all of ``name``, at a break between words."""
    words = name.lower().replace("_", "-").replace(" ", "-").strip("-").split("-")
    return [entry for entry in entries if entry.lower().split("-")[: len(words)] == words]


def _choice(name: str, what: str, choices: list[str]) -> str:
    if len(choices) == 1:
        return f"{name} leaves something open: write {choices[0]}"
    return f"{name} names several {what}: {', '.join(choices)}. Choose one"


# --- reading the files ---


@lru_cache(maxsize=1)
def _accelerator_index() -> tuple[_Index[Accelerator], dict[str, str]]:
    """Return the index and, by name, the kind of node in which each one usually comes."""
    index: _Index[Accelerator] = _Index()
    usual: dict[str, str] = {}
    for table in _tables("accelerators", "accelerator"):
        accelerator = accelerator_from_table(table, extra=("node", "assumed_aliases"))
        index.add(accelerator, table.sub("assumed_aliases", {}).values, table.where)
        usual[accelerator.name] = table.text("node")
    return index, usual


@lru_cache(maxsize=1)
def _node_index() -> _Index[Node]:
    index: _Index[Node] = _Index()
    for table in _tables("nodes", "node"):
        index.add(_node_from_table(table), table.sub("assumed_aliases", {}).values, table.where)
    return index


@lru_cache(maxsize=1)
def _latencies() -> dict[str, Figure]:
    table = Fields(read_toml(FOLDER / "latencies.toml", "latencies"), "latencies.toml").sub("link")
    return {link: figure(table, link) for link in table.values}


@lru_cache(maxsize=1)
def _sources() -> dict[str, str]:
    return dict(read_toml(FOLDER / "sources.toml", "sources")["sources"])


def _tables(folder: str, key: str) -> list[Fields]:
    """Return the tables ``[[key]]`` of every file of a folder."""
    return [
        Fields(values, f"{path.name}: {values.get('name')}")
        for path in sorted((FOLDER / folder).glob("*.toml"))
        for values in read_toml(path, "part of the catalogue")[key]
    ]


def figure(
    table: Fields, key: str, *, cited: Callable[[str], str] | None = None, high: float = 1e30
) -> Figure:
    """Read ``key = { value, kind, source, note }``."""
    entry = table.sub(key)
    entry.refuse_unknown(("value", "kind", "source", "note"))
    return Figure(
        entry.number("value", low=1e-12, high=high),
        entry.text("kind", choices=KINDS),
        _cited(entry, cited or _catalogue_source),
    )


def _optional(
    table: Fields, key: str, cited: Callable[[str], str] | None, *, high: float = 1e30
) -> Figure | None:
    return figure(table, key, cited=cited, high=high) if key in table else None


def _cited(entry: Fields, cited: Callable[[str], str]) -> str:
    note = entry.text("note", None)
    source = cited(entry.text("source"))
    return source if note is None else f"{source} ({note})"


def _catalogue_source(key: str) -> str:
    return _sources()[key]


def _rates(table: Fields, key: str, cited: Callable[[str], str] | None) -> dict[str, Figure]:
    """Read ``key = [{ bf16 = …, fp16 = …, kind, source, note }, …]``: rates by precision."""
    rates: dict[str, Figure] = {}
    for group in table.items(key, ()):
        if not isinstance(group, Mapping):
            raise table.wrong(key, group, "a list of tables with precisions, kind and source")
        entry = Fields(group, f"{table.where}: {key}")
        entry.refuse_unknown((*PRECISIONS, "kind", "source", "note"))
        kind, source = entry.text("kind", choices=KINDS), _cited(entry, cited or _catalogue_source)
        for precision in PRECISIONS:
            if precision in entry:
                rates[precision] = Figure(entry.number(precision, low=1.0), kind, source)
    return rates


def accelerator_from_table(
    table: Fields, *, extra: tuple[str, ...] = (), cited: Callable[[str], str] | None = None
) -> Accelerator:
    """Read a table ``[[accelerator]]``; ``cited`` turns a source's key into words."""
    table.refuse_unknown((*Accelerator.__slots__, *extra))
    peak = _rates(table, "peak_flops", cited)
    if not peak:
        raise InputError(f"{table.where}: peak_flops is missing")
    return Accelerator(
        name=table.text("name"),
        device=table.text("device", choices=DEVICES),
        architecture=table.text("architecture"),
        memory_capacity=figure(table, "memory_capacity", cited=cited),
        memory_bandwidth=figure(table, "memory_bandwidth", cited=cited),
        peak_flops=peak,
        achievable_flops=_rates(table, "achievable_flops", cited),
        link=table.text("link"),
        link_bandwidth=figure(table, "link_bandwidth", cited=cited),
        link_share=_optional(table, "link_share", cited, high=1.0),
        usable_memory=_optional(table, "usable_memory", cited),
        host_bandwidth=_optional(table, "host_bandwidth", cited),
        power=_optional(table, "power", cited),
        price=_optional(table, "price", cited),
        compute_units=_optional(table, "compute_units", cited),
        kernel_launch=_optional(table, "kernel_launch", cited),
        aliases=tuple(table.items("aliases", ())),
    )


def _node_from_table(table: Fields) -> Node:
    """Read a table ``[[node]]``; ``network_bandwidth`` there is that of a whole server."""
    table.refuse_unknown((*Node.__slots__, "assumed_aliases"))
    gpus_per_node = table.integer("gpus_per_node", low=1)
    whole = figure(table, "network_bandwidth")
    return Node(
        name=table.text("name"),
        accelerator=table.text("accelerator"),
        gpus_per_node=gpus_per_node,
        network=table.text("network"),
        network_bandwidth=Figure(whole.value / gpus_per_node, whole.kind, whole.source),
        domain_size=table.integer("domain_size", gpus_per_node, low=1),
        nodes=table.integer("nodes", 1, low=1),
        link=table.text("link", None),
        link_bandwidth=_optional(table, "link_bandwidth", None),
        peer_bandwidth=_optional(table, "peer_bandwidth", None),
        host_memory=_optional(table, "host_memory", None),
        nvme=_optional(table, "nvme", None),
        host_links=table.integer("host_links", 0, low=0),
        aliases=tuple(table.items("aliases", ())),
    )
