"""An irregular tree of links: from a cluster's TOML file, from plan.json, from a networkx graph.

In a file, one table a level, the innermost first; the last level is one switch above everything:

    [[level]]
    name = "PCIe switch"
    each = 2                  # of what lies below, below one switch; [3, 5]: of each switch
    bandwidth = 25e9          # bytes/s one way of a link to what lies below; a list: of each link
    latency = 5e-6            # seconds a message; default: as links of such a name have

``above`` in the place of ``each`` lists the switch of each of what lies below, where neighbours do
not share one. ``per_accelerator`` in the place of ``bandwidth``: a link has so much for each
accelerator below it (network cards of their own), which no single one can exceed. ``source`` and
``kind`` say where the figures come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from hardware_profiles.cluster.catalogue import link_latency
from hardware_profiles.cluster.schema import KINDS, MAX_GPUS, Figure, Level
from hardware_profiles.errors import InputError
from hardware_profiles.fields import Fields

if TYPE_CHECKING:
    import networkx as nx

_KEYS: Final = (
    "name",
    "each",
    "above",
    "bandwidth",
    "per_accelerator",
    "latency",
    "source",
    "kind",
)
MOST_LEVELS: Final = 16
SMALLEST: Final = 1e-12


def levels_of_file(source: Fields, num_gpus: int) -> tuple[Level, ...]:
    """Return the levels of a cluster's TOML file; none where it has no [[level]]."""
    tables = source.items("level", ())
    for key in ("link", "network") if tables else ():
        if key in source:
            raise InputError(f"{source.where}: [{key}] and [[level]]: the levels are all links")
    levels: list[Level] = []
    below = num_gpus
    for index, table in enumerate(tables):
        where = f"{source.where}: level[{index}]"
        if not isinstance(table, Mapping):
            raise source.wrong("level", table, "tables [[level]]")
        levels.append(_level(Fields(table, where), below))
        below = levels[-1].num_switches
    check_levels(levels, num_gpus, source.where)
    return tuple(levels)


def levels_of_fields(source: Fields, num_gpus: int, figure: Callable[..., Figure]) -> Any:
    """Read what plan.json holds of the levels; ``figure`` reads one of a mapping."""
    levels = []
    for index, values in enumerate(source.items("levels", ())):
        where = f"{source.where}: levels[{index}]"
        if not isinstance(values, Mapping):
            raise source.wrong("levels", values, "a list of objects with keys")
        fields = Fields(values, where)
        fields.refuse_unknown(Level.__slots__)

        def figures(key: str, fields: Fields = fields, **low: float) -> tuple[Figure, ...]:
            entries = enumerate(fields.items(key))
            named = {f"{key}[{number}]": entry for number, entry in entries}
            return tuple(figure(Fields(named, fields.where), name, **low) for name in named)

        level = Level(
            name=fields.text("name"),
            above=_above(fields),
            bandwidth=figures("bandwidth"),
            latency=figures("latency", low=0.0),
            per_accelerator=fields.flag("per_accelerator", False),
        )
        levels.append(level)
    check_levels(levels, num_gpus, source.where)
    return tuple(levels)


def read_rank_order(source: Fields, ranks: int) -> tuple[int, ...] | None:
    """Return the accelerator of each rank, where it is said.

    Rank 0, which reports and saves, keeps the first one.
    """
    if "rank_order" not in source:
        return None
    order = source.items("rank_order")
    whole = all(type(number) is int for number in order)
    if not whole or sorted(order) != list(range(ranks)) or order[0] != 0:
        allowed = f"every accelerator from 0 to {ranks - 1} once, 0 the first"
        raise source.wrong("rank_order", order, allowed)
    return tuple(order)


def check_levels(levels: Sequence[Level], num_gpus: int, where: str) -> None:
    """Raise an InputError unless levels are a tree above so many accelerators."""
    if not levels:
        return
    if len(levels) > MOST_LEVELS:
        raise InputError(f"{where}: {len(levels)} levels (at most {MOST_LEVELS})")
    names = [level.name for level in levels]
    if len(set(names)) < len(names):
        raise InputError(f"{where}: two levels have the name {_twice(names)!r}")
    below, what = num_gpus, "accelerators"
    for level in levels:
        if len(level.above) != below:
            raise InputError(
                f"{where}: level {level.name}: {len(level.above)} links, but {below} {what} lie "
                "below (must be as many)"
            )
        for key in ("bandwidth", "latency"):
            count = len(getattr(level, key))
            if count not in (1, below):
                raise InputError(
                    f"{where}: level {level.name}: {key} has {count} figures (must be one, or one "
                    f"for each of the {below} links)"
                )
        below, what = level.num_switches, f"switches of level {level.name}"
    if below != 1:
        raise InputError(
            f"{where}: the last level, {names[-1]}, has {below} switches (must be one, above "
            "everything)"
        )


def levels_of_graph(graph: nx.Graph[Any]) -> tuple[Level, ...]:
    """Return the levels of a networkx tree whose leaves are ``("accelerator", rank)``.

    Edges hold ``bandwidth`` (bytes/s one way) and may hold ``latency`` (seconds). The root is the
    centre of the switches. Where branches are of unequal depth, a link reaches over several levels.

    >>> import networkx
    >>> star = networkx.star_graph(["switch", ("accelerator", 0), ("accelerator", 1)])
    >>> networkx.set_edge_attributes(star, 25e9, "bandwidth")
    >>> [level.above for level in levels_of_graph(star)]
    [(0, 0)]
    """
    import networkx

    leaves = sorted(node for node in graph if isinstance(node, tuple) and node[0] == "accelerator")
    inner = [node for node in graph if node not in set(leaves)]
    numbered = [node[1] for node in leaves] == list(range(len(leaves)))
    ends = all(graph.degree[leaf] == 1 for leaf in leaves)
    if not inner or not numbered or not ends or not networkx.is_tree(graph):
        raise InputError(
            "a graph of links must be a tree of switches above the leaves ('accelerator', 0), "
            "('accelerator', 1) and so on"
        )
    switches = graph.subgraph(inner)
    if not networkx.is_connected(switches) or any(graph.degree[node] == 1 for node in inner):
        raise InputError("a graph of links: every switch needs something below it")
    root = networkx.center(switches)[0]
    parent = dict(networkx.bfs_predecessors(graph, root))
    height = dict.fromkeys(graph, 0)
    for node in reversed(list(parent)):  # from the leaves up
        height[parent[node]] = max(height[parent[node]], height[node] + 1)
    levels, lower = [], list(leaves)
    for above in range(1, height[root] + 1):
        uppers = [parent[n] if height[parent[n]] == above else n for n in lower]
        numbers = {upper: number for number, upper in enumerate(dict.fromkeys(uppers))}
        edges = [graph.edges[node, parent[node]] for node in lower]
        levels.append(
            Level(
                f"level {above}",
                tuple(numbers[upper] for upper in uppers),
                tuple(_given(float(edge["bandwidth"])) for edge in edges),
                tuple(_given(float(edge.get("latency", 0.0))) for edge in edges),
            )
        )
        lower = list(numbers)
    check_levels(levels, len(leaves), "a graph of links")
    return tuple(levels)


def _given(value: float) -> Figure:
    return Figure(value, "assumed", "the graph")


def _level(source: Fields, below: int) -> Level:
    """Read one table; ``below``: how many links it has."""
    source.refuse_unknown(_KEYS)
    name = source.text("name")
    shared, each = "bandwidth" in source, "per_accelerator" in source
    if shared == each:
        raise InputError(
            f"{source.where}: bandwidth (of a link) or per_accelerator (of each below it) is "
            "needed, one of them"
        )
    if ("each" in source) == ("above" in source):
        raise InputError(f"{source.where}: each or above is needed, one of them")
    latency = _figures(source, "latency", 0.0) if "latency" in source else (link_latency(name),)
    return Level(
        name=name,
        above=_above(source) if "above" in source else _each(source, below),
        bandwidth=_figures(source, "bandwidth" if shared else "per_accelerator", SMALLEST),
        latency=latency,
        per_accelerator=each,
    )


def _each(source: Fields, below: int) -> tuple[int, ...]:
    """Return the switch of each of what lies below, from how many share one."""
    given = source.values["each"]
    if not isinstance(given, list):
        size = source.integer("each", low=1, high=MAX_GPUS)
        if below % size:
            raise source.wrong("each", size, f"a divisor of the {below} that lie below, or a list")
        return tuple(index // size for index in range(below))
    sizes = _whole_numbers(source, "each")
    if sum(sizes) != below or min(sizes, default=0) < 1:
        raise source.wrong("each", given, f"whole numbers above 0 that add up to {below}")
    return tuple(number for number, size in enumerate(sizes) for _ in range(size))


def _above(source: Fields) -> tuple[int, ...]:
    above = _whole_numbers(source, "above")
    if sorted(set(above)) != list(range(max(above) + 1)):
        raise source.wrong("above", list(above), "switches numbered from 0 without gaps")
    return above


def _whole_numbers(source: Fields, key: str) -> tuple[int, ...]:
    values = source.items(key)
    if not values or not all(type(value) is int and 0 <= value < MAX_GPUS for value in values):
        raise source.wrong(key, values, "a list of whole numbers")
    return tuple(values)


def _figures(source: Fields, key: str, low: float) -> tuple[Figure, ...]:
    given = source.values[key]
    entries = given if isinstance(given, list) else [given]
    kind = source.text("kind", "assumed", choices=KINDS)
    cited = source.text("source", source.where)
    named = Fields(
        {f"{key}[{n}]" if len(entries) > 1 else key: v for n, v in enumerate(entries)}, source.where
    )
    return tuple(Figure(named.number(name, low=low), kind, cited) for name in named.values)


def _twice(names: Sequence[str]) -> str:
    return next(name for name in names if names.count(name) > 1)
