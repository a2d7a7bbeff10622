"""Text of the answers of ``fit`` and ``plan``: short, or with all details."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from cost_models.memory.parts import PART_WORDS, MemoryParts
from cost_models.model.parameters import active_parameters
from cost_models.plan.plan import Plan
from cost_models.pricing.prediction import MemoryPrediction, TimePrediction
from cost_models.scenario import Scenario
from cost_models.step_time.parts import TIME_WORDS, TimeParts
from cost_models.units import (
    GIB,
    format_bytes,
    format_count,
    format_gib,
    format_per_second,
    format_rate,
    format_seconds,
    format_step,
)
from hardware_profiles.cluster.build import describe
from hardware_profiles.cluster.schema import Cluster
from planner.assessment.assess import Assessment, MemoryAssessment, PeakMemory, amounts
from planner.assessment.confidence import confidence_words
from planner.assessment.host_memory import host_text
from planner.assessment.reach import Reach
from planner.assessment.verdict import WORDS, Budget
from planner.request.command import describe_plan, plan_command
from planner.request.stage_layers import layers_option, recompute_cell, stage_recompute_options
from planner.run_cost.text import run_lines
from planner.search.simplicity import CLOSE, degrees
from planner.text.assumed import assumed
from planner.text.bars import bars_with_room, part_bars
from planner.text.fixes import Fix, fix_lines, pace
from planner.text.paragraphs import (
    INDENT,
    LINES,
    MOMENT_WORDS,
    commanded,
    hanging,
    labelled,
    labelled_line,
    plain,
    width,
)
from planner.text.plan_changes import changes
from planner.text.tables import table_of_plans, without_doubles

if TYPE_CHECKING:
    from planner.advice.savings import Saving
    from planner.advice.trainers import BestOfTrainer
    from planner.advice.ways_out import WayOut
    from planner.answer.ranked_plan import RankedPlan
    from planner.refinement.best_partition import StagedPlan
    from planner.refinement.placement import AxisPlace, PlacedPlan
    from planner.run_cost.failures import TrainingRun
    from planner.search.search import Counts
    from planner.search.simplicity import Tie

MOST_REASONS: Final = 3  # legality rules that are listed

MOST_ROWS: Final = 4  # of a table in a short answer
MOST_RANKS: Final = 16  # ranks of an order that are listed


def head(scenario: Scenario) -> list[str]:
    """Return the lines that repeat the request: model, workload, cluster with its links."""
    return [*model_lines(scenario), *plain(describe(scenario.cluster))]


def short_head(scenario: Scenario, *after: str) -> list[str]:
    """Return the same without links, and more text behind the cluster."""
    cluster = cluster_words(scenario.cluster)
    return [*model_lines(scenario), *plain(" · ".join([cluster, *after]))]


def cluster_words(cluster: Cluster) -> str:
    """Return a cluster without its links."""
    return describe(cluster).split(", ")[0]


def model_lines(scenario: Scenario) -> list[str]:
    """Return model and workload, each line as wide as the terminal at most."""
    model, workload = scenario.model, scenario.workload
    size = format_count(model.num_parameters)
    active = active_parameters(model)
    if active < 0.99 * model.num_parameters:
        size += f" parameters ({format_count(active)} active)"
    else:
        size += " parameters"
    if workload.adapter != "none":
        trained = format_count(model.num_trainable_parameters)
        on = "" if workload.adapter_targets == "all" else f" on {workload.adapter_targets}"
        size += f", {trained} trained ({workload.adapter_name}{on}, rank {workload.adapter_rank})"
    if workload.freeze:
        trained = format_count(model.num_trainable_parameters)
        size += f", {trained} trained ({workload.freeze} frozen)"
    line = (
        f"{model.name}  {size} · {workload.precision} {workload.optimizer} · "
        f"{workload.seq_len:,} tokens · global batch {workload.global_batch_size:,}"
    )
    for long, short in ((" parameters", ""), ("global batch", "batch")):
        if len(line) > width():
            line = line.replace(long, short, 1)
    return plain(line)


def time_line(time: TimePrediction) -> str:
    """Return the step time with its interval and rates in one line."""
    low, high, rate = time.low_seconds, time.high_seconds, time.tokens_per_second
    words = format_step(time.step_seconds, low, high, rate)
    words += f", {format_rate(time.tokens_per_second_per_gpu)} per device"
    if time.mfu is not None:
        words += f", MFU {100 * time.mfu:.1f} %"
    return words


def rates_line(time: TimePrediction) -> str:
    """Return tokens/s of all accelerators, shares of the step and HFU in one line."""
    words = f"{format_rate(time.tokens_per_second)} together; {shares(time)}"
    if time.mfu is not None and time.hfu is not None and time.hfu > time.mfu * (1.0 + 1e-9):
        words += f"; HFU {100 * time.hfu:.1f} %, with recomputation"
    return words


def shares(time: TimePrediction) -> str:
    """Return the parts of the step of at least 0.5 %, as shares."""
    return ", ".join(largest_shares(time.parts, time.step_seconds))


def largest_shares(parts: TimeParts, step: float, most: int | None = None) -> list[str]:
    """Return the largest parts of a step in words, at most ``most``, without those below 0.5 %."""
    seconds = amounts(parts)
    largest = sorted(seconds, key=lambda name: -seconds[name])[:most]
    return [
        f"{TIME_WORDS[name]} {100 * seconds[name] / step:.0f} %"
        for name in largest
        if seconds[name] >= 0.005 * step
    ]


def bottleneck(assessment: Assessment) -> str:
    """Return the largest parts of time and memory."""
    memory = assessment.memory
    where = f"stage {memory.limiting_stage}, {MOMENT_WORDS[memory.moment]}"
    return largest_parts(assessment.time, memory, where)


class TimeOfParts(Protocol):
    """Seconds of a step with their parts."""

    @property
    def step_seconds(self) -> float:
        """The whole step."""
        ...

    @property
    def parts(self) -> TimeParts:
        """Its parts."""
        ...


class MemoryOfParts(Protocol):
    """Bytes at the peak with their parts."""

    @property
    def peak_bytes(self) -> float:
        """The whole peak."""
        ...

    @property
    def parts(self) -> MemoryParts:
        """Its parts."""
        ...


def largest_parts(time: TimeOfParts, memory: MemoryOfParts, where: str) -> str:
    """Return the largest parts of time and memory; ``where``: stage and moment of the peak."""
    shown = largest_shares(time.parts, time.step_seconds, 3)
    sizes = amounts(memory.parts)
    largest = max(sizes, key=lambda name: sizes[name])
    return (
        f"time: {', '.join(shown)}; memory: {PART_WORDS[largest]} "
        f"({format_bytes(sizes[largest])} of {format_bytes(memory.peak_bytes)}, {where})"
    )


def verdict_lines(assessed: MemoryAssessment[PeakMemory]) -> list[str]:
    """Return verdict, peak, interval and margin, in one line if there is room."""
    verdict, memory = WORDS[assessed.verdict], assessed.memory
    budget = assessed.budget.size
    margin = assessed.margin_bytes
    word = "margin" if margin >= 0 else "short by"
    label = f"{verdict:<{max(INDENT, len(verdict) + 1)}}"
    words = (
        f"peak {format_gib(memory.peak_bytes)} of "
        f"{format_bytes(budget)}, likely {format_gib(memory.low_bytes)} to "
        f"{format_gib(memory.high_bytes)}; {word} {format_bytes(abs(margin))}"
    )
    percent = 100 * abs(margin) / budget
    share = f" ({percent:.0f} %)" if percent >= 1 else " (under 1 %)"
    lines = hanging(label, words + share if len(label + words + share) <= width() else words)
    if assessed.fits and memory.high_bytes > budget:  # a verdict looks less far than the interval
        lines += labelled("", f"at most one such run in ten needs more than {format_bytes(budget)}")
    return lines


def short_plan(plan: Plan) -> str:
    """Return a plan as options, without those that everybody expects.

    >>> short_plan(Plan(data_parallel=8, zero_stage=3)), short_plan(Plan())
    ('--dp 8 --zero 3 --micro-batch-size 1', '--micro-batch-size 1')
    """
    words = describe_plan(plan)
    expected = ["--recompute none", "--schedule 1f1b"]
    expected += ["--dp 1", "--zero 0"] if plan.world_size == 1 else []
    for option in expected:
        words = f" {words} ".replace(f" {option} ", " ").strip()
    return words


def own_stages(scenario: Scenario) -> list[str]:
    """Return the options of stages that are not even."""
    ranges = scenario.layer_ranges or ()
    stages = [layers_option(ranges)] if len(ranges) > 1 else []
    return [*stages, *stage_recompute_options(scenario.stage_recompute_layers)]


def short_plan_of(scenario: Scenario, plan: Plan) -> str:
    """Return a plan as ``short_plan`` does, with the options of stages that are not even."""
    return " ".join([short_plan(plan), *own_stages(scenario)])


def budget_words(budget: Budget) -> str:
    """Return how much of the capacity a plan may use, with the source."""
    return f"{budget.size / GIB:.2f} of {budget.capacity / GIB:.2f} GiB; {budget.reason}"


def fit_text(
    scenario: Scenario,
    plan: Plan,
    assessment: Assessment,
    *,
    assumptions: Sequence[str],
    ways_out: Sequence[WayOut],
    reach: Reach | None,
    largest: str,
    not_run: str | None,
    job: TrainingRun | None = None,
    whole_run: Mapping[str, object] | None = None,
    verbose: bool = False,
) -> str:
    """Return the answer of ``fit`` as text."""
    fits = assessment.fits
    verdict = [*_verdict_lines(assessment), *_another_plan(assessment, ways_out)]
    if verbose:
        lines = [*head(scenario), "", *verdict]
        lines += labelled("", " ".join([describe_plan(plan), *own_stages(scenario)]))
        lines += labelled("", _where(plan, assessment))
    else:
        lines = [*short_head(scenario, short_plan_of(scenario, plan)), *verdict]
    above, lines = lines, []
    if verbose:
        lines += labelled("Budget", budget_words(assessment.budget))
        lines += labelled("Memory", _memory_figures(assessment.memory))
    host = None if assessment.is_short_on_the_host_alone else host_text(assessment.host)
    said = assessment.host.unchecked and assessment.margin_bytes >= 0.0  # next to the verdict
    told = verbose or plan.offload != "none" or assessment.host.short_of
    if host is not None and told and not said:
        lines += labelled("Host", host)
    if not fits:
        lines += labelled("Largest", largest) if verbose else [_shortened("Largest", largest)]
    if verbose or fits:
        lines += labelled("Step", time_line(assessment.time))
    if verbose:
        lines += labelled("", rates_line(assessment.time))
    elif fits:
        lines += [_bottleneck_line(assessment.time)]
    if job is not None:
        lines += run_lines(job, assessment, plan.world_size, verbose=verbose)
    lines += _reach(reach)
    lines += assumed(assumptions, verbose=verbose)
    if verbose:
        lines += labelled("Confidence", confidence_words(scenario))
        if not_run is not None:
            lines += labelled("Executor", f"not executable: {not_run}")
    if fits:
        lines += commanded("Next", plan_command(scenario, plan, whole_run))
    others = len(above) + len(lines) + (0 if fits else len(ways_out) + 1)
    most = None if verbose else bars_with_room(others)
    bars = part_bars(amounts(assessment.memory.parts), assessment.budget.size, most)
    lines = [*above, *bars, *lines]
    if not fits:
        lines += _fixes(scenario, assessment, ways_out, lines, verbose)
    return "\n".join(lines)


def _verdict_lines(assessed: Assessment) -> list[str]:
    """Return the verdict, which names the host where that alone is too small."""
    lines = verdict_lines(assessed)
    if not assessed.is_short_on_the_host_alone:
        unchecked = assessed.margin_bytes >= 0.0 and assessed.host.unchecked
        return lines + (labelled("", host_condition(assessed)) if unchecked else [])
    label = f"{WORDS['does_not_fit']} "
    room = lines[0].removeprefix(label), *(line.strip() for line in lines[1:])
    return [
        *hanging(label, f"the host: {host_text(assessed.host)}"),
        *labelled("", f"it fits the accelerator: {' '.join(room)}"),
    ]


def host_condition(assessed: Assessment) -> str:
    """Return what a node must have for the verdict, where nobody knows whether it has."""
    return f"if a node has {assessed.host.unchecked} for it, which is not known"


def host_lines(best: Assessment) -> list[str]:
    """Return the line of a proposed plan about the host of a node, if the plan offloads."""
    host = host_text(best.host)
    if host is None or best.plan.offload == "none":
        return []
    return labelled("Host", host_condition(best) if best.host.unchecked else host)


def _another_plan(assessment: Assessment, ways_out: Sequence[WayOut]) -> list[str]:
    """Return the first plan with which the same training fits on the same cluster, if any."""
    if assessment.verdict != "does_not_fit":
        return []
    found = next((way for way in ways_out if way.is_another_plan), None)
    if found is None:
        return []
    options = min(found.options, short_plan(found.plan), key=len)
    peak = format_bytes(found.peak_bytes)
    return labelled("", f"FITS with another plan: {peak} with {options}")


def _memory_figures(memory: MemoryPrediction) -> str:
    figures = (
        ("live", memory.peak_allocated_bytes),
        ("reserved by torch", memory.peak_reserved_bytes),
        ("in nvidia-smi", memory.device_used_bytes),
    )
    return ", ".join(f"{format_bytes(size)} {words}" for words, size in figures)


def _where(plan: Plan, assessment: Assessment) -> str:
    memory = assessment.memory
    where = MOMENT_WORDS[memory.moment]
    if plan.pipeline_parallel > 1:
        where = f"stage {memory.limiting_stage} is the fullest, {where}"
    return f"peak {where}"


def _bottleneck_line(time: TimePrediction) -> str:
    return labelled_line("Bottleneck", largest_shares(time.parts, time.step_seconds))


def _shortened(label: str, text: str) -> str:
    """Return a labelled line; a text without room is cut behind its last whole part."""
    pieces = text.split("; ")
    return labelled_line(label, pieces, between="; ")


def _reach(reach: Reach | None) -> list[str]:
    parts = []
    if reach is not None and reach.largest_micro_batch_size:
        parts.append(f"micro-batch size {reach.largest_micro_batch_size:,}")
    if reach is not None and reach.longest_seq_len:
        parts.append(f"sequences of {reach.longest_seq_len:,} tokens")
    return labelled("Maximum", ", or ".join(parts) + ", with this plan") if parts else []


def _fixes(
    scenario: Scenario,
    assessment: Assessment,
    ways_out: Sequence[WayOut],
    before: Sequence[str],
    verbose: bool,
) -> list[str]:
    """Return the ways out as text."""
    return fix_lines(fixes_of(scenario, assessment, ways_out), len(before), verbose=verbose)


def fixes_of(scenario: Scenario, assessment: Assessment, ways_out: Sequence[WayOut]) -> list[Fix]:
    """Return the ways out, each with its pace a token relative to the given plan."""
    accelerators = scenario.cluster.num_gpus / scenario.workload.tokens_per_step
    own = assessment.time.step_seconds * accelerators
    return [
        Fix(
            way.change,
            way.peak_bytes,
            pace(way.device_seconds_per_token * scenario.cluster.num_gpus / way.num_gpus, own),
            way.options,
            way.condition,
        )
        for way in ways_out
    ]


COLUMNS: Final = (
    ("dp", "data_parallel"),
    ("rep", "dp_replicate"),
    ("cp", "context_parallel"),
    ("cp method", "context_parallel_method"),
    ("tp", "tensor_parallel"),
    ("ep", "expert_parallel"),
    ("etp", "expert_tensor_parallel"),
    ("pp", "pipeline_parallel"),
    ("vp", "virtual_stages"),
    ("zero", "zero_stage"),
    ("sp", "sequence_parallel"),
    ("recompute", "recompute"),
    ("offload", "offload"),
    ("micro", "micro_batch_size"),
)
# columns shown only if a plan has another value
USUAL: Final[Mapping[str, object]] = {
    "dp_replicate": 1,
    "context_parallel": 1,
    "context_parallel_method": Plan().context_parallel_method,
    "tensor_parallel": 1,
    "expert_parallel": 1,
    "expert_tensor_parallel": True,
    "pipeline_parallel": 1,
    "virtual_stages": 1,
    "sequence_parallel": False,
    "offload": "none",
}
# columns that are left out first where the terminal is narrow
LEAST_IMPORTANT: Final = (
    "margin",
    "sp",
    "MFU",
    "tok/s/gpu",
    "cp method",
    "vp",
    "etp",
    "schedule",
    "rep",
)
NO_SCHEDULE: Final = "–"  # without a pipeline
SHORT_SCHEDULE: Final = {
    "interleaved_1f1b": "interleaved",
    "zero_bubble": "zero-bubble",
    "interleaved_zero_bubble": "interleaved zb",
}


def ranked_table(
    assessments: Sequence[Assessment],
    most: int | None = None,
    *,
    hint: bool = True,
    tie: Tie | None = None,
) -> list[str]:
    """Return a table of the plans, best first; plans with the same figures share a row.

    ``most``: rows; ``hint``: whether the number of the others is shown; ``tie``: marked steps.
    """
    rows, choices = ranked_rows(assessments, tie)
    lines, hidden = table_of_plans(rows, choices, LEAST_IMPORTANT, usual_cells(), most=most)
    return [*lines, more_rows(hidden)] if hidden and hint else lines


def usual_cells() -> dict[str, str]:
    """Return the cells of columns that are left out where every plan has them, by heading."""
    usual = {name: _cell(USUAL[field]) for name, field in COLUMNS if field in USUAL}
    return {**usual, "schedule": NO_SCHEDULE}


def more_rows(hidden: int) -> str:
    """Return the line below a table that is not whole."""
    return f"  {hidden} more with -v"


def shown_rows(rows: int | None, *, verbose: bool) -> int | None:
    """Return the number of rows of a table; None: all. ``rows``: those that --top gives."""
    return rows if rows is not None or verbose else MOST_ROWS


def ranked_rows(
    assessments: Sequence[Assessment], tie: Tie | None = None
) -> tuple[list[list[str]], int]:
    """Return the cells of the table with its head, and the number of columns of the plan.

    ``tie``: steps of these plans are marked with = where they split the ranks in another way than
    the first one.
    """
    heads = [*(name for name, _ in COLUMNS), "schedule"]
    rows = [[*heads, "GiB", "margin", "step", "tok/s/gpu", "MFU"]]
    limit = 0.0 if tie is None else (1.0 + CLOSE) * tie.seconds
    own = degrees(assessments[0].plan)
    for assessment in assessments:
        plan, time = assessment.plan, assessment.time
        cells = [
            recompute_cell(plan) if field == "recompute" else _cell(_shown_value(plan, field))
            for _, field in COLUMNS
        ]
        schedule = SHORT_SCHEDULE.get(plan.pipeline_schedule, plan.pipeline_schedule)
        cells.append(schedule if plan.pipeline_parallel > 1 else NO_SCHEDULE)
        cells.append(format_gib(assessment.memory.peak_bytes))
        cells.append(f"{100 * assessment.margin_bytes / assessment.budget.size:.0f} %")
        mark = "= " * (time.step_seconds <= limit and degrees(plan) != own)
        cells.append(f"{mark}{format_seconds(time.step_seconds)}")
        cells.append(format_per_second(time.tokens_per_second_per_gpu))
        cells.append("–" if time.mfu is None else f"{100 * time.mfu:.1f} %")
        rows.append(cells)
    return rows, len(heads)


def runner_up(assessments: Sequence[Assessment]) -> Assessment | None:
    """Return the first plan whose row is not that of the best one; None: all are alike."""
    rows, choices = ranked_rows(assessments)
    for row, assessment in zip(rows[2:], assessments[1:], strict=True):
        if len(without_doubles([rows[1], row], choices)) > 1:
            return assessment
    return None


def _shown_value(plan: Plan, field: str) -> object:
    """Return a field of a plan, at its usual value where it has no effect."""
    alone = {"context_parallel_method": "context_parallel"}
    alone["expert_tensor_parallel"] = "tensor_parallel"
    if field in alone and getattr(plan, alone[field]) == 1:
        return USUAL[field]
    return getattr(plan, field)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "–"
    return str(value)


def plan_text(
    scenario: Scenario,
    counts: Counts,
    ranked: Sequence[RankedPlan],
    *,
    assumptions: Sequence[str],
    further: Sequence[RankedPlan] = (),
    rows: int | None = None,
    tie: Tie | None = None,
    savings: Sequence[Saving] = (),
    trainers: Sequence[BestOfTrainer] = (),
    verbose: bool = False,
) -> str:
    """Return the answer of ``plan`` as text.

    ``ranked``: best first. ``tie``: plans that are as fast as the first one, which is the simplest
    of them; ``rows``: those of the table, where --top gives them; ``further``: plans behind the
    given number of plans, which fill the rows where several plans share one.
    """
    own, best = ranked[0], ranked[0].assessment
    lines = [*head(scenario), ""] if verbose else short_head(scenario)
    if best.verdict == "tight":
        lines += labelled("TIGHT", tight_words(scenario, best.plan))
    above, lines = lines, []
    lines += labelled("Best", short_plan_of(own.scenario, best.plan))
    lines += host_lines(best)
    lines += labelled("Step", time_line(best.time))
    if verbose:
        lines += labelled("", rates_line(best.time))
        lines += labelled("Bottleneck", bottleneck(best))
    else:
        lines += [_bottleneck_line(best.time)]
    other = runner_up([one.assessment for one in ranked])
    if tie is not None and tie.plans > 1 and (verbose or _is_tie(tie, best, other)):
        lines += labelled("Tie", tie_words(tie, best, verbose=verbose))
    before = len(lines)
    if other is not None:
        lines += labelled("Runner-up", _why_not(best, other, verbose=verbose))
    after = len(lines)
    if own.staged is not None:
        lines += labelled("Stages", stages_words(own.staged, verbose=verbose))
    if own.placed is not None:
        lines += labelled("Order", placed_words(own.placed, verbose=verbose))
    for place, saving in enumerate(savings if verbose else savings[:1]):
        words = saving_words(saving, verbose=verbose)
        lines += labelled("" if place else "Would save", words)
    if trainers:
        from planner.refinement.placement import can_be_placed  # large, and not for ``fit``

        usual = can_be_placed(scenario.cluster) and not any(one.order for one in trainers)
        order = ", default order of ranks" * usual
        if verbose:
            lines += labelled("Trainers", trainers_words(trainers) + order)
        else:
            last = f" (--software{order})"
            lines.append(labelled_line("Trainers", trainer_steps(trainers), last))
    if verbose:
        lines += labelled("Searched", searched(counts))
    lines += assumed(assumptions, verbose=verbose)
    if verbose:
        lines += labelled("Confidence", confidence_words(scenario))
    most = shown_rows(rows, verbose=verbose)
    if rows is None and most is not None:  # besides an empty line, head, hint and next command
        room = LINES - len(above) - len(lines) - 4
        if room < 2:  # a row of the table says more
            room += after - before
            del lines[before:after]
        most = max(1, min(most, room))
    shown = [one.assessment for one in (*ranked, *further)]
    if most is None or len(shown) <= most:
        shown[1:] = sorted(shown[1:], key=lambda one: one.time.step_seconds)
    table = ranked_table(shown, most, hint=rows is None, tie=tie)
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


def trainers_words(best: Sequence[BestOfTrainer]) -> str:
    """Return the steps of the trainers in words."""
    return f"{', '.join(trainer_steps(best))}; --software NAME shows its plan"


def trainer_steps(best: Sequence[BestOfTrainer]) -> list[str]:
    """Return the step of every trainer."""
    return [f"{one.software} {format_seconds(one.step_seconds)}" for one in best]


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


def _why_not(best: Assessment, other: Assessment, *, verbose: bool) -> str:
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
    return f"{by}: {TIME_WORDS[lost]} costs {format_seconds(difference)} more"


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
    words = (
        f"{counts.enumerated:,} candidates in {format_seconds(counts.seconds)}: "
        f"{counts.priced:,} legal and priced, {counts.too_large:,} too large, "
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
    """Return the gain of an order of ranks and its links, for the answer of ``plan``."""
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
        f"accelerators {shown}{more}; {'; '.join(map(_talk, placed.places))}; {proven}; that is "
        "what -o writes"
    )


def _talk(place: AxisPlace) -> str:
    """Return the links of the groups of an axis, in this order and in the default order.

    >>> from planner.refinement.placement import AxisPlace
    >>> _talk(AxisPlace("tensor", 2, 1.25e9, "PCIe switch", 25e9, "UPI", 5e9))
    'tensor groups of 2 (1.25 GB a step) talk over PCIe switch, 25 GB/s, instead of UPI, 5 GB/s'
    """
    kind = "stages in lines" if place.axis == "pipeline" else f"{place.axis} groups"
    words = f"{kind} of {place.size} ({place.sent / 1e9:.3g} GB a step)"
    here = f"{place.level}, {place.bandwidth / 1e9:.3g} GB/s"
    if not place.moved:
        return f"{words} stay on {here}"
    there = f"{place.usual_level}, {place.usual_bandwidth / 1e9:.3g} GB/s"
    return f"{words} talk over {here}, instead of {there}"
