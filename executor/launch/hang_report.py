"""Which rank is missing when nothing moves any more, from what every rank noted last.

A rank that waits needs the ranks that have not entered the same collective, or not sent the
message, yet. Following who waits for whom ends at a rank that does not wait: it is the one that
failed. If it ends in a circle, the ranks do not take part in the same collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

HANG: Final = "hang: "  # how every line about one begins
Order = tuple[int, int]  # step, and how many crumbs of one kind in it


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank noted last; travels as JSON."""

    rank: int
    step: int  # 0: before the first
    doing: str | None  # the pass of a micro-batch
    where: str  # in which line of the program the rank is
    waits: bool  # for a collective to end
    last: str | None  # axis of the last collective that was entered
    last_kind: str | None
    entered: Mapping[str, int]  # collectives of this step by axis
    members: Mapping[str, Sequence[int]]  # ranks of this rank's group of every axis
    sent: Mapping[str, int]  # messages of this step by the rank they are for
    awaited: Mapping[str, int]  # and by the rank they come from
    left_out: Mapping[str, int]  # by axis: what an earlier step had and a later one did not
    left_out_of: int  # that later step

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @property
    def collective(self) -> str:
        """Name the last collective."""
        if self.last is None:
            return "the setup" if self.step == 0 else f"step {self.step}"
        return f"{self.last_kind} ({self.last}) of {self._when}"

    @property
    def _when(self) -> str:
        step = f"step {self.step}" if self.step else "the setup"
        return f"{step}, {self.doing}" if self.doing else step


def explain(reports: Iterable[Report], processes: Sequence[str], seconds: float) -> str:
    """Return one line: which rank is missing where.

    ``processes``: for every rank, how to find its process.
    """
    known = {report.rank: report for report in reports}
    silent = [rank for rank in range(len(processes)) if rank not in known]
    waited = f"for {seconds:.0f} s"
    if silent:
        names = ", ".join(f"{rank} ({processes[rank]})" for rank in silent)
        waiting = _most(known.values())
        where = f" in {waiting.collective}" if waiting else ""
        return (
            f"{HANG}no answer from rank {names}: stopped, or its machine is gone; the others "
            f"waited{where} {waited}"
        )
    needs = {rank: _needs(report, known) for rank, report in known.items()}
    idle = [rank for rank in known if not known[rank].waits]
    missing = [rank for rank in idle if any(rank in found for found in needs.values())] or idle
    if missing:
        rank = min(missing, key=lambda rank: _order(known[rank]))
        waiting = next((known[r] for r in known if rank in needs[r]), None)
        if waiting is None:
            return f"{HANG}rank {rank} did not get on {waited}; it is {_state(known[rank])}"
        many = [str(r) for r in known if known[r].waits]
        return (
            f"{HANG}rank {rank} is missing in {waiting.collective}, where rank {', '.join(many)} "
            f"waited {waited}; it is {_state(known[rank])}"
        )
    if any(needs.values()):
        return _disagreement(known, waited)
    return (
        f"{HANG}every rank entered {known[0].collective} and none came out of it {waited}: the "
        "network, or a device, does not answer"
    )


def _needs(report: Report, known: Mapping[int, Report]) -> set[int]:
    """Return the ranks that a waiting rank waits for."""
    if not report.waits:
        return set()
    found = {
        member
        for axis, count in report.entered.items()
        for member in report.members[axis]
        if _count(known[member], axis) < (report.step, count)
    }
    for peer, count in report.awaited.items():
        sent = known[int(peer)].sent.get(str(report.rank), 0)
        if (known[int(peer)].step, sent) < (report.step, count):
            found.add(int(peer))
    return found


def _count(report: Report, axis: str) -> Order:
    return report.step, report.entered.get(axis, 0)


def _order(report: Report) -> tuple[int, int]:
    """Return how far a rank came."""
    return report.step, sum(report.entered.values())


def _most(reports: Iterable[Report]) -> Report | None:
    """Return a rank that waits, the one that came furthest."""
    return max((r for r in reports if r.waits), key=_order, default=None)


def _state(report: Report) -> str:
    after = f", after {report.collective}" if report.last else ""
    return f"in {report.where}{after}"


def _disagreement(known: Mapping[int, Report], waited: str) -> str:
    """Name who left a collective out, where every rank waits, but not in the same one."""
    stuck = min(report.step for report in known.values())
    suspects = [r for r in known.values() if r.left_out and r.left_out_of >= stuck]
    if not suspects or len(suspects) == len(known):  # then the steps just differ
        each = "; ".join(f"rank {r} is in {known[r].collective}" for r in known)
        return f"{HANG}the ranks do not enter the same collectives ({waited}): {each}"
    guilty = suspects[0]
    (axis, *_) = guilty.left_out
    others = [r for r in known.values() if r.rank != guilty.rank]
    waiting = min((r for r in others if r.last == axis), key=_order, default=others[0])
    return (
        f"{HANG}rank {guilty.rank} left out {waiting.collective}, where the others waited "
        f"{waited}; it went on to {guilty.collective}"
    )
