"""The rows of the ledger against the storages of a traced step, at every part of the step.

A storage belongs to a row by its origin: its category, the module and the operator that made it,
the collective that used it. Rows whose storages no trace tells apart are compared as one. Storages
that belong to no row of their moment are counted as unattributed.

Units: bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from benchmarks.memory_truth.cases import Case
from cost_models.memory.ledger import MOMENTS, Item, first
from cost_models.memory.peak import rank_ledger, rank_timeline
from cost_models.partition.plan_stages import pipeline_rank
from cost_models.partition.rank_view import RankView
from cost_models.plan.plan import PlanTable
from cost_models.pricing.prediction import scenario_of
from executor.counters.allocations import Allocation
from executor.verify.rehearsal import EMBEDDING, HEAD, LAYERS, LOSS, allocations

# parts of a step that the tracer tells apart, and their events in the ledger
EVENTS: Final[Mapping[str, Sequence[str]]] = {
    "loss_forward": MOMENTS[:1],
    "loss_backward": MOMENTS[1:3],  # of the loss and of the head
    LAYERS: MOMENTS[3:6],
    EMBEDDING: MOMENTS[6:7],
    "optimizer": MOMENTS[7:],
}
UNATTRIBUTED: Final = "unattributed"
MASTER, GATHERED = "master or sharded weights", "weights in compute precision, gathered"
GRADIENTS, STATES, FROZEN = "gradients", "optimizer states", "frozen base"
FRESH, REDUCED, LEFT_OVER = (
    "fresh weight gradients",
    "gradients while they are reduced",
    "left over from a reduction",
)
LAYERS_ROW, HEADS, LOGITS = "layers: saved, running, done", "the head's inputs", "logits"
TABLES = "rotary tables, masks"
MESSAGES, IDS, UPDATE = "messages", "token ids and labels", "temporary tensors of the update"
PROJECTION, UNPACKED = "backward pass of the head", "dequantised matrix"
# rows that are compared as one, by the beginnings of their names
JOINED: Final[Mapping[str, Sequence[str]]] = {
    MASTER: ("master weights", "sharded"),
    GATHERED: ("weights in compute precision", "gathered", "secondary copy"),
    FROZEN: ("frozen",),
    FRESH: ("fresh", "gradient of the tied table", "sum of a tied table"),
    REDUCED: ("gradients while", "reduced experts", "rearranged experts", "late weight gradients"),
    LEFT_OVER: (LEFT_OVER,),
    LAYERS_ROW: (
        "saved by layers",
        "layers whose",
        "backward pass of a layer",
        "one stage's layers",
        "layers in transfer",
        "operands of pending",
        "gradient of position biases",
        "kept for all layers",
    ),
    HEADS: (HEADS, "the inputs of finished heads"),
    PROJECTION: ("backward pass of the", "gradient of the head's input"),
    MESSAGES: (MESSAGES,),
}
PASSING: Final = ("c10d::send", "c10d::recv_")
EMBEDDING_OUTPUTS: Final = ("aten::embedding", "aten::add", "aten::native_dropout")
REDUCING: Final = ("c10d::_reduce_scatter_base_", "c10d::allreduce_")
# operators that make a gradient that outlives its backward pass
MAKING: Final = ("aten::empty", "aten::new_empty_strided", "aten::_to_copy", "aten::mm")
ORIGINS: Final = 8  # shown of a row that is off
OFF_PERCENT: Final = 0.1  # of the event's bytes, above which a row is listed as off
MIB: Final = 2.0**20


class ComparedRow(NamedTuple):
    """A row of the ledger, or several, and the storages that belong to it."""

    name: str
    predicted: float
    traced: int
    storages: Sequence[Allocation]

    @property
    def off(self) -> float:
        """Predicted less traced bytes."""
        return self.predicted - self.traced


class ComparedEvent(NamedTuple):
    """The rows of one part of a step."""

    event: str
    moment: str  # the ledger's
    rows: Sequence[ComparedRow]  # largest first

    @property
    def traced(self) -> int:
        """Traced bytes."""
        return sum(row.traced for row in self.rows)

    @property
    def predicted(self) -> float:
        """Predicted bytes."""
        return sum(row.predicted for row in self.rows)

    @property
    def off(self) -> Sequence[ComparedRow]:
        """Rows that are off by more than ``OFF_PERCENT`` of the event's bytes."""
        return [row for row in self.rows if abs(row.off) > OFF_PERCENT / 100.0 * self.traced]

    @property
    def unattributed(self) -> Sequence[Allocation]:
        """Storages that belong to no row."""
        return next((row.storages for row in self.rows if row.name == UNATTRIBUTED), ())

    def lines(self, *, every: bool) -> Iterator[str]:
        """Yield lines of text: all rows, or those that are off; the origins of these."""
        error = 100.0 * (self.predicted / self.traced - 1.0)
        yield (
            f"    {self.event} ({self.moment}): {_sizes(self.predicted, self.traced)} MiB, "
            f"{error:+.2f} %; {len(self.off)} of {len(self.rows)} rows off; unattributed: "
            f"{sum(each.storages for each in self.unattributed)} storages, "
            f"{sum(each.bytes for each in self.unattributed) / MIB:.3f} MiB"
        )
        for row in self.rows if every else self.off:
            yield f"      {row.name:<40} {_sizes(row.predicted, row.traced)}"
            if row in self.off:
                yield from (f"        {_origin(each)}" for each in row.storages[:ORIGINS])

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        rows = [
            {**row._asdict(), "storages": [each._asdict() for each in row.storages]}
            for row in self.rows
        ]
        return {"event": self.event, "moment": self.moment, "rows": rows}


def _sizes(predicted: float, traced: float) -> str:
    return f"{predicted / MIB:11.3f} {traced / MIB:11.3f} {(predicted - traced) / MIB:+10.3f}"


def _origin(storage: Allocation) -> str:
    made = storage.operator or "before the step"
    words = [storage.category, storage.phase, storage.place, made, storage.collective]
    return f"{storage.bytes / MIB:11.3f} x{storage.storages} " + ", ".join(filter(None, words))


def compared_events(case: Case) -> list[ComparedEvent]:
    """Rehearse a case; return the rows of all parts of its step, the largest part first."""
    file, traced = case.file, allocations(case.file, case.rank)
    scenario, table = scenario_of(file), PlanTable.from_plans([file.plan])
    rank = pipeline_rank(scenario, file.plan, file.layer_ranges, case.stage)
    view = RankView(scenario, table, rank)
    ledger, line = rank_ledger(view), rank_timeline(view)
    sizes = dict(zip(MOMENTS, (first(parts.allocated) for parts in line), strict=True))
    found = []
    for event, storages in traced.items():
        moment = max(EVENTS[event], key=lambda name: sizes[name])
        leaves = ledger.leaves(MOMENTS.index(moment))
        found.append(ComparedEvent(event, moment, compared_rows(leaves, storages)))
    return sorted(found, key=lambda each: -each.traced)


def compared_rows(leaves: Sequence[Item], storages: Sequence[Allocation]) -> list[ComparedRow]:
    """Return the rows of a moment, each with its storages; largest first."""
    predicted: dict[str, float] = {}
    for leaf in leaves:
        name = row_name(leaf)
        predicted[name] = predicted.get(name, 0.0) + first(leaf.size)
    belonging: dict[str, list[Allocation]] = {name: [] for name in predicted}
    for storage in storages:
        names = [name for name in possible_rows(storage) if name in predicted]
        belonging.setdefault(names[0] if names else UNATTRIBUTED, []).append(storage)
    rows = [
        ComparedRow(name, predicted.get(name, 0.0), sum(each.bytes for each in mine), mine)
        for name, mine in belonging.items()
    ]
    return sorted(rows, key=lambda row: -max(row.predicted, row.traced))


def row_name(leaf: Item) -> str:
    """Return the name under which a row of the ledger is compared."""
    if leaf.part == "logits":
        return LOGITS
    if leaf.part == "optimizer":
        return STATES
    for name, beginnings in JOINED.items():
        if leaf.name.startswith(tuple(beginnings)):
            return name
    return GRADIENTS if leaf.part == "gradients" else leaf.name


def possible_rows(storage: Allocation) -> Sequence[str]:
    """Return the rows to one of which a storage belongs: the first that its moment has."""
    place = storage.place.partition(" of micro-batch ")[0]
    if storage.category == "weights":
        return (FROZEN,) if storage.frozen else (MASTER, GATHERED)
    if storage.category == "optimizer":
        return (STATES,)
    if storage.category == "logits":
        return (LOGITS,)
    if storage.category == "other":
        return (IDS,)
    # FSDP2's copy for a reduction, and its result (in one process no collective reads them)
    copied = storage.phase == "backward" and storage.operator == "aten::empty"
    copied = copied and not storage.collective
    if not storage.named and (storage.collective in REDUCING or copied):
        return (REDUCED, LEFT_OVER, FRESH, GRADIENTS)
    if storage.category == "gradients" and not storage.named and storage.operator not in MAKING:
        return (LAYERS_ROW, GRADIENTS)  # operands of pending weight gradients outlive the pass
    if storage.category == "gradients":
        return (REDUCED, GRADIENTS, FRESH) if storage.is_new else (GRADIENTS,)
    if storage.category == "buffers" and (storage.named or "allgather" in storage.collective):
        return (GATHERED, MASTER)
    if storage.category == "buffers" and storage.phase == "forward" and not storage.collective:
        return (UNPACKED, GATHERED, MASTER)  # weights that are cast or unpacked
    if storage.category == "buffers" and not storage.collective:
        return (FRESH, REDUCED, GRADIENTS)
    if storage.phase == "optimizer":
        return (UPDATE,)
    if storage.collective in PASSING:
        return (MESSAGES, LAYERS_ROW)
    if place == EMBEDDING and storage.phase == "backward":
        return (REDUCED, FRESH, LAYERS_ROW)
    if place == EMBEDDING and storage.operator not in EMBEDDING_OUTPUTS:
        return (TABLES, LAYERS_ROW)
    if place == HEAD:
        return (HEADS, PROJECTION) if storage.phase == "forward" else (PROJECTION, LAYERS_ROW)
    if place == LOSS:
        return (LOGITS, HEADS) if storage.phase == "forward" else (PROJECTION, LOGITS, HEADS)
    return (LAYERS_ROW,)
