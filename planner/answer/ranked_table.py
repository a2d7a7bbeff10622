"""The table of ranked plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from cost_models.plan.plan import Plan
from cost_models.units import format_gib, format_per_second, format_seconds
from planner.assessment.assess import Assessment
from planner.request.stage_layers import recompute_cell
from planner.search.simplicity import CLOSE, degrees
from planner.text.tables import table_of_plans, without_doubles

if TYPE_CHECKING:
    from planner.search.simplicity import Tie


MOST_ROWS: Final = 4  # of a table in a short answer
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
