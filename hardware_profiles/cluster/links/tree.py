"""Bandwidth and latency of groups of ranks on a tree of any shape, for ranks in any order.

``groups.group_link`` is a closed form for equal domains and ranks in the accelerators' order. Here
every group is placed on the tree, so a domain may contain any number of accelerators, a link may be
slower than the sum of those below it (an oversubscribed uplink), and ranks may be in any order
(``Cluster.rank_order``: grid rank r runs on accelerator rank_order[r]).

A collective runs as a ring that enters and leaves every subtree once, as libraries find it in the
topology. All groups of an axis communicate at the same time and share the links that they have in
common:

    ring on a link       bandwidth / rings that leave through it; if a link consists of lanes, at
                         most one lane for each member below it
    group                the slowest link on its ring
    axis                 the slowest group

An exchange of all with all (``exchange_links``) takes (n - 1)/n B / W. A rank's data for the n - m
members of its group outside a domain leave it, over one lane where a link consists of lanes:

    W on a link          bandwidth (n - 1) / sum of (n - m) over the ranks below;
                         at most lane (n - 1) / (n - m)
    axis                 the slowest link of each level

Messages to pipeline neighbours (``neighbour_link``) follow the grid's order, all at once, each over
one lane at most; half of a rank's go to the next rank, half to the previous one. Both ends of a
link are counted in one direction: links are full duplex. Leaves out: graphs with cycles, in-network
reduction, trees of NCCL.

With the order ANY_ORDER the links are no slower than in any order of the ranks (``_best_link``,
``_best_exchange``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from hardware_profiles.cluster.schema import Cluster, Figure, Level, Tier

Whole = NDArray[np.intp]
Floats = NDArray[np.float64]
INNERMOST: Final = 0
ANY_ORDER: Final[tuple[int, ...]] = ()  # a rank order whose links bound those of all orders
SPARSE: Final = 32  # with more counters per member, sorting is faster


class GroupLink(NamedTuple):
    """Bandwidth and latency of the slowest group of an axis."""

    bandwidth: float  # bytes/s one way per rank
    latency: float  # seconds of a message over the slowest level crossed
    hop: float  # mean seconds of a message over the ring's hops
    level: int  # the outermost level in use by some group


class ExchangeLinks(NamedTuple):
    """What an exchange of all members of every group has on each level of a tree.

    Shape (levels,), or (placements, levels).
    """

    bandwidth: Floats  # W in bytes/s of the slowest link; infinite where no data leave a domain
    members: Whole  # fewest of a group in one domain below the level


class Tree(Struct, frozen=True):
    """A cluster's links as arrays; ``N`` accelerators."""

    places: tuple[
        Whole, ...
    ]  # by level (N,): the child of the level's links above each accelerator
    bandwidth: tuple[Floats, ...]  # by level: bytes/s of each link
    lane: tuple[Floats | None, ...]  # by level: bytes/s of one lane of each link; None: shared
    latency: tuple[Floats, ...]  # by level: seconds of each link
    position: Whole  # (N,) position of each accelerator in depth-first order
    above: tuple[tuple[int, ...], ...]  # by level: the switch above each link
    peer_bandwidth: float | None = None  # of the innermost level, see Tier
    peer_latency: float | None = None


def is_regular(cluster: Cluster) -> bool:
    """Whether the closed forms apply: equal domains with neighbouring ranks in each of them.

    That is the accelerators' order, or one in which equal accelerators or domains change places.
    """
    order = cluster.rank_order
    if cluster.levels or order is None:
        return not cluster.levels
    return _keeps_domains(order, tuple(tier.domain_size for tier in cluster.tiers))


def tree_of(cluster: Cluster) -> Tree:
    """Return the links of a cluster, regular or not."""
    return _tree_of(cluster.levels, cluster.tiers, cluster.num_gpus)


def ring_link(cluster: Cluster, size: int, stride: int, world_size: int) -> GroupLink:
    """Return bandwidth and latency of a ring over the slowest group (formulas: module docstring).

    Groups are those of ``groups.group_link``: ``size`` ranks with a ``stride`` between them.
    """
    return _link(_key(cluster), size, stride, world_size, ring=True)


def neighbour_link(cluster: Cluster, size: int, stride: int, world_size: int) -> GroupLink:
    """Return the links of the slowest rank to the next and the previous one (last to first).

    The bandwidth is the harmonic mean of both: half of a rank's messages go either way.
    """
    return _link(_key(cluster), size, stride, world_size, ring=False)


def exchange_links(cluster: Cluster, size: int, stride: int) -> ExchangeLinks:
    """Return what an exchange has on each level (formulas: module docstring); groups as above."""
    return _exchange(_key(cluster), size, stride)


def groups_of(order: Sequence[int] | Whole, size: int, stride: int) -> Whole:
    """Return the accelerators of every group, one a row, in grid order.

    ``order``: accelerators by rank; several orders may be stacked along leading axes.

    >>> groups_of([0, 2, 1, 3], 2, 1).tolist()
    [[0, 2], [1, 3]]
    >>> groups_of(range(8), 2, 2).tolist()
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    ranks = np.asarray(order, dtype=np.intp)
    blocks = ranks.shape[-1] // (size * stride)
    grid = ranks[..., : blocks * size * stride].reshape(*ranks.shape[:-1], blocks, size, stride)
    return np.swapaxes(grid, -1, -2).reshape(*ranks.shape[:-1], -1, size)


def links_of_groups(tree: Tree, groups: Whole, *, ring: bool) -> tuple[Floats, Floats, Floats, int]:
    """Return the slowest group's links in each of several placements, all groups active at once.

    ``groups``: accelerators, shape (placements, groups, members). Returns bandwidth, latency and
    mean hop latency, shape (placements,), and the outermost level in use. ``ring``: members in
    depth-first order of the tree; otherwise in the order of their row.
    """
    many, count, size = groups.shape
    inner = float(np.min(tree.latency[INNERMOST]))
    if size == 1 or count == 0:
        alone = float(np.min(tree.bandwidth[INNERMOST]))
        if not ring and tree.peer_bandwidth is not None:
            alone = tree.peer_bandwidth
        return np.full(many, alone), np.full(many, inner), np.full(many, inner), INNERMOST
    if ring:
        walked = np.argsort(tree.position[groups], axis=-1, kind="stable")
        groups = np.take_along_axis(groups, walked, axis=-1)
    following = np.roll(groups, -1, axis=-1)
    placement = np.arange(many)[:, None, None]
    bandwidth, latency = np.full(groups.shape, np.inf), np.zeros(groups.shape)
    level = INNERMOST
    for number, place in enumerate(tree.places):
        here = place[groups]
        crosses = here != place[following]
        if not crosses.any():
            break  # a group inside one domain is inside all enclosing domains
        level = number
        first = placement * len(tree.bandwidth[number])
        links, left = (here + first)[crosses], here[crosses]
        leaving = np.bincount(links)
        share = tree.bandwidth[number][left] / leaving[links]
        lane = tree.lane[number]
        if lane is not None:
            alone = not ring or number == INNERMOST  # a message uses one lane
            lanes = 1 if alone else _members(here)[crosses]
            share = np.minimum(share, lane[left] * lanes)
        if not ring:  # as many enter a domain as leave it
            there = place[following]
            right = there[crosses]
            far = tree.bandwidth[number][right] / leaving[(there + first)[crosses]]
            share = np.minimum(share, far if lane is None else np.minimum(far, lane[right]))
        if number == INNERMOST and tree.peer_bandwidth is not None:
            share = _to_peers(tree, groups, share, ring=ring)
        bandwidth[crosses] = np.minimum(bandwidth[crosses], share)
        over = tree.latency[number]
        slower = np.maximum(over[here], over[place[following]])
        if number == INNERMOST and not ring and tree.peer_latency is not None:
            slower = np.full(groups.shape, tree.peer_latency)
        latency = np.where(crosses, np.maximum(latency, slower), latency)
    if not ring:  # half of a rank's messages go to the next rank, half to the previous one
        before = np.roll(bandwidth, 1, axis=-1)
        bandwidth = bandwidth * (2.0 * before / (bandwidth + before))
    slowest = bandwidth.min(axis=(1, 2))
    return slowest, latency.max(axis=(1, 2)), latency.mean(axis=-1).max(axis=1), level


def exchanges_of_groups(tree: Tree, groups: Whole) -> ExchangeLinks:
    """Return what an exchange has in each of several placements, all groups active at once.

    ``groups``: accelerators, shape (placements, groups, members).
    """
    many, _, size = groups.shape
    placement = np.arange(many)[:, None, None]
    widths, fewest = [], []
    for number, place in enumerate(tree.places):
        here = place[groups]
        members = _members(here)
        others = size - members
        links = here + placement * len(tree.bandwidth[number])
        leaving = np.bincount(links.ravel(), weights=others.ravel())[links]
        crosses = others > 0
        share = tree.bandwidth[number][here] * (size - 1.0) / np.where(crosses, leaving, 1.0)
        lane = tree.lane[number]
        if lane is not None:
            share = np.minimum(share, lane[here] * (size - 1.0) / np.maximum(1, others))
        if number == INNERMOST and tree.peer_bandwidth is not None:
            share = _to_peers(tree, groups, share.ravel(), ring=True).reshape(share.shape)
        widths.append(np.where(crosses, share, np.inf).min(axis=(1, 2)))
        fewest.append(members.min(axis=(1, 2)))
    return ExchangeLinks(np.stack(widths, axis=-1), np.stack(fewest, axis=-1))


def _members(here: Whole) -> Whole:
    """Return the number of members of the same group in each member's domain."""
    rows, places = math.prod(here.shape[:2]), int(here.max()) + 1
    keys = np.arange(rows).reshape(*here.shape[:2], 1) * places + here
    found: Whole
    if rows * places <= SPARSE * here.size:
        found = np.bincount(keys.ravel())[keys]
    else:
        _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
        found = counts[inverse.reshape(here.shape)]
    return found


def _to_peers(tree: Tree, groups: Whole, share: Floats, *, ring: bool) -> Floats:
    """Limit by the links of a full mesh: to one peer, or to the other members of a domain."""
    assert tree.peer_bandwidth is not None
    if not ring:  # messages that leave the domain are limited by the levels above only
        return np.full(share.shape, tree.peer_bandwidth)
    domain = tree.places[1][groups] if len(tree.places) > 1 else np.zeros_like(groups)
    others = (_members(domain) - 1).ravel()
    return np.where(others > 0, np.minimum(share, others * tree.peer_bandwidth), share)


def _best_link(tree: Tree, size: int, *, ring: bool) -> GroupLink:
    """Return bounds on the links of groups of ``size`` ranks, over all orders of the ranks.

    A link with N accelerators below it is crossed by q >= 1 groups of n unless n divides N. These
    have N mod n + (q - 1) n of their members below it, each at most n - 1, and the fewest of one
    group are at most 1/q of them; two of its n hops cross the link. Groups of 1 (not all
    accelerators are in groups) cross none.
    """
    inner = tree.latency[INNERMOST].min()
    bandwidth, latency, hop = float(tree.bandwidth[INNERMOST].max()), float(inner), float(inner)
    fastest = bandwidth if tree.peer_bandwidth is None else tree.peer_bandwidth
    outermost = INNERMOST
    groups = len(tree.position) // size
    for number, place in enumerate(tree.places):
        below = np.bincount(place)
        crossed = below % size > 0
        if not crossed.any():
            continue
        outermost = number
        members, width = below[crossed], tree.bandwidth[number][crossed]
        lane = tree.lane[number]
        if lane is not None:
            lanes = lane[crossed]
            if ring and number != INNERMOST:
                rest = members % size
                best = np.zeros(len(members))
                for q in range(1, min(groups, size - int(rest.min())) + 1):
                    inside = rest + (q - 1) * size
                    share = np.minimum(width / q, lanes * (inside // q))
                    best = np.maximum(best, np.where((inside <= members), share, 0.0))
                width = best
            else:
                width = np.minimum(width, lanes)
        late = float(tree.latency[number][crossed].max())
        slowest = float(width.min())
        if not ring:  # the other side of a rank may be inside
            slowest = 2.0 / (1.0 / slowest + 1.0 / max(fastest, slowest))
        bandwidth, latency = min(bandwidth, slowest), max(latency, late)
        hop = max(hop, float((2.0 * late + (size - 2) * inner) / size))
    return GroupLink(bandwidth, latency, hop, outermost)


def _best_exchange(tree: Tree, size: int) -> ExchangeLinks:
    """Return bounds on the links of an exchange of ``size`` ranks, over all orders of the ranks.

    Below a link as in ``_best_link``, with r = N mod n, q groups that cross it lack n - r members
    together; the sum of m (n - m) is least with q = 1, and the fewest members of one are at most
    n - (n - r)/q.
    """
    widths, fewest = [], []
    for number, place in enumerate(tree.places):
        below = np.bincount(place)
        rest = below % size
        crossed = rest > 0
        members, rest = below[crossed], rest[crossed]
        lacking = size - rest
        most = size + -lacking // np.minimum(lacking, members // size + 1)
        width = tree.bandwidth[number][crossed] * (size - 1.0) / (rest * lacking)
        lane = tree.lane[number]
        if lane is not None:
            width = np.minimum(width, lane[crossed] * (size - 1.0) / (size - most))
        widths.append(np.min(width, initial=np.inf))
        fewest.append(np.min(most, initial=size))
    return ExchangeLinks(np.array(widths), np.array(fewest))


# --- trees from levels, levels from tiers, and back ---


def accelerators_below(levels: Sequence[Level], num_gpus: int) -> list[Whole]:
    """Return, by level, the number of accelerators below each of its links.

    >>> pairs = Level("PCIe", (0, 0, 0, 1), (Figure(1.0, "assumed", ""),), ())
    >>> [below.tolist() for below in accelerators_below([pairs, replace(pairs, above=(0, 0))], 4)]
    [[1, 1, 1, 1], [3, 1]]
    """
    below = [np.ones(num_gpus, dtype=np.intp)]
    for level in levels[:-1]:
        weights = np.bincount(level.above, weights=below[-1], minlength=level.num_switches)
        below.append(weights.astype(np.intp))
    return below


def tiers_of_levels(levels: Sequence[Level], num_gpus: int) -> tuple[Tier, ...]:
    """Return equal domains that are nowhere faster than a tree: those of its smallest switches."""
    tiers: list[Tier] = []
    below = accelerators_below(levels, num_gpus)
    slowest: Figure | None = None
    latest: Figure | None = None
    for number, level in enumerate(levels):
        lanes = 1 if level.per_accelerator else below[number]
        values = np.broadcast_to([f.value for f in level.bandwidth], len(level.above)) / lanes
        where = int(np.argmin(values))
        figure = level.bandwidth[where if len(level.bandwidth) > 1 else 0]
        figure = replace(figure, value=float(values[where]))
        late = max(level.latency, key=lambda one: one.value)
        slowest = figure if slowest is None or figure.value < slowest.value else slowest
        latest = late if latest is None or late.value > latest.value else latest
        last = number == len(levels) - 1
        domain = num_gpus if last else int(below[number + 1].min())
        grows = domain > (tiers[-1].domain_size if tiers else 1)
        if last or (grows and domain < num_gpus):
            tiers.append(Tier(level.name, domain, slowest, latest))
            slowest = latest = None
    return tuple(tiers)


def part_of_levels(levels: Sequence[Level], accelerators: int) -> tuple[Level, ...]:
    """Return the tree above the first accelerators only."""
    kept: Whole = np.arange(accelerators)
    found = []
    for level in levels:
        switches, above = np.unique(np.array(level.above)[kept], return_inverse=True)
        found.append(
            replace(
                level,
                above=tuple(above.tolist()),
                bandwidth=_of(level.bandwidth, kept),
                latency=_of(level.latency, kept),
            )
        )
        kept = switches
        if len(switches) == 1:
            break
    return tuple(found)


def _of(figures: tuple[Figure, ...], kept: Whole) -> tuple[Figure, ...]:
    return figures if len(figures) == 1 else tuple(figures[i] for i in kept.tolist())


def levels_in_nodes(cluster: Cluster) -> list[bool]:
    """Return which levels are inside nodes: the innermost, and those no wider than a node."""
    below = accelerators_below(cluster.levels, cluster.num_gpus)  # the root's, too
    widest = [
        np.bincount(level.above, weights=below[number]).max()
        for number, level in enumerate(cluster.levels)
    ]
    return [n == 0 or bool(most <= cluster.gpus_per_node) for n, most in enumerate(widest)]


def with_network_share(cluster: Cluster, share: float) -> Cluster:
    """Return the cluster with a share of the bandwidths of all links but those inside nodes."""
    inner, *outer = cluster.tiers
    tiers = [
        replace(tier, bandwidth=replace(tier.bandwidth, value=share * tier.bandwidth.value))
        for tier in outer
    ]
    levels = [
        level if in_node else with_bandwidths(level, share)
        for level, in_node in zip(cluster.levels, levels_in_nodes(cluster), strict=True)
    ]
    return replace(cluster, tiers=(inner, *tiers), levels=tuple(levels))


def with_bandwidths(level: Level, factor: float) -> Level:
    """Return a level with all bandwidths multiplied by a factor."""
    scaled = tuple(replace(figure, value=factor * figure.value) for figure in level.bandwidth)
    return replace(level, bandwidth=scaled)


def levels_of_tiers(tiers: Sequence[Tier], num_gpus: int) -> tuple[Level, ...]:
    """Return the tree of equal domains."""
    below, levels = 1, []
    for tier in tiers:
        count = -(-num_gpus // below)
        above = tuple(index * below // tier.domain_size for index in range(count))
        levels.append(Level(tier.name, above, (tier.bandwidth,), (tier.latency,), True))
        below = tier.domain_size
    return tuple(levels)


# --- cached: a search needs few distinct links, many times ---

_Key = tuple[tuple[Level, ...], tuple[Tier, ...], int, tuple[int, ...] | None]


def _key(cluster: Cluster) -> _Key:
    return cluster.levels, cluster.tiers, cluster.num_gpus, cluster.rank_order


@lru_cache(maxsize=256)
def _keeps_domains(order: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether all ranks of every domain are on the accelerators of one domain."""
    pairs = [{(rank // n, place // n) for rank, place in enumerate(order)} for n in sizes]
    return bool(order) and all(
        len(found) == -(-len(order) // n) for found, n in zip(pairs, sizes, strict=True)
    )


@lru_cache(maxsize=4096)
def _link(key: _Key, size: int, stride: int, world_size: int, *, ring: bool) -> GroupLink:
    *links, num_gpus, order = key
    tree = _tree_of(*links, num_gpus)
    if order == ANY_ORDER and size > 1:
        in_groups = world_size - world_size % (size * stride) == num_gpus
        return _best_link(tree, size if in_groups else 1, ring=ring)
    ranks = order[:world_size] if order else range(world_size)
    groups = groups_of(ranks, size, stride)[None]
    bandwidth, latency, hop, level = links_of_groups(tree, groups, ring=ring)
    return GroupLink(float(bandwidth[0]), float(latency[0]), float(hop[0]), level)


@lru_cache(maxsize=4096)
def _exchange(key: _Key, size: int, stride: int) -> ExchangeLinks:
    *links, num_gpus, order = key
    tree = _tree_of(*links, num_gpus)
    groups = groups_of(order or range(num_gpus), size, stride)[None]
    bound = order == ANY_ORDER
    if size == 1 or not groups.size or (bound and groups.size < num_gpus):
        alone = np.full(len(tree.places), np.inf)
        alone[INNERMOST] = np.max(tree.bandwidth[INNERMOST])
        return ExchangeLinks(alone, np.full(len(alone), size))
    if bound:
        return _best_exchange(tree, size)
    bandwidth, members = exchanges_of_groups(tree, groups)
    return ExchangeLinks(bandwidth[0], members[0])


@lru_cache(maxsize=64)
def _tree_of(given: tuple[Level, ...], tiers: tuple[Tier, ...], num_gpus: int) -> Tree:
    levels = given or levels_of_tiers(tiers, num_gpus)
    place: Whole = np.arange(num_gpus)
    places, latencies = [], []
    bandwidths: list[Floats] = []
    lanes: list[Floats | None] = []
    for level, below in zip(levels, accelerators_below(levels, num_gpus), strict=True):
        places.append(place)
        width = np.broadcast_to([f.value for f in level.bandwidth], len(level.above)).astype(float)
        lanes.append(width if level.per_accelerator else None)
        bandwidths.append(width * below if level.per_accelerator else width)
        late = np.broadcast_to([f.value for f in level.latency], len(level.above))
        latencies.append(late.astype(float))
        place = np.array(level.above, dtype=np.intp)[place]
    position = np.empty(num_gpus, dtype=np.intp)
    position[np.lexsort(places)] = np.arange(num_gpus)
    inner = None if given else tiers[0]
    peer = None if inner is None else inner.peer_bandwidth
    peer_latency = None if inner is None else inner.peer_latency
    return Tree(
        places=tuple(places),
        bandwidth=tuple(bandwidths),
        lane=tuple(lanes),
        latency=tuple(latencies),
        position=position,
        above=tuple(level.above for level in levels),
        peer_bandwidth=None if peer is None else peer.value,
        peer_latency=None if peer_latency is None else peer_latency.value,
    )
