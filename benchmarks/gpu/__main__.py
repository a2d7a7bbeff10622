"""Measures one GPU against its predictions in under ten minutes: ``python -m benchmarks.gpu``.

Kernels: matmuls of transformers in every precision that the card has, fused attention, copies,
launches, and one matmul over seconds. Plans: some forty that fit on one GPU (families, batches,
recomputation, adapters, optimizers, compiled or not) trained by the executor: seconds of a step,
live tensors, reserved and device memory, and MFU, each with its prediction. Trainers: short runs
of Hugging Face's Trainer and of a plain loop, as a table of runs that ``validate`` prices.
Writes ``kernels.csv``, ``plans.csv``, ``trainers.csv`` and ``device.json`` (card, driver, versions,
date) into a folder.

    --out FOLDER        default: hardware_profiles/cluster/measured/CARD-DATE (--tiny: gpu-measured)
    --accelerator NAME  as in ``shardplan hardware``; default: by the name of the card
    --seconds N         begin nothing after so many seconds (default 540)
    --only PART         kernels, plans or trainers; may be repeated
    --tiny              small sizes on this machine's CPU, which show that all of it works
    --compare FOLDER    measure nothing: errors of today's predictions of what a folder measured
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.child import ChildError, in_child
from benchmarks.gpu.compare import compared, report
from benchmarks.gpu.kernels import kernel_rows
from benchmarks.gpu.plans import KINDS, plans, row_of, tiny_plans
from benchmarks.gpu.trainers import measured, rows_of, runs, tiny_runs
from hardware_profiles.cluster.catalogue import find_accelerator
from hardware_profiles.cluster.local_machine import cpu_cluster
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import InputError
from planner import validate

PARTS = ("kernels", "plans", "trainers")
SHARES = {"kernels": 0.2, "plans": 0.4, "trainers": 0.4}  # of the time
CHILD_SECONDS = 90.0  # of one plan
GIB = 2.0**30
MEASURED = Path(__file__).parents[2] / "hardware_profiles" / "cluster" / "measured"


def device_facts(device: str) -> dict[str, Any]:
    """Return card, driver and versions; runs in a process that may use the GPU."""
    import torch
    import transformers

    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    if device == "cpu":
        return {**facts, "name": "cpu"}
    card = torch.cuda.get_device_properties(0)
    return {
        **facts,
        "name": card.name,
        "memory_bytes": card.total_memory,
        "multiprocessors": card.multi_processor_count,
        "capability": f"{card.major}.{card.minor}",
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }


def _driver() -> str:
    """Return the version of the driver; "" where the system does not tell it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return "" if found is None else found[0]


def accelerator_name(card: str, memory: float) -> str:
    """Return the catalogue's name of a card as torch names it.

    >>> accelerator_name("NVIDIA H100 80GB HBM3", 85e9)
    'H100-SXM-80GB'
    >>> accelerator_name("NVIDIA H200", 150e9), accelerator_name("Tesla T4", 16e9)
    ('H200-SXM-141GB', 'T4')
    >>> accelerator_name("NVIDIA GeForce RTX 4090", 25e9)
    'RTX-4090'
    """
    words = re.sub(r"\b(nvidia|tesla|geforce|quadro)\b", "", card, flags=re.I)
    words = re.sub(r"\bHBM3\b", "SXM", words)  # boards with other memory are named after them
    words = re.sub(r"\b\d+ ?GB\b", "", words).strip()
    tries = ["-".join(f"{words} {size}GB".split()) for size in _sizes(memory)]
    for name in (*tries, "-".join(words.split())):
        try:
            return find_accelerator(name).name
        except InputError:
            continue
    raise InputError(f"{card}: not in the catalogue; name it with --accelerator")


def _sizes(memory: float) -> list[int]:
    """Return the sizes in GB that a card may be named after, the nearest first."""
    gib = memory / GIB
    return sorted(range(round(gib), round(gib * 1.2) + 2), key=lambda size: abs(size - gib * 1.02))


def cluster_of(facts: dict[str, Any], accelerator: str | None) -> Cluster:
    """Return a cluster of the one device."""
    if facts["name"] != "cpu":
        name = accelerator or accelerator_name(facts["name"], facts["memory_bytes"])
        return parse_cluster(f"1x{name}")
    from executor.machine.measure import measure_machine

    return cpu_cluster(measure_machine(1))


def trained_rows(cluster: Cluster, end: float, *, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield the row of every plan that begins in time."""
    import executor.training.trainer  # noqa: F401  imported once here, forked with every plan

    for trained in tiny_plans() if tiny else plans():
        left = end - time.perf_counter()
        if left <= 0.0:
            yield {"plan": trained.words, "failed": "no time was left"}
            continue
        row = row_of(trained, cluster, CHILD_SECONDS)
        print(plan_line(row), flush=True)
        yield row


def trainer_rows(facts: dict[str, Any], end: float, *, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows of every run of a trainer that begins in time."""
    device = "cpu" if tiny else "cuda"
    for number, run in enumerate(tiny_runs() if tiny else runs(), 1):
        if time.perf_counter() > end:
            print(f"{run.name:<70} no time was left")
            continue
        try:
            found = in_child(measured, run, device, timeout=CHILD_SECONDS)
        except ChildError as error:
            print(f"{run.name:<70} {error}", flush=True)
            continue
        sizes = [f"{kind} {found[kind] / GIB:.2f} GiB" for kind in KINDS if kind in found]
        print(f"{run.name:<70} {1e3 * found['seconds']:.1f} ms {' '.join(sizes)}", flush=True)
        yield from rows_of(run, number, facts, found)


def kernel_line(row: dict[str, Any]) -> str:
    """Return a kernel as a line: microseconds, predicted and measured, and the error."""
    found = f"{1e6 * row['seconds']:12,.1f}"
    if row.get("predicted") is None:
        return f"{row['op']:<20} {row.get('precision', ''):<5} {row['shape']:<46} {found}"
    error = row["predicted"] / row["seconds"] - 1.0
    return (
        f"{row['op']:<20} {row.get('precision', ''):<5} {row['shape']:<46} {found} "
        f"{1e6 * row['predicted']:12,.1f} {error:+7.0%}"
    )


def plan_line(row: dict[str, Any]) -> str:
    """Return a plan as a line: milliseconds and GiB, measured and predicted, and the errors."""
    if "failed" in row:
        return f"{row['plan']:<58} {row['failed']}"
    cells = [f"{1e3 * row['seconds']:9.1f}", _beside(row["predicted_seconds"], row["seconds"])]
    for kind in KINDS:
        if kind in row:
            cells.append(f"{row[kind] / GIB:7.2f}")
            cells.append(_beside(row[f"predicted_{kind}"], row[kind]))
    mfu = "" if row.get("mfu") is None else f" MFU {row['mfu']:.1%}"
    return f"{row['plan']:<58} {' '.join(cells)}{mfu}"


def _beside(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1.0:+7.1%}"


def summary(rows: Sequence[dict[str, Any]], names: Iterable[str]) -> Iterator[str]:
    """Yield a line for each quantity: runs, median and largest error, bias."""
    for name in names:
        errors = [
            row[f"predicted_{name}"] / row[name] - 1.0
            for row in rows
            if row.get(name) and row.get(f"predicted_{name}")
        ]
        if errors:
            sizes = sorted(map(abs, errors))
            yield (
                f"{name:<10} {len(errors):3d} plans: median {statistics.median(sizes):.1%}, "
                f"largest {sizes[-1]:.1%}, bias {statistics.mean(errors):+.1%}"
            )


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows with all columns that any of them has."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; return 1 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--accelerator")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--only", action="append", choices=PARTS)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--compare", type=Path, metavar="FOLDER")
    options = parser.parse_args(arguments)
    if options.compare is not None:
        return _compare(options.compare)
    begin, device = time.perf_counter(), "cpu" if options.tiny else "cuda"
    # so that a library that asks whether there is a GPU does not keep forked processes from it
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        facts = in_child(device_facts, device, timeout=60.0)
        cluster = cluster_of(facts, options.accelerator)
    except (ChildError, InputError) as error:
        print(f"benchmarks.gpu: {error}", file=sys.stderr)
        return 1
    facts |= {"date": datetime.date.today().isoformat(), "accelerator": cluster.accelerator.name}
    measured = MEASURED / f"{facts['accelerator']}-{facts['date']}"
    out: Path = options.out or (Path("gpu-measured") if options.tiny else measured)
    out.mkdir(parents=True, exist_ok=True)
    print(json.dumps(facts))
    parts = options.only or list(PARTS)
    whole = sum(SHARES[part] for part in parts)
    ends, passed = {}, 0.0
    for part in parts:
        passed += SHARES[part] / whole
        ends[part] = begin + passed * options.seconds
    if "kernels" in parts:
        _kernels(device, cluster, ends["kernels"], out)
    if "plans" in parts:
        _plans(cluster, ends["plans"], out, tiny=options.tiny)
    if "trainers" in parts:
        _trainers(facts, ends["trainers"], out, tiny=options.tiny)
    facts["seconds"] = round(time.perf_counter() - begin, 1)
    (out / "device.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return 0


def _compare(folder: Path) -> int:
    try:
        facts = json.loads((folder / "device.json").read_text(encoding="utf-8"))
        rows = list(compared(folder, cluster_of(facts, facts["accelerator"])))
    except (OSError, ValueError, KeyError) as error:
        print(f"benchmarks.gpu: no measurements in {folder}: {error!r}", file=sys.stderr)
        return 1
    print("\n".join(report(rows)))
    return 0


def _kernels(device: str, cluster: Cluster, end: float, out: Path) -> None:
    seconds = end - time.perf_counter()
    try:
        kernels = in_child(
            kernel_rows, device, cluster.accelerator, seconds, timeout=seconds + CHILD_SECONDS
        )
    except ChildError as error:
        kernels = []
        print(f"kernels: {error}", file=sys.stderr)
    print(f"{'kernel':<73} {'µs':>12} {'predicted':>12}   error")
    for row in kernels:
        print(kernel_line(row))
    write_csv(out / "kernels.csv", kernels)


def _plans(cluster: Cluster, end: float, out: Path, *, tiny: bool) -> None:
    names = "ms, live, reserved, device memory in GiB, each with the error of its prediction"
    print(f"\n{'plan':<58} {names}")
    rows: list[dict[str, Any]] = []
    for row in trained_rows(cluster, end, tiny=tiny):
        rows.append(row)
        write_csv(out / "plans.csv", rows)
    for line in summary(rows, ("seconds", *KINDS)):
        print(line)


def _trainers(facts: dict[str, Any], end: float, out: Path, *, tiny: bool) -> None:
    print()
    rows: list[dict[str, Any]] = []
    for row in trainer_rows(facts, end, tiny=tiny):
        rows.append(row)
        write_csv(out / "trainers.csv", rows)
    if rows:
        print(validate(out / "trainers.csv"))


if __name__ == "__main__":
    sys.exit(main())
