"""Answer of ``explain``: the plan in words, largest terms, sensitivity, comparisons with others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from msgspec import Struct, field

from cost_models.compute.rates import power_limit
from cost_models.memory.parts import PART_WORDS
from cost_models.plan.plan import Plan
from cost_models.scenario import Scenario
from cost_models.step_time.parts import TIME_WORDS
from cost_models.units import format_bytes, format_gib, format_seconds
from hardware_profiles.record import Record, to_json
from planner.advice.ways_out import WayOut
from planner.answer.answers import AssessedAnswer, header
from planner.answer.text import head, short_head, time_line
from planner.assessment.assess import Assessment, amounts
from planner.assessment.verdict import WORDS
from planner.explanation.glossary import MEMORY_EXPLANATIONS, explain_time, signed_seconds
from planner.explanation.machine_figures import format_value
from planner.explanation.sensitivity import BatchChoice, Crossover, Sensitivity
from planner.explanation.why_not import SAME, WhyNot
from planner.refinement.best_partition import StagedPlan
from planner.request.command import describe_plan, describe_with_stages
from planner.request.scenario import about_rates
from planner.text.paragraphs import MOMENT_WORDS, indented, labelled
from planner.text.plan_changes import changes

EACH: Final = ", for each accelerator"  # left out in a short answer
SMALL: Final = 0.005  # share of a step or a peak; smaller terms are left out


class TimeTerm(Struct, frozen=True):
    """One part of the step time."""

    part: str
    seconds: float
    share: float  # of the step
    words: str  # explanation


class MemoryTerm(Record, frozen=True):
    """One part of the peak memory."""

    part: str
    size: float = field(name="bytes")
    share: float  # of the peak


class BindingTerms(Record, frozen=True):
    """Parts of step time and peak memory, largest first, with stage and moment of the peak."""

    time: tuple[TimeTerm, ...]
    memory: tuple[MemoryTerm, ...]
    stage: int
    moment: str
    margin_bytes: float  # of the budget


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(AssessedAnswer):
    """Explanation of one plan; ``best``: the best plan of the search, None if nothing fits."""

    scenario: Scenario
    plan: Plan
    layer_ranges: tuple[tuple[int, int], ...]
    assessment: Assessment
    description: tuple[str, ...]  # sentences, from the outermost split to the innermost
    best: Plan | None
    best_staged: StagedPlan | None  # the best plan, if stages of its own make it so
    best_assessment: Assessment | None
    varied: Plan | None  # best plan in closed form, the subject of ``sensitivity``
    sensitivity: tuple[Sensitivity, ...]
    batches: tuple[BatchChoice, ...]
    why_not: tuple[WhyNot, ...]
    ways_out: tuple[WayOut, ...]

    @property
    def options(self) -> str:
        """The options of the plan and of its stages."""
        return describe_with_stages(self.scenario, self.plan, self.layer_ranges)

    @property
    def slower_than_best(self) -> float | None:
        """Relative slowdown to the best plan; negative: faster than all searched plans."""
        if self.best_assessment is None:
            return None
        return self.assessment.time.step_seconds / self.best_assessment.time.step_seconds - 1.0

    @property
    def is_best(self) -> bool:
        """Whether no searched plan is faster."""
        slower = self.slower_than_best
        return slower is not None and slower <= SAME

    def binds(self) -> BindingTerms:
        """Return the terms of time and memory, largest first."""
        time, memory = self.assessment.time, self.assessment.memory
        seconds, sizes = amounts(time.parts), amounts(memory.parts)
        return BindingTerms(
            time=tuple(
                TimeTerm(
                    name,
                    seconds[name],
                    seconds[name] / time.step_seconds,
                    explain_time(self.scenario, self.plan, name),
                )
                for name in sorted(seconds, key=lambda part: -seconds[part])
                if seconds[name] > 0.0
            ),
            memory=tuple(
                MemoryTerm(name, sizes[name], sizes[name] / memory.peak_bytes)
                for name in sorted(sizes, key=lambda part: -sizes[part])
                if sizes[name] > 0.0
            ),
            stage=memory.limiting_stage,
            moment=memory.moment,
            margin_bytes=self.assessment.margin_bytes,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        best, assessment = None, self.assessment.to_dict()
        if self.best is not None and self.best_assessment is not None:
            best = {
                "plan": self.best,
                "staged": self.best_staged,
                "step_seconds": self.best_assessment.time.step_seconds,
                "peak_bytes": self.best_assessment.memory.peak_bytes,
                "verdict": self.best_assessment.verdict,
                "this_is_slower_by": self.slower_than_best,
                "changes": changes(self.plan, self.best),
            }
        document = {
            **header(self.scenario),
            "verdict": self.verdict,
            "plan": self.plan,
            "layer_ranges": self.layer_ranges,
            "memory": assessment["memory"],
            "time": assessment["time"],
            "story": self.description,
            "binds": self.binds(),
            "is_best": self.is_best,
            "best": best,
            "sensitivity": self.sensitivity,
            "batches": self.batches,
            "why_not": self.why_not,
            "ways_out": self.ways_out,
        }
        return dict(to_json(document))

    def notebook_parts(self) -> Iterator[str]:
        """Yield verdict, the plan in words, its parts of time and memory, and other plans."""
        from planner.answer import notebook
        from planner.answer.text import model_lines
        from planner.explanation.notebook import other_plans, where_it_goes
        from planner.text.html_page import element, listed

        yield notebook.verdict(self.assessment, notebook.step_sentence(self.assessment))
        yield notebook.about(model_lines(self.scenario), self.scenario.cluster, self.options)
        yield listed(self.description)
        yield element("p", element("b", "Compared with the search: "), best_words(self))
        binds = self.binds()
        yield from where_it_goes(
            {term.part: term.seconds for term in binds.time},
            {term.part: term.words for term in binds.time},
            {term.part: term.size for term in binds.memory},
        )
        yield from other_plans(self.why_not, self.ways_out)

    def text(self, *, verbose: bool = False) -> str:
        """Return the text, of ``why_not`` alone if another plan was asked about.

        ``verbose``: what every part means, every figure of the machine.
        """
        return explanation_text(self, verbose=verbose)


def explanation_text(found: Explanation, *, verbose: bool = False) -> str:
    """Return the answer of ``explain`` as text."""
    lines = [*head(found.scenario), ""] if verbose else short_head(found.scenario)
    lines += labelled("Plan", found.options)
    others = [line for reason in found.why_not for line in ("", *_why_not(reason))]
    if others and not verbose:
        return "\n".join([*lines, *others])
    for number, sentence in enumerate(found.description):
        lines += labelled("In words" if not number else "", sentence)
    lines += [""] * verbose
    lines += labelled("Step", time_line(found.assessment.time))
    lines += _time(found, verbose=verbose)
    if about := about_rates(found.scenario.software):
        lines += labelled("Rates", about)
    lines += _memory(found, verbose=verbose)
    lines += _ways(found)
    lines += [""] * verbose
    lines += labelled("Best", best_words(found))
    lines += _sensitivity(found, verbose=verbose)
    return "\n".join([*lines, *others])


def _time(found: Explanation, *, verbose: bool) -> list[str]:
    shown = [term for term in found.binds().time if term.share >= SMALL]
    if verbose:
        return _with_meaning(
            (one.share, format_seconds(one.seconds), TIME_WORDS[one.part], one.words)
            for one in shown
        )
    parts = (
        f"{TIME_WORDS[term.part]} {100 * term.share:.0f} % ({format_seconds(term.seconds)})"
        for term in shown
    )
    return labelled("", ", ".join(parts))


def _with_meaning(terms: Iterable[tuple[float, str, str, str]]) -> list[str]:
    """Return a paragraph for each share, amount, name and meaning."""
    return [
        line
        for share, amount, name, meaning in terms
        for line in indented(f"{100 * share:.0f} %  {amount}  {name}: {meaning}")
    ]


def _memory(found: Explanation, *, verbose: bool) -> list[str]:
    memory, margin = found.assessment.memory, found.assessment.margin_bytes
    word = f"{format_bytes(margin)} left" if margin >= 0 else f"{format_bytes(-margin)} too much"
    where = f"stage {memory.limiting_stage}, {MOMENT_WORDS[memory.moment]}"
    lines = labelled(
        "Memory",
        f"{WORDS[found.verdict]}: {format_gib(memory.peak_bytes)} of "
        f"{format_bytes(found.assessment.budget.size)} at the peak ({where}), {word}",
    )
    shown = [term for term in found.binds().memory if term.share >= SMALL]
    if verbose:
        return lines + _with_meaning(
            (one.share, format_bytes(one.size), PART_WORDS[one.part], MEMORY_EXPLANATIONS[one.part])
            for one in shown
        )
    sizes = (f"{PART_WORDS[term.part]} {format_bytes(term.size)}" for term in shown)
    return lines + labelled("", ", ".join(sizes))


def _ways(found: Explanation) -> list[str]:
    lines: list[str] = []
    for number, way in enumerate(found.ways_out):
        words = f"{way.change}: {format_bytes(way.peak_bytes)}   {way.options}"
        lines += labelled("Fixes" if not number else "", words)
    return lines


def best_words(found: Explanation) -> str:
    """Return how the plan compares with the best one of the search."""
    if found.best is None or found.best_assessment is None:
        return "no plan of the search space fits"
    slower = found.slower_than_best or 0.0
    step = format_seconds(found.best_assessment.time.step_seconds)
    if found.is_best:
        words = "no legal plan that fits is predicted faster"
        if slower < -SMALL:
            words += f"; the best plan of the search takes {-100 * slower:.1f} % longer"
        return words
    best = describe_plan(found.best) if found.best_staged is None else found.best_staged.options
    return (
        f"this plan takes {100 * slower:.1f} % longer than the best one, {step} a step: "
        f"{best} ({changes(found.plan, found.best) or 'other stages'})"
    )


# --- what would change it ---


def _sensitivity(found: Explanation, *, verbose: bool) -> list[str]:
    if found.varied is None or not found.sensitivity:
        return []
    about = "this plan" if found.varied == found.plan else "the best plan"
    if found.best_staged is not None:  # not found again for every figure
        about = f"the best plan with even stages, {describe_plan(found.varied)}"
    more = "" if verbose else " (-v: which)"
    lines = labelled("Sensitive", f"values at which another plan beats {about}{more}:")
    changing = [one for one in found.sensitivity if one.less or one.more]
    for one in found.sensitivity if verbose else changing:
        words = _figure(one, found.varied, found.scenario) if verbose else _threshold(one)
        lines += indented(words)
    without = [one.words for one in found.sensitivity if one not in changing]
    if without and not verbose:
        words = "no change of plan from half to four times the value of "
        lines += indented(words + ", ".join(without))
    batches = []
    for batch in found.batches:
        if batch.plan is None:
            words = "nothing fits"
        elif batch.same:
            words = "the same plan"
        else:
            words = changes(found.varied, batch.plan)
        batches.append(f"{batch.global_batch_size:,}: {words}")
    if batches:
        size = found.scenario.workload.global_batch_size
        lines += indented(f"global batch, now {size:,}. With {'; '.join(batches)}")
    return lines


def _threshold(one: Sensitivity) -> str:
    """Return the values of a figure from which on another plan is better."""
    ends = (("below", one.less), ("above", one.more))
    words = [
        f"{word} {format_value(change.value, one.unit)} ({change.scale:.2f}x)"
        for word, change in ends
        if change is not None
    ]
    return f"{one.words.removesuffix(EACH)} {' or '.join(words)}"


def _figure(one: Sensitivity, best: Plan, scenario: Scenario) -> str:
    parts = []
    for change, word, end in ((one.less, "below", "half"), (one.more, "above", "four times")):
        if change is None:
            parts.append(f"down to {end} of it" if word == "below" else f"up to {end}")
        else:
            parts.append(_change(one, change, word, best))
    if one.less is None and one.more is None:
        words = "nothing changes from half to four times this value"
    elif one.less is None:
        words = f"{parts[1]}; {parts[0]} nothing changes"
    elif one.more is None:
        words = f"{parts[0]}; {parts[1]} nothing changes"
    else:
        words = f"{parts[0]}; {parts[1]}"
    shorter = "" if one.name == "memory" else _depends(one, scenario)
    return f"{one.words}, now {format_value(one.value, one.unit)}{shorter}: {words}"


def _depends(one: Sensitivity, scenario: Scenario) -> str:
    step_change = one.step_change
    if abs(step_change) < 0.0005:
        return f" (10 % more changes no step time{_power(one, scenario)})"
    word = "shortens" if step_change < 0 else "lengthens"
    return f" (10 % more {word} the step by {100 * abs(step_change):.1f} %)"


def _power(one: Sensitivity, scenario: Scenario) -> str:
    """Return why faster matrix products do not help: the power limit of long runs binds first."""
    chip, precision = scenario.cluster.accelerator, scenario.workload.precision
    limit = power_limit(chip, precision)
    if one.name != "flops" or limit is None or chip.watts is None or limit > one.value:
        return ""
    return f": in a long run {chip.watts.value:,.0f} W allow {format_value(limit, one.unit)}"


def _change(one: Sensitivity, change: Crossover, word: str, best: Plan) -> str:
    where = f"{word} {format_value(change.value, one.unit)} ({change.scale:.2f}x)"
    at = f"{where}: {changes(best, change.plan)}"
    if change.keeping_costs == float("inf"):
        return f"{at} (the old choice does not fit there)"
    if change.keeping_costs <= 0.0:
        return at
    return f"{at} (at {change.end:g}x the old choice is {100 * change.keeping_costs:.1f} % slower)"


# --- why not ---


def _why_not(reason: WhyNot) -> list[str]:
    label, requested = "Why not", reason.requested
    if reason.kind == "illegal":
        return _illegal(label, reason)
    assert reason.plan is not None
    assert reason.assessment is not None
    completed = f"{requested}? The best such plan is {reason.options}"
    if reason.kind == "same":
        return labelled(label, f"{requested}? This plan is the best one with it.")
    if reason.kind in ("too_large", "tight"):
        return _too_large(label, reason)
    this = reason.terms
    seconds = sum(term.difference for term in this)
    step = reason.assessment.time.step_seconds
    before = step - seconds
    word = "longer" if reason.kind == "slower" else "less"
    lines = labelled(
        label,
        f"{completed}. It takes {format_seconds(step)} a step, {format_seconds(abs(seconds))} "
        f"({100 * abs(seconds) / before:.1f} %) {word}:",
    )
    for term in this:
        lines += indented(
            f"{signed_seconds(term.difference)}  {TIME_WORDS[term.part]}: {term.words}"
        )
    return lines


def _illegal(label: str, reason: WhyNot) -> list[str]:
    ways = f"{reason.candidates:,} ways to complete it" if reason.candidates > 1 else "the plan"
    intro = f"{reason.requested}? It cannot exist: of {ways} none is legal"
    if reason.every:
        words: Sequence[str] = [f"every one breaks a rule: {rule}" for _, rule, _ in reason.rules]
    else:
        words = [f"{number:,} break this rule: {rule}" for _, rule, number in reason.rules]
    lines = labelled(label, f"{intro}:")
    for sentence in words:
        lines += indented(sentence)
    return lines


def _too_large(label: str, reason: WhyNot) -> list[str]:
    assert reason.plan is not None
    assert reason.assessment is not None
    memory, budget = reason.assessment.memory, reason.assessment.budget.size
    sizes = (
        f"{format_gib(memory.peak_bytes)} of {format_bytes(budget)} on stage "
        f"{memory.limiting_stage}, {MOMENT_WORDS[memory.moment]}"
    )
    by = format_bytes(reason.over_bytes)
    if reason.kind == "tight":
        intro = (
            f"{reason.requested}? It may run out of memory: the best completion, "
            f"{describe_plan(reason.plan)}, needs {sizes}; the upper end of the interval is {by} "
            "over the budget"
        )
    else:
        surely = "" if memory.peak_bytes > budget else " at the upper end"
        intro = (
            f"{reason.requested}? Too large: of {reason.legal:,} legal ways to complete it the "
            f"smallest, {describe_plan(reason.plan)}, needs {sizes}, {by} too much{surely}"
        )
    lines = labelled(label, f"{intro}:")
    for term in reason.terms:
        if term.other >= SMALL * memory.peak_bytes:
            lines += indented(
                f"{format_bytes(term.other)} {PART_WORDS[term.part]} "
                f"(this plan: {format_bytes(term.this)}): {term.words}"
            )
    return lines
