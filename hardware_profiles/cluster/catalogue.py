"""The catalogue: accelerators, kinds of nodes and latencies of links by their names.

Names are matched without regard to case, separators and a vendor's name. A size of memory behind
the name of a card of one size replaces that size (``RTX-4090-48GB``, which has chips of twice the
density on the same bus): bandwidth and rates stay. ``assumed_aliases`` are
names that leave something open (``H100``: board and memory) of which one reading is usual: a name
and the reason, which is given with the answer. A name that several accelerators share and none
declares is an error that lists them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from typing import Final, Generic, TypeVar

from msgspec import Struct

from hardware_profiles.cluster.catalogue_files import (
    Section,
    accelerator_of,
    link_figures,
    node_of,
    reasons_not_priced,
    sections,
)
from hardware_profiles.cluster.schema import Accelerator, Figure, Node
from hardware_profiles.errors import InputError, similar
from hardware_profiles.fields import Line

_VENDORS: Final = re.compile(
    r"^((nvidia|tesla|geforce|quadro|amd|instinct|intel|habana|google|aws|apple(?=m))+"
    r"|(huawei|iluvatar|corex|kunlun(xin)?|metax|moorethreads|cambricon|hygon|dcu|biren|enflame)+"
    r"(?=.*\d))"
)
_SIZE: Final = re.compile(r"[\s_(-]*\b(\d+(?:\.\d+)?) ?GI?B?\)?$", re.IGNORECASE)  # at the end
_REPORTED: Final = 0.1  # of a card's nominal memory, that its driver may keep
# all but what names are compared by and what separates names in a file
_DROPPED: Final = bytes({*range(256)} - {*b'abcdefghijklmnopqrstuvwxyz0123456789."='})

Entry = TypeVar("Entry", Accelerator, Node)


class Match(Struct, Generic[Entry], frozen=True):
    """The entry of a name, and the convention that resolved it."""

    entry: Entry
    note: Line | None = None


class _Index(Struct, Generic[Entry], frozen=True):
    """Entries by every normalised name."""

    entries: dict[str, Entry] = {}
    matches: dict[str, Match[Entry]] = {}

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
    >>> find_accelerator("A11")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    hardware_profiles.errors.InputError: A11: no such accelerator. Did you mean ...
    """
    return match_accelerator(name).entry


def match_accelerator(name: str) -> Match[Accelerator]:
    """Return the accelerator of that name with the convention that chose it."""
    if found := _match(name):
        return found
    index = _accelerator_index()[0]
    if reason := _not_priced().get(re.sub(r"\d+g$", "", normalised(name))):
        raise InputError(f"{name}: {reason}")
    if choices := _sharing(name, index.entries):
        raise InputError(_choice(name, "accelerators", choices))
    raise InputError(unknown(name, "accelerator", index.entries))


def is_accelerator(name: str) -> bool:
    """Return whether the catalogue has an accelerator of that name."""
    return _match(name) is not None


def is_known(name: str) -> bool:
    """Return whether the catalogue has an accelerator of that name, or says why it is not priced.

    >>> is_known("7900XTX"), is_known("8xH100")
    (True, False)
    """
    return is_accelerator(name) or normalised(name) in _not_priced()


def covers_accelerators(name: str) -> bool:
    """Return whether a name, or its first word, is that of accelerators of the catalogue."""
    return is_accelerator(name) or bool(_sharing(name, _accelerator_index()[0].entries))


def accelerators_named(name: str) -> list[Accelerator]:
    """Return the one accelerator of a name, or all that a name without board or memory covers.

    >>> [entry.name for entry in accelerators_named("H100-80GB")]
    ['H100-SXM-80GB', 'H100-PCIe-80GB']
    """
    index = _accelerator_index()[0]
    found = _match(name)
    if found is not None and found.note is None:
        return [found.entry]
    covered = [index.entries[entry] for entry in _sharing(name, index.entries)]
    return covered or [match_accelerator(name).entry]


def match_node(name: str) -> Match[Node] | None:
    """Return the kind of node of that name; None if it names none, an error if several."""
    if found := _node_index(_mentioning("nodes", name)).matches.get(normalised(name)):
        return found
    if is_accelerator(name):
        return None
    if choices := _sharing(name, _node_index().entries):
        raise InputError(_choice(name, "kinds of nodes", choices))
    return None


def usual_node(accelerator: Accelerator) -> Node | None:
    """Return the kind of node in which an accelerator of the catalogue usually comes."""
    for card in (accelerator.name, _SIZE.sub("", accelerator.name)):
        if name := _accelerator_index(_mentioning("accelerators", card))[1].get(card):
            return _node_index(_mentioning("nodes", name)).entries[name]
    return None


def _match(name: str) -> Match[Accelerator] | None:
    index, _ = _accelerator_index(_mentioning("accelerators", name))
    return index.matches.get(normalised(name)) or _with_other_memory(name)


def _with_other_memory(name: str) -> Match[Accelerator] | None:
    """Return the card of a name before a size of memory, with that size.

    >>> found = _with_other_memory("RTX 4090 (48GB)")
    >>> found.entry.name, found.note
    ('RTX-4090-48GB', 'RTX-4090 with 48 GB of memory (24 in the catalogue), its rates unchanged')
    """
    size = _SIZE.search(name)
    card = None if size is None else _match(name[: size.start()])
    if size is None or card is None or _SIZE.search(card.entry.name):
        return None
    memory = 2.0**30 * float(size[1])
    usual, usable = card.entry.memory_capacity, card.entry.usable_memory
    ratio = memory / usual.value
    if abs(ratio - 1.0) < _REPORTED:
        return card
    if not 0.5 <= ratio <= 2.0 * (1.0 + _REPORTED):
        return None
    note = (
        f"{card.entry.name} with {size[1]} GB of memory ({usual.value / 2.0**30:.3g} in the "
        "catalogue), its rates unchanged"
    )
    note = note if card.note is None else f"{card.note}; {note}"
    kept = 0.0 if usable is None else usual.value - usable.value
    entry = replace(
        card.entry,
        name=f"{card.entry.name}-{size[1]}GB",
        memory_capacity=Figure(memory, "assumed", note),
        usable_memory=usable and replace(usable, value=memory - kept),
        aliases=(),
    )
    return Match(entry, note)


def link_latency(link: str) -> Figure:
    """Return the seconds of one message over a link, by the longest key that its name begins with.

    >>> link_latency("NVLink3").value, link_latency("InfiniBand HDR").value
    (3.4e-06, 1.4e-05)
    """
    known = link_figures().latency
    return known[_longest_key(link, known) or "other"]


def link_share(link: str) -> Figure | None:
    """Return the share of a link's rate that large collectives reach; None: as on InfiniBand.

    >>> share = link_share("Ethernet")
    >>> share is not None and share.value, link_share("InfiniBand HDR")
    (0.54, None)
    """
    known = link_figures().share
    key = _longest_key(link, known)
    return None if key is None else known[key]


def _longest_key(link: str, known: Iterable[str]) -> str | None:
    fitting = [key for key in known if link.lower().startswith(key.lower())]
    return max(fitting, key=len, default=None)


def unknown(name: str, what: str, known: Iterable[str]) -> str:
    """Return the message for a name that is not in the catalogue."""
    names = list(known)
    families = dict.fromkeys(entry.split("-")[0] for entry in names)
    part = normalised(name)
    close = [entry for entry in names if len(part) > 2 and part in normalised(entry)][:3] or [
        entry for entry in similar(name, [*families, *names]) if _same_digits(name, entry)
    ]
    hint = f"Did you mean {' or '.join(close)}?" if close else "`shardplan hardware` lists them."
    shown = name or repr(name)
    page = "docs/how-to/clusters.md"
    return f"{shown}: no such {what}. {hint} Describe another one in a TOML file ({page})"


def _same_digits(one: str, other: str) -> bool:
    """Whether the numbers of two names may be the same one, mistyped.

    >>> [_same_digits(*two) for two in (("A10O", "A100"), ("4009", "4090"), ("A11", "A10"))]
    [True, True, True]
    >>> _same_digits("GTX-1080", "V100")
    False
    """
    given, known = (re.findall(r"\d+", name) for name in (one, other))
    return not given or any(
        a in b or b in a or sorted(a) == sorted(b) or _one_apart(a, b) for a in given for b in known
    )


def _one_apart(one: str, other: str) -> bool:
    """Whether two numbers differ in one digit."""
    return len(one) == len(other) and sum(map(str.__ne__, one, other)) == 1


def _sharing(name: str, entries: Iterable[str]) -> list[str]:
    """Return the entries that begin with the first word of a name and have all the others."""
    first, *others = name.lower().replace("_", "-").replace(" ", "-").strip("-").split("-")
    split = {entry: entry.lower().split("-") for entry in entries}
    return [e for e, words in split.items() if words[0] == first and {*others} <= {*words}]


def _choice(name: str, what: str, choices: list[str]) -> str:
    if len(choices) == 1:
        return f"{name} leaves something open: write {choices[0]}"
    listed = ", ".join(choices)
    return f"{name} names several {what}, and none is the usual one: {listed}. Choose one"


@lru_cache(maxsize=1)
def _not_priced() -> dict[str, str]:
    """Return why devices are not priced, by their normalised names."""
    return {normalised(name): reason for name, reason in reasons_not_priced().items()}


@cache
def _accelerator_index(
    some: tuple[Section, ...] | None = None,
) -> tuple[_Index[Accelerator], dict[str, str]]:
    """Return the index and, by name, the kind of node in which each one usually comes.

    ``some``: read alone; None: all.
    """
    index: _Index[Accelerator] = _Index()
    usual: dict[str, str] = {}
    for section in _texts("accelerators") if some is None else some:
        accelerator, table, where = accelerator_of(section)
        index.add(accelerator, table.assumed_aliases, where)
        usual[accelerator.name] = table.node
    return index, usual


@cache
def _node_index(some: tuple[Section, ...] | None = None) -> _Index[Node]:
    index: _Index[Node] = _Index()
    for section in _texts("nodes") if some is None else some:
        node, table, where = node_of(section)
        index.add(node, table.assumed_aliases, where)
    return index


@cache
def _texts(folder: str) -> dict[Section, bytes]:
    """Return the sections of a folder, and the letters of each as ``normalised`` has them."""
    letters = {one: one.text.encode().lower().translate(None, _DROPPED) for one in sections(folder)}
    return {one: re.sub(rb"(?<=\d)gi?b", b"g", each) for one, each in letters.items()}


def _mentioning(folder: str, name: str) -> tuple[Section, ...]:
    """Return the sections of a folder that mention a name: others need not be read for it."""
    wanted = normalised(name).encode()
    return tuple([one for one, letters in _texts(folder).items() if wanted in letters])
