"""Reserved and live memory, of steps replayed by torch's caching allocator.

``python -m benchmarks.memory_truth.allocator`` traces the steps of the bundled executor on fake
tensors (``executor.verify.rehearsal``) and replays their requests, with and without expandable
segments.

    live        largest bytes of tensors
    transient   the part of them that a step frees: all but weights and optimizer states
    reserved    largest bytes of segments on a device of unlimited memory
    needed      smallest device limit under which the steps succeed

It prints reserved and needed bytes as shares of the live bytes, and what they are above the live
bytes as shares of the transient bytes. Steps that shard nothing are replayed on one stream: the
bundled executor gathers on a second one there, too, which a trainer of replicas does not have.
Medians (reserved) and upper quartiles (needed) of these shares are the constants of
``cost_models.memory.allocator``. "First stream" is what is reserved above every stream's own peak,
as a share of the first stream's transient bytes. Steps of several lengths stand for ragged batches.

    --measured FOLDER  instead: replays of what ``python -m benchmarks.gpu`` measured, and what
                   torch reserved, and their shares of the first stream's transient bytes
    --published    instead: errors of published runs by kind of measurement, and of the nvidia-smi
                   figures in the notes of runs that report live memory
    --only TEXT    cases whose line has this text; several: any of them
    --json         one JSON document

Left out: memory inside kernels, cuBLAS workspaces, the CUDA context, NCCL.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

import planner
from benchmarks.gpu.plans import file_of, plans
from benchmarks.memory_truth.cases import read
from cost_models.memory.allocator import shown_bytes
from cost_models.memory.ledger import first
from cost_models.memory.outside_torch import outside_bytes
from cost_models.plan.plan import PlanTable
from cost_models.pricing.estimate import price, reserved_free_bytes
from executor.counters.allocator_replay import AllocatorEvent, least_limit, replay
from executor.counters.caching_allocator import MIB, AllocatorSettings
from executor.verify.rehearsal import allocator_events
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.errors import RunError
from planner.assessment.verdict import budget_bytes
from planner.validation.measurement import measured_memory
from planner.validation.rows.case import case_of
from planner.validation.rows.runs_file import read_runs

CASES: Final = (
    "llama-3-8b:8 s512 fp32",
    "llama-3-8b:4 s2048 b2 fp32",
    "llama-3-8b:4 s2048 b2 fp32 m2",
    "llama-3-8b:8 s2048 b4 fp32 full",
    "gpt2-xl:6 s1024 b4 fp32",
    "llama-3-8b:4 s2048 b2",
    "llama-3-8b:6 s2048 b1",
    "llama-3-8b:6 s2048 b4",
    "llama-3-8b:6 s2048 b4 full",
    "gpt2-xl:8 s1024 b1",
    "gpt2-xl:8 s1024 b4",
    "gpt2-xl:8 s1024 b4 full",
    "qwen2.5-1.5b:10 s2048 b1",
    "qwen2.5-1.5b:10 s2048 b4",
    "qwen2.5-1.5b:10 s2048 b4 full",
    "llama-3-8b:4 s2048 b2 m2 sgd",
    "llama-3-8b:4 s8192 dp8 zero2 m4",
    "llama-3-8b:8 s8192 dp8 zero3",
    "llama-3-8b:8 s4096 dp8 zero3 selective_ops",
    "llama-3-8b:16 s8192 dp64 zero3 b2 full",
    "llama-3-8b:8 s4096 dp64 zero3 m4",
    "mixtral-8x7b:2 s4096 dp8 zero3",
    "mixtral-8x7b:2 s4096 dp8 ep8 zero1",
    "llama-3-8b:8 s2048 b4 lora16",
    "llama-3-8b:8 s2048 b4 qlora16 full",
    "llama-3-8b:8 s8192 tp4 sp dp2 zero1",
    "llama-3-8b:16 s8192 tp2 pp4 m8",
)
RAGGED: Final = (
    "llama-3-8b:4 s2048 b2 fp32",
    "llama-3-8b:8 s2048 b4 fp32 full",
    "llama-3-8b:4 s2048 b2",
    "llama-3-8b:4 s8192 dp64 zero3",
    "llama-3-8b:8 s8192 dp64 zero3 b2 full",
    "llama-3-8b:8 s2048 b4 lora16",
)
RAGGED_STEPS: Final = 8
MULTIPLE: Final = 8  # tokens to which a ragged batch is padded
SETTINGS: Final = {
    "default": AllocatorSettings(),
    "expandable": AllocatorSettings(expandable_segments=True),
}
FIGURES: Final = {"reserved": 0.5, "needed": 0.75}  # and the quantile of their shares
TYPICAL: Final = 0.5  # quantile of the share needed as a rule
PUBLISHED: Final = Path(planner.__file__).parent / "validation" / "published_runs.csv"
IN_NOTES: Final = re.compile(r"nvidia-smi memory (\d+) MiB")


def ragged_lengths(seq_len: int) -> list[int]:
    """Return the lengths of some steps, from a quarter of the sequence length to all of it."""
    shares = np.random.default_rng(0).uniform(0.25, 1.0, RAGGED_STEPS)
    return [int(share * seq_len) // MULTIPLE * MULTIPLE for share in shares] + [seq_len]


def transient_bytes(events: Sequence[AllocatorEvent], peak: int) -> int:
    """Return the peak less all tensors that are never released."""
    released = {event.tensor for event in events if event.size is None}
    return peak - sum(event.size or 0 for event in events if event.tensor not in released)


def first_stream_share(events: Sequence[AllocatorEvent], reserved: int) -> float:
    """Return what is reserved above the streams' peaks over the first one's transient bytes.

    >>> events = [AllocatorEvent(0, 8), AllocatorEvent(1, 16, stream=1), AllocatorEvent(1)]
    >>> first_stream_share([*events, AllocatorEvent(2, 4), AllocatorEvent(2)], 30)
    0.5
    """
    peaks: dict[int, int] = {}
    for stream in {event.stream for event in events if event.size is not None}:
        own = {event.tensor for event in events if event.size and event.stream == stream}
        peaks[stream] = replay(event for event in events if event.tensor in own).peak_live
    of_first = [event for event in events if event.stream == 0]
    transient = transient_bytes(of_first, peaks[0])
    return (reserved - sum(peaks.values())) / max(1, transient)


def row_of(line: str, *, ragged: bool) -> dict[str, Any]:
    """Trace and replay the first rank of a case."""
    case = read(line)[0]
    lengths = ragged_lengths(case.file.workload.seq_len) if ragged else ()
    events = allocator_events(case.file, case.rank, lengths)
    shards = case.file.plan.zero_stage >= 1
    if not shards:  # a trainer that does not shard has no stream but the first
        events = [event._replace(stream=0) for event in events]
    live = replay(events).peak_live
    transient = transient_bytes(events, live)
    streams = len({event.stream for event in events})
    row: dict[str, Any] = {"case": line, "ragged": ragged, "streams": streams}
    row |= {"live": live, "transient": transient}
    for name, settings in SETTINGS.items():
        found = {
            "reserved": replay(events, settings).peak_reserved,
            "needed": least_limit(events, settings),
        }
        for figure in FIGURES:
            row[f"{name}_{figure}"] = found[figure]
            row[f"{name}_{figure}_ratio"] = found[figure] / live
            row[f"{name}_{figure}_share"] = (found[figure] - live) / transient
        row[f"{name}_first_stream"] = first_stream_share(events, found["reserved"])
    return row


def show(row: dict[str, Any]) -> None:
    """Print one row."""
    cells = [
        f"{row[f'{name}_{figure}_ratio']:7.3f} {row[f'{name}_{figure}_share']:7.3f}"
        for name in SETTINGS
        for figure in FIGURES
    ]
    kind = "ragged" if row["ragged"] else ""
    gib = 2.0**30
    print(
        f"{row['case']:<44} {kind:<7} {row['live'] / gib:7.2f} {row['transient'] / gib:7.2f}  "
        + "  ".join(cells),
        flush=True,
    )


def quantiles(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the quantile of each figure's shares, by kind of batches, streams and segments."""
    table = pd.DataFrame(rows)
    table["side_streams"] = table.streams > 1
    return [
        {
            "ragged": bool(ragged),
            "side_streams": bool(side),
            "expandable": name == "expandable",
            "cases": len(group),
            **{
                figure: float(group[f"{name}_{figure}_share"].quantile(quantile))
                for figure, quantile in FIGURES.items()
            },
            "typical": float(group[f"{name}_needed_share"].quantile(TYPICAL)),
            "first_stream": float(group[f"{name}_first_stream"].median()),
            **{
                f"{figure}_largest_ratio": float(group[f"{name}_{figure}_ratio"].max())
                for figure in FIGURES
            },
        }
        for (ragged, side), group in table.groupby(["ragged", "side_streams"])
        for name in SETTINGS
    ]


def show_measured(folder: Path) -> int:
    """Print the errors of replays of the eager plans that one GPU measured, and their shares."""
    facts = json.loads((folder / "device.json").read_text(encoding="utf-8"))
    cluster = parse_cluster(f"1x{facts['accelerator']}")
    known = {trained.words: trained for trained in plans()}
    rows = []
    for measured in pd.read_csv(folder / "plans.csv").dropna(subset="reserved").to_dict("records"):
        trained = known[measured["plan"]]
        if trained.compiled:  # its kernels request other tensors
            continue
        try:
            events = allocator_events(file_of(trained, cluster)[1], 0)
        except RunError as failure:  # an update that reads a value
            print(f"{trained.words:<48} {failure}")
            continue
        reserved = replay(events).peak_reserved
        share = first_stream_share(events, reserved)
        error = reserved / measured["reserved"] - 1.0
        streams = len({event.stream for event in events if event.size is not None})
        recomputed = trained.plan.get("recompute") == "full"
        rows.append((streams > 1, recomputed, error, share))
        print(f"{trained.words:<48} replay {error:+7.1%}  first stream {share:6.3f}", flush=True)
    table = pd.DataFrame(rows, columns=["streams", "recomputed", "error", "share"])
    print(f"{len(table)} plans: median {table.error.abs().median():.2%} of what torch reserved")
    for recomputed, group in table[table.streams].groupby("recomputed"):
        words = "full recomputation" if recomputed else "none"
        print(f"several streams, {words}: share {group.share.median():.3f} of {len(group)} plans")
    return 0


def published() -> pd.Series[float]:
    """Return relative errors of published peaks, by kind of measurement."""
    runs = {run.name: run for run in read_runs(PUBLISHED)}
    compared = planner.validate(what="memory").rows
    compared = compared[compared.memory_error.notna() & ~compared.partial]
    errors = []
    for name, error in zip(compared.row_id, compared.memory_error, strict=True):
        run = runs[name]
        measured = measured_memory(run)
        errors.append(("device" if measured is None else measured.kind, float(error)))
        noted = IN_NOTES.search(run.notes or "")
        if noted is not None:
            errors.append(("device, in notes", device_bytes(run) / (int(noted[1]) * MIB) - 1.0))
    kinds, values = zip(*errors, strict=True)
    return pd.Series(values, index=pd.Index(kinds, name="kind"))


def device_bytes(run: Any) -> float:
    """Return what nvidia-smi is predicted to show of a published run."""
    case = case_of(run)
    scenario, table = case.scenario, PlanTable.from_plans([case.plan])
    outside = outside_bytes(scenario.software, scenario.cluster, table)
    priced, budget = price(scenario, table), budget_bytes(scenario.cluster)
    sizes = outside, scenario.software, table, budget
    free = reserved_free_bytes(scenario, case.plan, int(priced.limiting_rank[0]))
    return first(shown_bytes("device", priced.memory, *sizes, free=free))


def show_published() -> int:
    """Print the errors of published peaks, kind by kind."""
    for kind, errors in published().groupby("kind"):
        size = 100.0 * errors.abs()
        print(
            f"{kind:<18} {len(errors):4d} runs: median {size.median():5.2f} %, 90th percentile "
            f"{size.quantile(0.9):5.2f} %, bias {100.0 * errors.mean():+6.2f} %"
        )
    return 0


def main(arguments_list: Sequence[str] | None = None) -> int:
    """Trace, replay and print the cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", metavar="TEXT")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--measured", type=Path, metavar="FOLDER")
    arguments = parser.parse_args(arguments_list)
    if arguments.measured is not None:
        return show_measured(arguments.measured)
    if arguments.published:
        return show_published()
    cases = [(line, False) for line in CASES] + [(line, True) for line in RAGGED]
    if arguments.only:
        cases = [case for case in cases if any(text in case[0] for text in arguments.only)]
    if not arguments.json:
        print(f"{'':<52} {'GiB':>7} {'':>7}  {'default':<32}  expandable")
        heads = "  ".join(f"{figure:>7}   share" for _ in SETTINGS for figure in FIGURES)
        print(f"{'':<52} {'live':>7} transient {heads}")
    rows = []
    for line, ragged in cases:
        rows.append(row_of(line, ragged=ragged))
        if not arguments.json:
            show(rows[-1])
    found = quantiles(rows)
    if arguments.json:
        print(json.dumps({"schema_version": 1, "rows": rows, "quantiles": found}, indent=1))
        return 0
    print("\nmedian (reserved) and upper quartile (needed) of the shares, and the largest ratio:")
    for group in found:
        batches = "ragged" if group["ragged"] else "uniform"
        segments = "expandable" if group["expandable"] else "default"
        streams = "side streams" if group["side_streams"] else "one stream"
        print(
            f"  {batches:<8} {streams:<13} {segments:<11} reserved {group['reserved']:6.3f} "
            f"({group['reserved_largest_ratio']:.2f})  needed {group['needed']:6.3f} "
            f"({group['needed_largest_ratio']:.2f}), median {group['typical']:6.3f}  "
            f"first stream {group['first_stream']:6.3f}  "
            f"{group['cases']} cases"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
