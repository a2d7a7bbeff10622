"""``report``: a plan, or a run of it, as one HTML page that needs no network and no script."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Final

from cost_models.memory.parts import PART_WORDS
from cost_models.plan.workload import Workload
from cost_models.pricing.utilisation import counted_flops
from cost_models.step_time.parts import TIME_WORDS
from cost_models.units import (
    format_bytes,
    format_count,
    format_gib,
    format_rate,
    format_seconds,
    format_step,
)
from hardware_profiles.arguments import names_arguments
from hardware_profiles.cluster.build import describe as describe_cluster
from hardware_profiles.fields import write_text_atomically
from hardware_profiles.progress import report as progress
from planner.advice.ways_out import ways_out
from planner.answer.answers import not_run
from planner.answer.memory_html import fragment, terms_table
from planner.answer.text import budget_words, head
from planner.assessment.assess import amounts
from planner.assessment.confidence import compared_runs, confidence, confidence_words
from planner.assessment.step_memory import step_memory
from planner.assessment.verdict import WORDS
from planner.explanation.glossary import MEMORY_EXPLANATIONS, describe, explain_time
from planner.explanation.machine_figures import format_value
from planner.reports.alternatives import Alternatives, alternatives, setup_reason
from planner.reports.drawings import front_drawing, memory_over_step, passes, roofline_drawing
from planner.reports.reported_plan import Reportable, ReportedPlan, read_reported
from planner.reports.roofline import roofline
from planner.request.command import describe_with_stages
from planner.runs.compare import Comparison, compare_run, comparison_cells
from planner.search.simplicity import CLOSE
from planner.text.html_page import Html, bar, element, joined, listed, note, page, table
from planner.text.notebook import framed

SMALL: Final = 0.001  # share of a step or a peak; smaller parts are left out


@dataclass(frozen=True, slots=True)
class Report:
    """The page of a plan or a run."""

    name: str
    html: str

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the page; an existing file is kept unless ``force``."""
        write_text_atomically(Path(path), self.html, force=force)

    def _repr_html_(self) -> str:
        return framed(self.html, self.name)


@names_arguments("planner.report")
def report(plan: Reportable) -> Report:
    """Return the report of a plan.json or an answer, or of a run's folder: with measurements."""
    reported = read_reported(plan)
    progress("searching other plans")
    others = alternatives(reported)
    progress("drawing")
    sections = [
        *_verdict(reported),
        *_measured(reported),
        *_plan(reported),
        *_memory(reported),
        *_time(reported),
        *_passes(reported),
        *_roofline(reported),
        *_front(reported, others),
        *_runners_up(reported, others),
        *_assumptions(reported),
        *_confidence(reported),
    ]
    made_by = f"{reported.path.name} · {reported.file.created_by or 'shardplan'}"
    body = [*sections, note(made_by)]
    return Report(reported.name, page(reported.name, *body))


def _verdict(reported: ReportedPlan) -> Iterator[Html]:
    """Yield the verdict in a sentence, and the figures on which it rests."""
    found = reported.assessment
    memory, time, budget = found.memory, found.time, found.budget.size
    margin = found.margin_bytes
    spare = f"{format_bytes(abs(margin))} {'left' if margin >= 0 else 'too much'}"
    step = format_step(
        time.step_seconds, time.low_seconds, time.high_seconds, time.tokens_per_second
    )
    mfu = "" if time.mfu is None else f", MFU {100 * time.mfu:.1f} %"
    yield element(
        "p",
        element("b", WORDS[found.verdict]),
        f": each accelerator needs {format_gib(memory.peak_bytes)} of {format_bytes(budget)} "
        f"({format_gib(memory.low_bytes)} to {format_gib(memory.high_bytes)} likely, {spare}). "
        f"Step time {step}, {format_rate(time.tokens_per_second)}, "
        f"{format_rate(time.tokens_per_second_per_gpu)} per device{mfu}.",
        css=f"verdict {found.verdict}",
    )
    cluster = describe_cluster(reported.file.cluster)
    model = " ".join(head(reported.scenario)).removesuffix(cluster).strip()
    yield note(f"{model} · {cluster}")
    if found.verdict != "fits":
        ways = ways_out(reported.scenario, reported.file.plan)
        items = [f"{w.change}: {format_bytes(w.peak_bytes)} ({w.options})" for w in ways]
        if items:
            yield joined([element("h2", "What would fit"), listed(items)])


def _plan(reported: ReportedPlan) -> Iterator[Html]:
    file, plan = reported.file, reported.file.plan
    yield element("h2", "The plan")
    yield element("pre", describe_with_stages(reported.scenario, plan, file.layer_ranges))
    yield listed(describe(reported.scenario, plan))
    if len(reported.file.layer_ranges) > 1:
        ranges = ", ".join(f"{a} to {b - 1}" for a, b in reported.file.layer_ranges)
        yield note(f"Layers of the stages: {ranges}.")
    if why := not_run(reported.scenario, plan):
        yield note(f"Not run by shardplan run: {why}.")


def _memory(reported: ReportedPlan) -> Iterator[Html]:
    plan, found = reported.file.plan, reported.assessment
    yield element("h2", "Memory over the step")
    yield memory_over_step(reported.drawn_step, found)
    yield _shown_of(reported)
    parts, peak = amounts(found.memory.parts), found.memory.peak_bytes
    for name in sorted(parts, key=lambda part: -parts[part]):
        if parts[name] >= SMALL * peak:
            share = f"{format_bytes(parts[name])} · {100 * parts[name] / peak:.0f} %"
            yield bar(PART_WORDS[name], share, parts[name] / peak, MEMORY_EXPLANATIONS[name])
    moments = step_memory(reported.scenario, plan, found.memory)
    yield element(
        "details",
        element("summary", "Moments, stages, and the largest terms at the peak"),
        Html(fragment(moments, found, "Memory at the moments of a step")),
        terms_table(moments),
    )


def _shown_of(reported: ReportedPlan) -> Html:
    """Return how many micro-batches a drawing shows."""
    all_of_them = reported.file.plan.num_microbatches
    shown = reported.drawn_step.plan.num_microbatches
    if shown == all_of_them:
        return Html("")
    return note(
        f"Drawn with {shown:,} of {all_of_them:,} micro-batches; the others repeat the middle. "
        "shardplan trace writes all of them.",
    )


def _time(reported: ReportedPlan) -> Iterator[Html]:
    plan, time = reported.file.plan, reported.assessment.time
    yield element("h2", "Where the step goes")
    parts = amounts(time.parts)
    for name in sorted(parts, key=lambda part: -parts[part]):
        share = parts[name] / time.step_seconds
        if share >= SMALL:
            words = f"{format_seconds(parts[name])} · {100 * share:.1f} %"
            yield bar(TIME_WORDS[name], words, share, explain_time(reported.scenario, plan, name))


def _passes(reported: ReportedPlan) -> Iterator[Html]:
    plan, step = reported.file.plan, reported.drawn_step
    yield element("h2", "The passes of one step")
    yield passes(step)
    yield _shown_of(reported)
    if plan.pipeline_parallel > 1:
        bubble = (
            float(reported.assessment.time.parts.bubble) / reported.assessment.time.step_seconds
        )
        yield note(
            f"Schedule {plan.pipeline_schedule}, {plan.num_microbatches:,} micro-batches: the "
            f"slowest rank waits {100 * bubble:.1f} % of the step for others.",
        )


def _roofline(reported: ReportedPlan) -> Iterator[Html]:
    found = roofline(reported.scenario, reported.file.plan, reported.file.layer_ranges)
    if not found.points:
        return
    yield element("h2", "Roofline of a layer's forward pass")
    yield roofline_drawing(found)
    roof = [min(found.peak, found.bandwidth * point.intensity) for point in found.points]
    yield table(
        [
            (
                str(number),
                point.name,
                f"{point.intensity:,.0f}",
                f"{point.rate / 1e12:,.3g}",
                f"{100 * point.rate / top:.0f} %",
                format_seconds(point.seconds),
            )
            for number, (point, top) in enumerate(zip(found.points, roof, strict=True), 1)
        ],
        head=("", "operator", "FLOP a byte", "TFLOP/s", "of the roof", "time"),
        css="",
    )
    rest = found.other_seconds / found.layer_seconds
    yield note(
        f"Roof: {found.peak / 1e12:,.4g} TFLOP/s and {found.bandwidth / 1e12:.3g} TB/s; dashed: "
        f"{found.reached / 1e12:,.4g} TFLOP/s, which large matrices reach. Norms, activation "
        f"functions, residuals and other operators without matrices take {100 * rest:.0f} % of "
        "the layer, at the memory's bandwidth.",
    )


def _front(reported: ReportedPlan, others: Alternatives) -> Iterator[Html]:
    letters = ascii_uppercase[: len(others.usual)]
    yield element("h2", "Memory against time")
    yield front_drawing(reported.assessment, others, letters)
    rows = []
    for letter, setup in zip(letters, others.usual, strict=True):
        found = setup.found.assessment
        step = peak = "–"
        if found is not None:
            step = format_seconds(found.time.step_seconds)
            peak = f"{format_gib(found.memory.peak_bytes)} GiB"
        rows.append((letter, setup.name, step, peak, setup_reason(setup)))
    yield table(rows, ("", "usual setup, at its best", "step", "peak", "against this plan"), css="")


def _runners_up(reported: ReportedPlan, others: Alternatives) -> Iterator[Html]:
    if not others.runners_up:
        return
    own = reported.assessment.time.step_seconds
    yield element("h2", "Runners-up")
    rows = []
    for one in others.runners_up:
        seconds = one.assessment.time.step_seconds
        more = 100.0 * (seconds / own - 1.0)
        rows.append(
            (
                format_seconds(seconds),
                f"{more:+z.1f} %",
                f"{format_gib(one.assessment.memory.peak_bytes)} GiB",
                one.differences.replace("->", "→"),
                one.reason or "no part of the time differs",
            )
        )
    yield table(rows, ("step", "", "peak", "changed", "why"), css="")
    words = (
        f"Of {others.candidates:,} legal plans with even stages; one of each split of the ranks."
    )

    if own > others.runners_up[0].assessment.time.step_seconds:
        words += f" Of plans within {100 * CLOSE:.0f} % of the fastest, plan takes the simplest."
    yield note(words)


def _assumptions(reported: ReportedPlan) -> Iterator[Html]:
    file, chip = reported.file, reported.file.cluster.accelerator
    yield element("h2", "Assumptions")
    usual = Workload(file.workload.seq_len, file.workload.global_batch_size).to_dict()
    always = ("seq_len", "global_batch_size", "precision", "optimizer", "attention_kernel")
    given = file.workload.to_dict().items()
    shown = [f"{name} {value}" for name, value in given if name in always or value != usual[name]]
    items = [
        f"Model: {file.model.name}, {format_count(file.model.num_parameters)} parameters, "
        f"{file.model.num_layers} layers",
        f"Workload: {', '.join(shown)}",
        f"Trainer: software profile {file.software}",
        f"Memory budget: {budget_words(reported.assessment.budget)}",
        f"MFU counts {counted_flops(reported.scenario).convention}",
    ]
    if file.model.has_experts:
        items.append("Tokens are routed evenly over the experts")
    precision = file.workload.precision
    figures = [
        (f"Peak in {precision}", chip.peak_flops.get(precision), "FLOP/s"),
        ("Memory bandwidth", chip.memory_bandwidth, "bytes/s"),
        *((f"Bandwidth of {tier.name}", tier.bandwidth, "bytes/s") for tier in file.cluster.tiers),
    ]
    items += [
        f"{name}: {format_value(figure.value, unit)} ({figure.kind}: {figure.source})"
        for name, figure, unit in figures
        if figure is not None
    ]
    yield listed(items)


def _confidence(reported: ReportedPlan) -> Iterator[Html]:
    yield element("h2", "How far off such predictions were")
    yield element("p", f"{confidence_words(reported.scenario)}.")
    found = compared_runs(reported.scenario)
    if found is not None and confidence(reported.scenario) in ("measured", "learned"):
        yield element(
            "p",
            f"{found.runs:,} published runs of {', '.join(found.trainers)} on "
            f"{reported.file.cluster.accelerator.name}: median error of the step time "
            f"{100 * found.median_error:.1f} %. Their rows: shardplan validate --only "
            f"{found.sources[0]}.",
        )
    memory, time = reported.assessment.memory, reported.assessment.time
    yield element(
        "p",
        "Of ten runs like those that the intervals were learned from, nine were inside: "
        f"{format_gib(memory.low_bytes)} to {format_gib(memory.high_bytes)} GiB, "
        f"{format_seconds(time.low_seconds)} to {format_seconds(time.high_seconds)} a step.",
    )


def _measured(reported: ReportedPlan) -> Iterator[Html]:
    """Yield the comparison with a run, if it is the report of one."""
    if reported.run is None:
        return
    found = compare_run(reported.path, reported.file, reported.run)
    yield element("h2", "Predicted and measured")
    yield element(
        "p", f"Run {reported.run.folder.name} on {reported.run.device}: {reported.run.status}."
    )
    yield from _compared(found)
    yield listed(words.strip() for words in found.explanation)


def _compared(found: Comparison) -> Iterator[Html]:
    for term in found.terms[:1]:
        largest = max(term.left or 0.0, term.right or 0.0)
        for name, value in (("predicted", term.left), ("measured", term.right)):
            if value is not None and largest > 0.0:
                yield bar(f"step time, {name}", format_seconds(value), value / largest)
    _, *rows = comparison_cells(found)
    yield table(
        [(name.strip(), *cells) for name, *cells in rows],
        ("", "predicted", "measured", "prediction is"),
    )
