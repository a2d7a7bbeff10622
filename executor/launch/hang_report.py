"""Hang report: names the missing rank, from the last recorded activity of every rank.

A waiting rank needs the ranks that have not yet entered the same collective or not sent the
message. Following these dependencies ends at a rank that does not wait: the one that failed. If
they form a circle, the ranks do not take part in the same collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from hardware_profiles.record import Record

HANG: Final = "hang: "  # prefix of every message about a hang
Order = tuple[int, int]  # step, and number of calls of one kind in it


class HangReport(Record, frozen=True):
    """Last recorded activity of one rank; travels as JSON."""

    rank: int
    step: int  # 0: before the first
    doing: str | None  # the pass of a micro-batch
    where: str  # current source line of the rank
    waits: bool  # for a collective to end
    last: str | None  # axis of the last collective that was entered
    last_kind: str | None
    entered: Mapping[str, int]  # collectives of this step by axis
    members: Mapping[str, Sequence[int]]  # ranks of this rank's group of every axis
    sent: Mapping[str, int]  # messages of this step by receiving rank
    awaited: Mapping[str, int]  # messages of this step by sending rank
    left_out: Mapping[str, int]  # by axis: calls of an earlier step missing in a later one
    left_out_of: int  # that later step

    @property
    def collective(self) -> str:
        """Description of the last collective."""
        if self.last is None:
            return "the setup" if self.step == 0 else f"step {self.step}"
        return f"{self.last_kind} ({self.last}) of {self._when}"

    @property
    def _when(self) -> str:
        step = f"step {self.step}" if self.step else "the setup"
        return f"{step}, {self.doing}" if self.doing else step


def explain_hang(reports: Iterable[HangReport], processes: Sequence[str], seconds: float) -> str:
    """Return one line that names the missing rank and the collective.

    ``processes``: for every rank, a description of its process.
    """
    known = {report.rank: report for report in reports}
    silent = [rank for rank in range(len(processes)) if rank not in known]
    waited = f"for {seconds:.0f} s"
    if silent:
        names = ", ".join(f"{rank} ({processes[rank]})" for rank in silent)
        furthest = max((r for r in known.values() if r.waits), key=_order, default=None)
        where = f" in {furthest.collective}" if furthest else ""
        return (
            f"{HANG}no answer from rank {names}: stopped, or its machine is down; the others "
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
        f"{HANG}every rank entered {known[0].collective} and none completed it {waited}: the "
        "network, or a device, does not answer"
    )


def _needs(report: HangReport, known: Mapping[int, HangReport]) -> set[int]:
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


def _count(report: HangReport, axis: str) -> Order:
    return report.step, report.entered.get(axis, 0)


def _order(report: HangReport) -> tuple[int, int]:
    """Return the progress of a rank: step and number of collectives."""
    return report.step, sum(report.entered.values())


def _state(report: HangReport) -> str:
    after = f", after {report.collective}" if report.last else ""
    return f"in {report.where}{after}"


def _disagreement(known: Mapping[int, HangReport], waited: str) -> str:
    """Name the rank that left out a collective, where every rank waits in a different one."""
    stuck = min(report.step for report in known.values())
    suspects = [r for r in known.values() if r.left_out and r.left_out_of >= stuck]
    if not suspects or len(suspects) == len(known):  # the ranks are only in different steps
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
