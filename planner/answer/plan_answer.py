"""Answer of ``plan``: its JSON and text, short or with all details."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from cost_models.plan.plan import Plan
from cost_models.scenario import Scenario
from cost_models.step_time.parts import TIME_WORDS
from cost_models.units import format_bytes, format_seconds
from planner.answer.answers import RankedAnswer, header, not_run
from planner.answer.ranked_table import ranked_table, runner_up, shown_rows
from planner.answer.text import (
    bottleneck,
    bottleneck_line,
    head,
    host_lines,
    rates_line,
    short_head,
    short_plan_of,
    time_line,
)
from planner.assessment.assess import Assessment, amounts, assess
from planner.assessment.confidence import confidence, confidence_words
from planner.search.simplicity import CLOSE
from planner.text.assumed import assumed
from planner.text.paragraphs import INDENT, LINES, labelled, labelled_line, width
from planner.text.plan_changes import changes

if TYPE_CHECKING:
    import pandas as pd

    from planner.advice.savings import Saving
    from planner.advice.trainers import BestOfTrainer
    from planner.answer.ranked_plan import RankedPlan
    from planner.refinement.best_partition import StagedPlan
    from planner.refinement.placed_plan import AxisPlace, PlacedPlan
    from planner.request.constraints import Constraint
    from planner.search.search import Counts, SearchResult
    from planner.search.simplicity import Tie


MOST_REASONS: Final = 3  # legality rules that are listed
MOST_RANKS: Final = 16  # ranks of an order that are listed


@dataclass(frozen=True, repr=False)
class PlanAnswer(RankedAnswer):
    """Answer of ``plan``: the ranked plans and the counts of the search.

    What other techniques would save and what other trainers reach needs searches, which run on
    first access.
    """

    scenario: Scenario
    result: SearchResult  # plans with even stages and the default order of ranks
    ranked: tuple[RankedPlan, ...]  # the best, which may have its own stages or order, first
    assumptions: tuple[str, ...]
    fixed: Mapping[str, Any]
    further: tuple[RankedPlan, ...] = ()  # next plans, which fill rows that several plans share
    rows: int | None = None  # of the table; None: as many as a short answer has room for
    require: tuple[Constraint, ...] | None = None  # None: no further techniques are tried
    compares_trainers: bool = False  # where none was named

    @cached_property
    def savings(self) -> tuple[Saving, ...]:
        """Techniques that the search leaves out and that would make the best plan faster."""
        if self.require is None:
            return ()
        from planner.advice.savings import savings

        first = self.result.plans[0]
        even = next((o.assessment for o in self.ranked if not o.is_own and o.plan == first), None)
        even = even or assess(self.scenario, first)
        fastest = self.ranked[0].step.seconds
        return savings(self.scenario, even, self.result, self.fixed, self.require, fastest)

    @cached_property
    def trainers(self) -> tuple[BestOfTrainer, ...]:
        """The best plan of each common trainer, the fastest first."""
        if self.require is None or not self.compares_trainers:
            return ()
        from planner.advice.trainers import best_of_trainers

        return best_of_trainers(self.scenario, self.fixed, self.require)

    @property
    def tie(self) -> Tie | None:
        """Plans that are as fast as the best one, which is the simplest of them."""
        return None if self.ranked[0].is_own else self.result.tie

    @property
    def fastest(self) -> Plan:
        """The plan with the shortest step (of the objective memory: the best plan)."""
        return self.best if self.tie is None else self.tie.fastest

    @property
    def table(self) -> pd.DataFrame:
        """The ranked plans as a DataFrame, one a row, in SI units."""
        import pandas as pd

        return pd.DataFrame([assessment.row() for assessment in self.assessments])

    def candidates(self) -> pd.DataFrame:
        """Return every legal plan with the pinned parts, a row each, in SI units; in seconds.

        Step times are those of the closed form (the search simulates the best), peaks far above the
        budget are lower bounds. Requirements (``require``) are not applied.
        """
        from planner.search.priced_candidates import PricedCandidates, candidates_table

        return candidates_table(PricedCandidates.of(self.scenario, self.fixed))

    def notebook_tables(self) -> Iterator[str]:
        """Yield the ranked plans."""
        from planner.answer import notebook

        yield notebook.plans_table(self.assessments)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        from planner.advice.refusal import search_document

        return {
            **header(self.scenario),
            "plans": [{**one.assessment.to_dict(), **one.own_document()} for one in self.ranked],
            "tie": None if self.tie is None else self.tie.to_dict(),
            "fixed": dict(self.fixed),
            **self.ranked[0].own_document(),
            "savings": [saving.to_dict() for saving in self.savings],
            "trainers": [one.to_dict() for one in self.trainers],
            "search": search_document(self.result.counts),
            "not_run": not_run(self.scenario, self.best),
            "assumptions": list(self.assumptions),
            "confidence": confidence(self.scenario),
        }

    def text(self, *, verbose: bool = False) -> str:
        """Return the text; ``verbose``: with all assumptions, sources and counts."""
        return plan_text(self, verbose=verbose)


def plan_text(answer: PlanAnswer, *, verbose: bool) -> str:
    """Return the answer of ``plan`` as text."""
    scenario, ranked, tie = answer.scenario, answer.ranked, answer.tie
    own, best = ranked[0], ranked[0].assessment
    above = [*head(scenario), ""] if verbose else short_head(scenario)
    if best.verdict == "tight":
        above += labelled("TIGHT", tight_words(scenario, best.plan))
    lines = labelled("Best", short_plan_of(own.scenario, best.plan))
    lines += host_lines(best)
    lines += labelled("Step", time_line(best.time))
    if verbose:
        lines += labelled("", rates_line(best.time))
        lines += labelled("Bottleneck", bottleneck(best))
    else:
        lines += [bottleneck_line(best.time)]
    other = runner_up([one.assessment for one in ranked])
    if tie is not None and tie.plans > 1 and (verbose or _is_tie(tie, best, other)):
        lines += labelled("Tie", tie_words(tie, best, verbose=verbose))
    before = len(lines)
    if other is not None:
        lines += labelled("Runner-up", against_best(best, other, verbose=verbose))
    after = len(lines)
    if own.staged is not None:
        lines += labelled("Stages", stages_words(own.staged, verbose=verbose))
    if own.placed is not None:
        lines += labelled("Order", placed_words(own.placed, verbose=verbose))
    for place, saving in enumerate(answer.savings if verbose else answer.savings[:1]):
        words = saving_words(saving, verbose=verbose)
        lines += labelled("" if place else "Would save", words)
    if answer.trainers:
        lines += trainer_lines(scenario, answer.trainers, verbose=verbose)
    if verbose:
        lines += labelled("Searched", searched(answer.result.counts))
    lines += assumed(answer.assumptions, verbose=verbose)
    if verbose:
        lines += labelled("Confidence", confidence_words(scenario))
    most = shown_rows(answer.rows, verbose=verbose)
    if (
        answer.rows is None and most is not None
    ):  # besides an empty line, head, hint and next command
        room = LINES - len(above) - len(lines) - 4
        if room < 2:  # a row of the table says more
            room += after - before
            del lines[before:after]
        most = max(1, min(most, room))
    shown = [one.assessment for one in (*ranked, *answer.further)]
    if most is None or len(shown) <= most:
        shown[1:] = sorted(shown[1:], key=lambda one: one.time.step_seconds)
    table = ranked_table(shown, most, hint=answer.rows is None, tie=tie)
    return "\n".join([*above, *table, "", *lines])


def saving_words(saving: Saving, *, verbose: bool = True) -> str:
    """Return what a technique saves, and with which options; a short text in one line."""
    share = f"{100 * saving.share:.1f} %"
    note = "changes numerics" if saving.changes_numerics else ""
    options = saving.options if saving.options.startswith("on ") else f"with {saving.options}"
    words = f"{share} {options}" + f" ({note})" * bool(note)
    if verbose or len(words) <= width() - INDENT:
        return words
    note += "; " * bool(note)
    return f"{share} with {saving.words} ({note}-v)"


def trainer_lines(
    scenario: Scenario, trainers: Sequence[BestOfTrainer], *, verbose: bool
) -> list[str]:
    """Return the step of every trainer; in a short answer one line."""
    from planner.refinement.placement import can_be_placed  # large: loaded where it is needed

    default_order = can_be_placed(scenario.cluster) and not any(one.order for one in trainers)
    order = ", default order of ranks" if default_order else ""
    steps = [f"{one.software} {format_seconds(one.step_seconds)}" for one in trainers]
    if verbose:
        words = f"{', '.join(steps)}; --software NAME shows its plan{order}"
        return labelled("Trainers", words)
    return [labelled_line("Trainers", steps, f" (--software{order})")]


def _is_tie(tie: Tie, best: Assessment, other: Assessment | None) -> bool:
    """Whether the best plan is not the fastest, or the runner-up is as fast."""
    if best.time.step_seconds > tie.seconds:
        return True
    return other is not None and other.time.step_seconds <= (1.0 + CLOSE) * tie.seconds


def tie_words(tie: Tie, best: Assessment, *, verbose: bool = False) -> str:
    """Return of how many plans the proposed one is the simplest, and what the fastest saves."""
    words = f"simplest of {tie.plans:,} plans within {100 * CLOSE:g} %"
    step = best.time.step_seconds
    saved = step - tie.seconds
    if saved <= 0.0:
        return f"{words}, and the fastest"
    share = f"{100 * saved / step:.1f} %"
    words += f"; the fastest takes {format_seconds(saved)} less ({share})"
    return f"{words}: {changes(best.plan, tie.fastest)}" if verbose else words


def tight_words(scenario: Scenario, plan: Plan) -> str:
    """Return what a tight plan means, and which option may find plans that fit."""
    if scenario.on_gpu and plan.offload == "none":
        return "these may run out of memory; --allow offload keeps parts on the host"
    return "no plan fits with its whole interval; these may run out of memory"


def against_best(best: Assessment, other: Assessment, *, verbose: bool) -> str:
    """Return what the runner-up costs and saves, compared with the best plan."""
    slower = other.time.step_seconds - best.time.step_seconds
    more = other.memory.peak_bytes - best.memory.peak_bytes
    if slower < -1e-9 * best.time.step_seconds:
        share = f"{100 * -slower / best.time.step_seconds:.1f} %"
        but = f"needs {format_bytes(more)} more memory" if more > 0.0 else "is less simple"
        return f"{format_seconds(-slower)} faster ({share}), but {but}"
    if slower <= 1e-9 * best.time.step_seconds:
        if more <= 0.0:
            return "as fast with the same memory, but splits more"
        return f"as fast, but needs {format_bytes(more)} more memory"
    before, after = amounts(best.time.parts), amounts(other.time.parts)
    lost = max(after, key=lambda name: after[name] - before[name])
    difference = after[lost] - before[lost]
    share = f"{100 * slower / best.time.step_seconds:.1f} %"
    by = f"{format_seconds(slower)} slower ({share})" if verbose else f"{share} slower"
    words = f"{by}: {TIME_WORDS[lost]} costs {format_seconds(difference)} more"
    saved = difference - slower
    return words if saved < 0.05 * slower else f"{words}, the rest {format_seconds(saved)} less"


def stages_words(staged: StagedPlan, *, verbose: bool) -> str:
    """Return the gain of the best plan's own stages."""
    even = format_seconds(staged.even_step)
    words = [f"{100 * staged.gain:.1f} % less time than the best plan with even stages, {even}"]
    if verbose and not staged.proven:
        words += ["a limit ended the search, so others may be faster"]
    return "; ".join(words)


def searched(counts: Counts) -> str:
    """Return the counts of a search in one sentence."""
    illegal = list(counts.illegal.items())
    shown = ", ".join(f"{code} {number:,}" for code, number in illegal[:MOST_REASONS])
    excluded = sum(counts.excluded.values())
    slow = f"{counts.slow:,} slower than the best, " if counts.slow else ""
    words = (
        f"{counts.enumerated:,} candidates in {format_seconds(counts.seconds)}: "
        f"{counts.priced:,} legal, {slow}{counts.too_large:,} too large, "
        f"{counts.tight:,} tight, {counts.fitting:,} fit"
    )
    if excluded:
        words += f", {excluded:,} excluded by requirements"
    if counts.short_pieces:
        words += f"; {counts.short_pieces:,} more share a sequence in short pieces"
    if counts.part_recomputed:
        words += f"; {counts.part_recomputed:,} more recompute a part of their layers"
    if counts.more_stages:
        words += f"; {counts.more_stages:,} more have other numbers of virtual stages"
    if counts.copies:
        words += f"; {counts.copies:,} more have a secondary copy of the weights"
    if counts.simulated:
        words += f"; {counts.simulated:,} simulated, {counts.bounded_away:,} cannot win"
    return words + (f"; illegal mostly by {shown}" if shown else "")


def placed_words(placed: PlacedPlan, *, verbose: bool = True) -> str:
    """Return the gain of an order of ranks; ``verbose``: with the order and its links."""
    if not verbose:
        return f"{100 * placed.gain:.1f} % less time with its own order of ranks (-v)"
    shown = ", ".join(map(str, placed.order[:MOST_RANKS]))
    more = f", … ({len(placed.order):,} in all)" if len(placed.order) > MOST_RANKS else ""
    proven = "the best of the plans and orders that were tried"
    if placed.proven:
        proven = "no plan is faster in any order"
    return (
        f"{format_seconds(placed.step)} instead of {format_seconds(placed.usual_step)} a step "
        f"({100 * placed.gain:.1f} % less, simulated) with ranks 0, 1, 2, … on the "
        f"accelerators {shown}{more}; {'; '.join(map(_links_of_axis, placed.places))}; {proven}; "
        "that is what -o writes"
    )


def _links_of_axis(place: AxisPlace) -> str:
    """Return the links of the groups of an axis, in this order and in the default order.

    >>> from planner.refinement.placed_plan import AxisPlace
    >>> _links_of_axis(AxisPlace("tensor", 2, 1.25e9, "PCIe switch", 25e9, "UPI", 5e9))
    'tensor groups of 2 (1.25 GB a step) talk over PCIe switch, 25 GB/s, instead of UPI, 5 GB/s'
    """
    kind = "stages in lines" if place.axis == "pipeline" else f"{place.axis} groups"
    words = f"{kind} of {place.size} ({place.sent / 1e9:.3g} GB a step)"
    here = f"{place.level}, {place.bandwidth / 1e9:.3g} GB/s"
    if not place.moved:
        return f"{words} stay on {here}"
    there = f"{place.usual_level}, {place.usual_bandwidth / 1e9:.3g} GB/s"
    return f"{words} talk over {here}, instead of {there}"
