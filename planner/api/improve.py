"""``improve()``: a better plan as a change of another trainer's file."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

from cost_models.legality.capabilities import capabilities
from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile
from cost_models.scenario import Scenario
from cost_models.units import format_bytes, format_seconds
from hardware_profiles.errors import InputError, NoLegalPlanError
from hardware_profiles.options import declared
from planner.answer.fit_answer import FitAnswer
from planner.answer.plan_answer import PlanAnswer
from planner.api.fit import fit
from planner.api.plan import fixed_parts, plan
from planner.assessment.assess import Assessment
from planner.assessment.verdict import VERDICTS, WORDS
from planner.exchange.edits.patch import Patch, PatchedFile
from planner.exchange.job import Job, settings_of
from planner.exchange.registry import open_config
from planner.request.command import describe_plan
from planner.request.executor_process import is_module
from planner.request.options.search import WholeRunOptions
from planner.request.requests import FitRequest, PlanRequest
from planner.search.simplicity import CLOSE
from planner.text.answer import SCHEMA_VERSION
from planner.text.paragraphs import labelled

OBJECTIVES: Final = ("time", "memory")
NOT_ASKED: Final = ("pareto", "find", "gpus_at_most", "to")  # of a search for one file
COMPARED: Final = 20  # plans of the search for which a changed file is tried
MOST_NOTES: Final = 2  # of plans that the file cannot state
Price = tuple[int, float]


@dataclass(frozen=True)
class Improved:
    """A file, the plan that it states, and the better one as a change of it."""

    source: str
    target: str
    title: str  # of the trainer
    before: Assessment
    after: Assessment | None  # None: nothing better
    patch: Patch | None
    notes: tuple[str, ...] = ()
    unstated: bool = False  # better plans exist, which the file cannot state

    @property
    def diff(self) -> str:
        """The unified diff of the file; "" where nothing is better."""
        return "" if self.patch is None else self.patch.diff(self.source)

    def __str__(self) -> str:
        lines = [f"Before     {_line(self.before)}"]
        if self.after is None or self.patch is None:
            target = self.target
            if self.unstated:
                words = f"better plans that the file cannot state; shardplan plan --to {target}"
                words += f" and shardplan export --to {target} write a new one"
                return "\n".join([*lines, *labelled("After", words)])
            words = f"no plan that {self.title} runs is better by {100 * CLOSE:g} % or more"
            return "\n".join([*lines, *labelled("After", words)])
        lines.append(f"After      {_line(self.after)}")
        for name, (value, where) in self.patch.elsewhere.items():
            lines += labelled("Set", f"{name} = {value}: {where}")
        if self.diff:
            lines += ["", self.diff.rstrip("\n")]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        elsewhere = {} if self.patch is None else self.patch.elsewhere
        return {
            "schema_version": SCHEMA_VERSION,
            "file": self.source,
            "before": self.before.to_dict(),
            "after": None if self.after is None else self.after.to_dict(),
            "diff": self.diff,
            "set_elsewhere": {
                name: {"value": value, "where": where} for name, (value, where) in elsewhere.items()
            },
            "notes": list(self.notes),
        }


def improve(request: PlanRequest) -> Improved:
    """Return the better plan that a file's trainer runs for the same training, as a change of it.

    ``source`` names the file. Batch, sequence length, precision, optimizer and all else that the
    weights after a step depend on stay as they are; parts of the plan that the file leaves open are
    those that ``fit`` finds. A plan is better with a better verdict, or with the same one and a
    step (``objective`` memory: a peak) that is lower by more than the search tells apart.
    """
    if request.source is None:
        raise InputError(
            "--improve changes a trainer's file: name it with --from, such as --from ds_config.json"
        )
    _refuse(request)
    file = open_config(request.source)
    before = fit(**_asked(request))
    assert isinstance(before, FitAnswer)
    old = Job(file_of(before.scenario, before.plan))
    patched = PatchedFile(file.target, file.text, file.where, file.path.parent, old)
    after, patch, notes = _best(request, before, patched)
    title = capabilities(file.target.name).title
    every = (*before.notes, *notes)
    unstated = after is None and bool(notes)
    name = file.target.name
    return Improved(str(file.path), name, title, before.assessment, after, patch, every, unstated)


def _refuse(request: PlanRequest) -> None:
    """Raise for questions that are not about one file on one cluster."""
    for name in NOT_ASKED:
        if getattr(request, name) is not None:
            raise InputError(f"--improve: without {declared(PlanRequest)[name].flags[0]}")
    if request.objective not in OBJECTIVES:
        known = " or ".join(OBJECTIVES)
        raise InputError(f"--improve: --objective {request.objective} (must be {known})")
    if is_module(request.model):
        raise InputError("--improve: is not for module:package.path:factory")


def _asked(request: PlanRequest) -> dict[str, Any]:
    """Return what the file and the command line state, as arguments of ``fit``."""
    names = {one.name for one in fields(FitRequest)} & {one.name for one in fields(PlanRequest)}
    whole = declared(WholeRunOptions)
    return {name: getattr(request, name) for name in names if name not in whole}


def file_of(scenario: Scenario, plan: Plan) -> PlanFile:
    """Return a plan as a file without predictions."""
    return PlanFile(
        scenario.model,
        scenario.cluster,
        scenario.workload,
        plan,
        default_layer_ranges(scenario, plan),
        software=scenario.software.name,
        stage_recompute_layers=scenario.stage_recompute_layers,
    )


def _search(
    request: PlanRequest, before: FitAnswer, target: str
) -> list[tuple[Scenario, Assessment]]:
    """Return the best plans of a target for the training of a file, and those of its ZeRO stage."""
    settings = settings_of(file_of(before.scenario, before.plan))
    names = {one.name for one in fields(PlanRequest)} - {"layers"}
    same = {name: value or None for name, value in settings.items() if name in names}
    same["master_weights"] = settings["master_weights"]
    allow = request.allow or ("offload" if before.plan.offload != "none" else None)
    top = request.top or COMPARED
    asked = {**vars(request), **same, "source": None, "to": target, "allow": allow, "top": top}
    fixed = fixed_parts(request.fix)
    pins = [fixed]
    if "zero_stage" not in fixed and capabilities(target).software_of_zero_stage:
        pins.append({**fixed, "zero_stage": before.plan.zero_stage})  # equally good, less to change
    found: dict[Plan, tuple[Scenario, Assessment]] = {}
    for fix in pins:
        try:
            answer = plan(**{**asked, "fix": fix})
        except NoLegalPlanError:
            continue
        if isinstance(answer, PlanAnswer):
            for one in (*answer.ranked, *answer.further):
                if not one.is_own:
                    found.setdefault(one.plan, (one.scenario, one.assessment))
    return list(found.values())


def _price(one: Assessment, objective: str) -> Price:
    amount = one.memory.peak_bytes if objective == "memory" else one.time.step_seconds
    return VERDICTS.index(one.verdict), amount


def _is_better(one: Price, other: Price) -> bool:
    """Whether a verdict is better, or the same with an amount that is clearly lower."""
    return one[0] < other[0] or (one[0] == other[0] and one[1] < (1.0 - CLOSE) * other[1])


def _best(
    request: PlanRequest, before: FitAnswer, patched: PatchedFile
) -> tuple[Assessment | None, Patch | None, list[str]]:
    """Return the better plan and its change of the file: among equally good ones the shortest."""
    now = _price(before.assessment, request.objective)
    priced = [
        (_price(one, request.objective), scenario, one)
        for scenario, one in _search(request, before, patched.target.name)
    ]
    better = sorted((each for each in priced if _is_better(each[0], now)), key=lambda each: each[0])
    notes: dict[str, None] = {}
    found: list[tuple[int, Price, Assessment, Patch]] = []
    first: Price | None = None  # of the best that the file can state
    for price, scenario, one in better:
        if first is not None and _is_better(first, price):
            break
        try:
            patch = patched.patch(Job(file_of(scenario, one.plan)))
        except InputError as error:
            notes[f"{describe_plan(one.plan)}: {error}"] = None
            continue
        first = first or price
        found.append((patch.changed_lines + len(patch.elsewhere), price, one, patch))
    if not found:
        return None, None, list(notes)[:MOST_NOTES]
    _, _, assessment, patch = min(found, key=lambda each: each[:2])
    return assessment, patch, []


def _line(one: Assessment) -> str:
    """Return verdict, step and peak in one line."""
    peak = f"peak {format_bytes(one.memory.peak_bytes)} of {format_bytes(one.budget.size)}"
    return f"{WORDS[one.verdict]}, {format_seconds(one.time.step_seconds)} a step, {peak}"
