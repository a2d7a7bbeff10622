"""Today's predictions of what a GPU measured, next to those of the day it was measured."""

from __future__ import annotations

import csv
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pandas as pd

from benchmarks.gpu.kernels import predicted_kernel
from benchmarks.gpu.plans import KINDS, file_of, plans, predicted, tiny_plans
from hardware_profiles.cluster.schema import Cluster
from planner import validate

ALIGNED: Final = 8  # elements, a multiple of which a row in memory has
LARGE: Final = 2048.0**3  # products of a matmul that is not mostly launch and setup
COMMON_HEAD: Final = 128


class Compared(NamedTuple):
    """One measured figure; errors of predictions are relative."""

    group: str
    row: str
    error: float  # of today's prediction
    earlier: float | None = None  # of the one recorded with the measurement


def compared(folder: Path, cluster: Cluster) -> Iterator[Compared]:
    """Yield every figure of a folder that has a prediction."""
    readers = {"kernels": _kernels, "plans": _plans, "trainers": _trainers}
    for part, reader in readers.items():
        if (folder / f"{part}.csv").exists():
            yield from reader(folder / f"{part}.csv", cluster)


def report(rows: Sequence[Compared]) -> Iterator[str]:
    """Yield a line for every figure, and a table of all groups."""
    groups = defaultdict[str, list[Compared]](list)
    for row in rows:
        before = "" if row.earlier is None else f"{row.earlier:+8.1%}"
        yield f"{row.group:<44} {row.row:<58} {row.error:+8.1%} {before:>8}"
        groups[row.group].append(row)
    yield f"\n{'':<44} {'rows':>5} {'median':>8} {'bias':>8} {'from':>8} {'to':>8}   worst"
    for name, group in groups.items():
        errors = [row.error for row in group]
        worst = max(group, key=lambda row: abs(row.error))
        yield f"{name:<44} {_figures(errors)}   {worst.row}"
        earlier = [row.earlier for row in group if row.earlier is not None]
        if earlier:
            yield f"{'  when measured':<44} {_figures(earlier)}"


def _figures(errors: Sequence[float]) -> str:
    middle = statistics.median(map(abs, errors))
    figures = (statistics.mean(errors), min(errors), max(errors))
    return f"{len(errors):5d} {middle:8.1%} " + " ".join(f"{figure:+8.1%}" for figure in figures)


def _kernels(path: Path, cluster: Cluster) -> Iterator[Compared]:
    for row in _read(path):
        words = row["op"], row["precision"], row["shape"]
        today = predicted_kernel(cluster.accelerator, *words)
        if today is not None:
            measured, earlier = float(row["seconds"]), float(row["predicted"])
            errors = today / measured - 1.0, earlier / measured - 1.0
            yield Compared(_group(*words), row["shape"], *errors)


def _group(op: str, precision: str, shape: str) -> str:
    """Return the kernels that a row is counted with.

    >>> _group("matmul", "bf16", "m=8192, k=4096, n=50257")
    'bf16 matmul, rows not aligned'
    >>> _group("attention forward", "bf16", "b=2, h=16/16, s=4096, d=256, causal=True")
    'bf16 attention forward, other heads'
    """
    sizes, name = [int(size) for size in re.findall(r"\d+", shape)], f"{precision} {op}".strip()
    if op == "matmul":
        m, k, n = sizes
        if k % ALIGNED or n % ALIGNED:
            return f"{name}, rows not aligned"
        return f"{name}, {'large' if m * k * n >= LARGE else 'small'}"
    if op.startswith("attention"):
        return f"{name}, {f'heads of {COMMON_HEAD}' * (sizes[4] == COMMON_HEAD) or 'other heads'}"
    return name


def _plans(path: Path, cluster: Cluster) -> Iterator[Compared]:
    known = {trained.words: trained for trained in (*plans(), *tiny_plans())}
    rows = [row for row in _read(path) if not row["failed"] and row["plan"] in known]
    found = {row["plan"]: predicted(*file_of(known[row["plan"]], cluster)) for row in rows}
    for kind in ("seconds", *KINDS):
        for row in rows:
            if not row.get(kind):
                continue
            measured, name = float(row[kind]), f"predicted_{kind}"
            errors = found[row["plan"]][name] / measured - 1.0, float(row[name]) / measured - 1.0
            compiled = ", compiled" if known[row["plan"]].compiled else ""
            yield Compared(f"executor: {kind}{compiled}", row["plan"], *errors)


def _trainers(path: Path, _: Cluster) -> Iterator[Compared]:
    rows = validate(path).rows
    names = rows.model + " " + rows.plan.astype(str)
    figures = [("seconds", name, error) for name, error in zip(names, rows.time_error, strict=True)]
    figures += zip(rows.memory_kind, names, rows.memory_error, strict=True)
    for kind, name, error in figures:
        if pd.notna(error):
            yield Compared(f"trainers: {kind}", name, error)


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))
