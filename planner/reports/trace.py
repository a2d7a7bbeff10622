"""``trace``: a simulated step, and a measured one, in the Chrome trace format.

https://ui.perfetto.dev and chrome://tracing open the file. One process is one pipeline rank; its
threads are passes and streams; its counters are the device's memory in bytes. The simulation gives
begin and end of a pass; inside it, computation and each kind of exposed communication have their
predicted durations, one after another.

Units: microseconds, as the format demands. Source of the format: "Trace Event Format", the document
linked from https://chromium.googlesource.com/catapult.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import asdict

from cost_models.step_time.parts import TIME_WORDS
from cost_models.units import format_seconds
from hardware_profiles.arguments import names_arguments
from hardware_profiles.fields import write_text_atomically
from hardware_profiles.progress import report as progress
from planner.reports.measured_step import MeasuredStep, read_measured
from planner.reports.reported_plan import Reportable, read_reported
from planner.reports.simulated_step import PipelinePass, RankTimeline, SimulatedStep
from planner.text.answer import Answer, json_text
from planner.text.html_page import table
from planner.text.notebook import headline

if TYPE_CHECKING:
    import pandas as pd

MICRO: Final = 1e6  # units of a trace in a second
MEASURED: Final = 100_000  # process of the run's rank 0
BY_PART: Final = "device memory by part"
TIMES: Final = ("side", "rank", "lane", "kind", "stage", "micro_batch")
Event = dict[str, Any]
PASSES, COMPUTE, COLLECTIVES, DATA, COPIES = range(5)
THREADS: Final = ("passes", "compute", "collectives", "data-parallel collectives", "copies")
WAITS, PHASES = 1, 2
MEASURED_THREADS: Final = ("passes", "waits for other ranks", "phases")
AFTER_DATA: Final = ("forward_backward", "gradients", "optimizer")  # phases, in order
EXPOSED: Final = (
    "tensor_communication",
    "expert_communication",
    "context_communication",
    "pipeline_communication",
)
MOST_PASSES: Final = 40_000  # of all ranks; of more, the first and the last ones are written


@dataclass(frozen=True, slots=True, repr=False)
class Trace(Answer):
    """A trace of one step; ``passes``: of the simulation, and those that are written."""

    name: str
    step_seconds: float
    peak_bytes: float
    passes: tuple[int, int]
    measured: bool
    events: tuple[Event, ...]

    def __str__(self) -> str:
        both = "the simulated and the measured step" if self.measured else "the simulated step"
        text = f"{both} of {self.name}; open it in https://ui.perfetto.dev"
        simulated, written = self.passes
        if written < simulated:
            text += f" (the first and last {written:,} of {simulated:,} passes)"
        return text

    @property
    def timeline(self) -> pd.DataFrame:
        """What lasts, a row each, in seconds: passes, computation, collectives, copies.

        ``side``: simulated or measured; ``rank``: pipeline rank, of a measured step the process;
        ``lane``: passes, or what happens during them; ``kind``: such as forward.
        """
        return timeline_table(self.events)

    @property
    def memory(self) -> pd.DataFrame:
        """Bytes of every part over the simulated step: ``rank``, ``seconds`` and a column each."""
        return memory_table(self.events)

    def notebook_parts(self) -> Iterator[str]:
        """Yield how to open the trace, and how much of it lasts how long."""
        yield headline(self.name, f"{self!s}.")
        found = self.timeline
        found["seconds"] = found.end_seconds - found.begin_seconds
        sums = found.groupby(["side", "lane", "kind"], sort=False).seconds.sum().reset_index()
        rows = [
            (one["side"], one["lane"], one["kind"], format_seconds(one["seconds"]))
            for one in sums.to_dict("records")
        ]
        yield table(rows, ("", "lane", "kind", "all ranks together"))

    def to_dict(self) -> dict[str, Any]:
        """Return the trace file."""
        return {
            "traceEvents": list(self.events),
            "displayTimeUnit": "ms",
            "otherData": {
                "name": self.name,
                "step_seconds": self.step_seconds,
                "peak_bytes": self.peak_bytes,
            },
        }

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the trace; an existing file is kept unless ``force``."""
        write_text_atomically(Path(path), self.file_text(), force=force)

    def file_text(self) -> str:
        """Return the file, one event a line."""
        document = self.to_dict()
        document["traceEvents"] = []
        lines = ",\n".join(json_text(event, indent=None) for event in self.events)
        return json_text(document).replace("[]", f"[\n{lines}\n]", 1) + "\n"


@names_arguments("planner.trace")
def trace(plan: Reportable) -> Trace:
    """Return the trace of the step of a plan.json or an answer, or of a run and its plan."""
    reported = read_reported(plan)
    step = reported.step()
    progress("writing the trace")
    events = list(simulated_events(step))
    measured = None if reported.run is None else read_measured(reported.run.folder)
    if measured is not None:
        events += measured_events(measured)
    number = sum(len(rank.passes) for rank in step.ranks)
    written = sum(len(_written(rank, len(step.ranks))) for rank in step.ranks)
    return Trace(
        name=reported.name,
        step_seconds=step.seconds,
        peak_bytes=reported.assessment.memory.peak_bytes,
        passes=(number, written),
        measured=measured is not None,
        events=tuple(events),
    )


def simulated_events(step: SimulatedStep) -> Iterator[Event]:
    """Yield the events of a simulated step, process by process."""
    several = len(step.ranks) > 1
    for number, rank in enumerate(step.ranks):
        where = f", pipeline rank {number}" if several else ""
        yield from _names(number, f"simulated{where}", THREADS)
        written = _written(rank, len(step.ranks))
        for each in written:
            yield from _pass_events(number, rank, each, virtual=step.plan.virtual_stages)
        if len(written) < len(rank.passes):
            half = len(written) // 2
            begin, end = written[half - 1].end, written[half].start
            words = f"{len(rank.passes) - len(written):,} passes like these"
            yield slice_event(number, PASSES, words, begin, end)
        yield from _data_events(number, rank, step)
        for sample in rank.memory if len(written) == len(rank.passes) else _coarse(rank):
            yield from memory_events(number, sample.seconds, asdict(sample.parts))


def measured_events(step: MeasuredStep) -> Iterator[Event]:
    """Yield the events of a measured step: one process for each rank of the run."""
    for rank in step.ranks:
        process = MEASURED + rank.rank
        name = f"measured, step {step.step}, rank {rank.rank}, pipeline rank {rank.stage}"
        yield from _names(process, name, MEASURED_THREADS)
        for each in rank.passes:
            words = f"{each.kind.replace('_', ' ')} {each.microbatch}"
            about = {"stage": each.stage, "micro_batch": each.microbatch}
            yield slice_event(process, PASSES, words, each.begin, each.end, **about)
        for wait in rank.waits:
            yield slice_event(process, WAITS, wait.operation, wait.begin, wait.end)
        clock = 0.0
        for phase in AFTER_DATA if rank.rank == 0 else ():
            end = clock + step.phases.get(phase, 0.0)
            yield slice_event(process, PHASES, phase.replace("_", " "), clock, end)
            clock = end


def _names(process: int, name: str, threads: Iterable[str]) -> Iterator[Event]:
    """Yield the names of a process and of its threads."""
    common = {"ph": "M", "pid": process}
    yield {**common, "name": "process_name", "args": {"name": name}}
    yield {**common, "name": "process_sort_index", "args": {"sort_index": process}}
    for number, words in enumerate(threads):
        yield {**common, "tid": number, "name": "thread_name", "args": {"name": words}}


def slice_event(
    process: int, thread: int, name: str, begin: float, end: float, **arguments: Any
) -> Event:
    """Return an event that lasts; ``begin`` and ``end`` in seconds."""
    event: Event = {"ph": "X", "pid": process, "tid": thread, "name": name}
    event |= {"ts": MICRO * begin, "dur": MICRO * (end - begin)}
    return event | ({"args": arguments} if arguments else {})


def memory_events(process: int, seconds: float, parts: dict[str, Any]) -> Iterator[Event]:
    """Yield the counters of the memory at one time: the sum, and its parts; in bytes."""
    sizes = {name: float(size) for name, size in parts.items()}
    common = {"ph": "C", "pid": process, "ts": MICRO * seconds}
    yield {**common, "name": "device memory", "args": {"bytes": sum(sizes.values())}}
    yield {**common, "name": BY_PART, "args": sizes}


def _written(rank: RankTimeline, ranks: int) -> tuple[PipelinePass, ...]:
    """Return the passes that are written: all, or the first and the last ones."""
    half = MOST_PASSES // ranks // 2
    if len(rank.passes) <= 2 * half:
        return rank.passes
    return rank.passes[:half] + rank.passes[-half:]


def _coarse(rank: RankTimeline) -> list[Any]:
    """Return the samples of the memory at the moments of the ledger, and the first and last."""
    last = len(rank.memory) - 1
    return [s for n, s in enumerate(rank.memory) if s.moment or n in (0, last)]


def _pass_events(
    process: int, rank: RankTimeline, each: PipelinePass, *, virtual: int
) -> Iterator[Event]:
    """Yield one pass, its computation, its exposed communication and its copies."""
    (kind, stage, microbatch), start, end = each
    words = kind.replace("_", " ")
    about = {"stage": stage, "micro_batch": microbatch}
    yield slice_event(process, PASSES, f"{words} {microbatch}", start, end, **about)
    parts = _exposed(rank, each, virtual)
    again = 0.0
    if kind in ("backward", "backward_input"):
        again = float(rank.seconds.recompute) / virtual * rank.stretch
    clock = start
    if again:
        yield slice_event(process, COMPUTE, TIME_WORDS["recompute"], clock, clock + again)
        clock += again
    stop = end - sum(parts.values())
    yield slice_event(process, COMPUTE, words, clock, stop)
    clock = stop
    for name, lasts in parts.items():
        yield slice_event(process, COLLECTIVES, TIME_WORDS[name], clock, clock + lasts)
        clock += lasts
    clock = start
    for copy in rank.copies:
        if copy.during == kind.partition("_")[0] and kind != "backward_weight":
            stop = min(end, clock + copy.seconds / virtual)
            if stop > clock:
                yield slice_event(process, COPIES, copy.name, clock, stop)
            clock = stop


def _exposed(rank: RankTimeline, each: PipelinePass, virtual: int) -> dict[str, float]:
    """Return the seconds of a pass by kind of exposed communication, as in ``RankSeconds``."""
    if each.action.kind == "backward_weight":
        return {}
    sign = -1.0 if each.action.kind == "forward" else 1.0
    found = {name: 0.5 * float(getattr(rank.seconds, name)) for name in EXPOSED}
    found["tensor_communication"] += 0.5 * sign * float(rank.seconds.tensor_surplus)
    found["context_communication"] += 0.5 * sign * float(rank.seconds.context_surplus)
    return {name: s * rank.stretch / virtual for name, s in found.items() if s > 0.0}


def _data_events(process: int, rank: RankTimeline, step: SimulatedStep) -> Iterator[Event]:
    """Yield data-parallel communication during the passes and after them, and the update."""
    end = rank.passes_end
    if rank.hidden > 0.0:
        begin = max(rank.passes[0].start, end - rank.hidden)
        words = "data-parallel communication, hidden"
        yield slice_event(process, DATA, words, begin, end, seconds=rank.hidden)
    if rank.exposed > 0.0:
        yield slice_event(process, DATA, TIME_WORDS["data_communication"], end, end + rank.exposed)
    begin = step.seconds - rank.optimizer
    yield slice_event(process, COMPUTE, TIME_WORDS["optimizer"], begin, step.seconds)


# --- tables ---


def timeline_table(events: Sequence[Event]) -> pd.DataFrame:
    """Return a row for each event that lasts."""
    import pandas as pd

    lanes = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    rows = []
    for event in events:
        if event["ph"] != "X":
            continue
        measured, about = event["pid"] >= MEASURED, event.get("args", {})
        micro_batch = about.get("micro_batch")
        rows.append(
            (
                "measured" if measured else "simulated",
                event["pid"] - MEASURED * measured,
                lanes[event["pid"], event["tid"]],
                event["name"].removesuffix(f" {micro_batch}"),
                about.get("stage"),
                micro_batch,
                event["ts"] / MICRO,
                (event["ts"] + event["dur"]) / MICRO,
            )
        )
    found = pd.DataFrame(rows, columns=[*TIMES, "begin_seconds", "end_seconds"])
    return found.astype({"stage": "Int64", "micro_batch": "Int64"})


def memory_table(events: Sequence[Event]) -> pd.DataFrame:
    """Return a row for each sample of a rank's memory."""
    import pandas as pd

    rows = [
        {"rank": event["pid"], "seconds": event["ts"] / MICRO, **event["args"]}
        for event in events
        if event["ph"] == "C" and event["name"] == BY_PART
    ]
    return pd.DataFrame(rows)
