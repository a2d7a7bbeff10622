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

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

from msgspec import Meta, Struct

from hardware_profiles.cluster.catalogue import link_latency
from hardware_profiles.cluster.schema import MAX_GPUS, Figure, Kind, Level
from hardware_profiles.errors import InputError
from hardware_profiles.fields import Amount, Line, Positive, wrong_value

if TYPE_CHECKING:
    import networkx as nx

MOST_LEVELS: Final = 16
_Index = Annotated[int, Meta(ge=0, le=MAX_GPUS)]
_Count = Annotated[int, Meta(ge=1, le=MAX_GPUS)]


class LevelTable(Struct, frozen=True, forbid_unknown_fields=True):
    """A table [[level]] of a cluster's TOML file."""

    name: Line
    each: _Count | tuple[_Count, ...] | None = None
    above: tuple[_Index, ...] | None = None
    bandwidth: Positive | tuple[Positive, ...] | None = None
    per_accelerator: Positive | tuple[Positive, ...] | None = None
    latency: Amount | tuple[Amount, ...] | None = None
    source: Line | None = None
    kind: Kind = "assumed"


def levels_of_file(tables: Sequence[LevelTable], num_gpus: int, where: str) -> tuple[Level, ...]:
    """Return the levels of a cluster's TOML file; none where it has no [[level]]."""
    levels: list[Level] = []
    below = num_gpus
    for index, table in enumerate(tables):
        levels.append(_level(table, below, f"{where}: level[{index}]"))
        below = levels[-1].num_switches
    check_levels(levels, num_gpus, where)
    return tuple(levels)


def read_rank_order(order: Sequence[Any] | None, where: str, ranks: int) -> tuple[int, ...] | None:
    """Return the accelerator of each rank; None where no order is given.

    Rank 0, which reports and saves, keeps the first one.
    """
    if order is None:
        return None
    whole = all(type(number) is int for number in order)
    if not whole or sorted(order) != list(range(ranks)) or order[0] != 0:
        allowed = f"every accelerator from 0 to {ranks - 1} once, 0 the first"
        raise wrong_value(where, "rank_order", order, allowed)
    return tuple(order)


def check_levels(levels: Sequence[Level], num_gpus: int, where: str) -> None:
    """Raise an InputError unless levels are a tree above ``num_gpus`` accelerators."""
    if not levels:
        return
    if len(levels) > MOST_LEVELS:
        raise InputError(f"{where}: {len(levels)} levels (at most {MOST_LEVELS})")
    names = [level.name for level in levels]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{where}: two levels have the name {twice!r}")
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
    parent = {below: above for above, below in networkx.bfs_edges(graph, root)}
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


def _level(table: LevelTable, below: int, where: str) -> Level:
    """Return the level of a table; ``below``: the number of its links."""
    if (table.bandwidth is None) == (table.per_accelerator is None):
        raise InputError(
            f"{where}: bandwidth (of a link) or per_accelerator (of each below it) is "
            "needed, one of them"
        )
    if (table.each is None) == (table.above is None):
        raise InputError(f"{where}: each or above is needed, one of them")
    cited = where if table.source is None else table.source

    def figures(given: float | tuple[float, ...]) -> tuple[Figure, ...]:
        values = given if isinstance(given, tuple) else (given,)
        return tuple(Figure(value, table.kind, cited) for value in values)

    shared = table.bandwidth if table.bandwidth is not None else table.per_accelerator
    assert shared is not None
    if table.above is not None:
        check_above(table.above, where)
    return Level(
        name=table.name,
        above=_each(table.each, below, where) if table.above is None else table.above,
        bandwidth=figures(shared),
        latency=(link_latency(table.name),) if table.latency is None else figures(table.latency),
        per_accelerator=table.per_accelerator is not None,
    )


def _each(given: Any, below: int, where: str) -> tuple[int, ...]:
    """Return the switch of each link, from the number of links of one switch or of each."""
    if isinstance(given, int):
        if below % given:
            allowed = f"a divisor of the {below} that lie below, or a list"
            raise wrong_value(where, "each", given, allowed)
        return tuple(index // given for index in range(below))
    if sum(given) != below:
        raise wrong_value(where, "each", given, f"whole numbers above 0 that add up to {below}")
    return tuple(number for number, size in enumerate(given) for _ in range(size))


def check_above(above: Sequence[int], where: str) -> None:
    """Raise an InputError unless the switches of a level are numbered without gaps."""
    if sorted(set(above)) != list(range(max(above, default=0) + 1)):
        raise wrong_value(where, "above", list(above), "switches numbered from 0 without gaps")
