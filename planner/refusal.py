"""Why there is no plan: the rules and terms that removed the most candidates."""

from __future__ import annotations

from typing import Final

from cost_models.estimate import Setting
from cost_models.prediction import MEMORY_PARTS
from cost_models.units import format_bytes
from planner.document import plan_document
from planner.search import SearchResult
from planner.typed import describe_plan
from planner.verdict import budget_bytes

MOST_REASONS: Final = 3


def no_plan(setting: Setting, result: SearchResult) -> str:
    """Return the message for a search that found nothing."""
    counts = result.counts
    lines = [
        f"no plan for {setting.model.name} on {setting.cluster.name}: "
        f"{counts.enumerated:,} candidates, {counts.priced:,} legal, 0 fit"
    ]
    reasons = [
        (number, f"{number:,} candidates: {result.illegal_example[code]}")
        for code, number in counts.illegal.items()
    ]
    if result.smallest is not None:
        reasons.append((counts.too_large, _too_large(setting, result)))
    reasons.sort(key=lambda pair: -pair[0])
    lines += [f"  {words}" for _, words in reasons[:MOST_REASONS]]
    return "\n".join(lines)


def _too_large(setting: Setting, result: SearchResult) -> str:
    plan = result.smallest
    if plan is None:
        return ""
    memory = plan_document(setting, plan)["memory"]
    budget = format_bytes(budget_bytes(setting.cluster))
    largest = max(MEMORY_PARTS, key=lambda name: memory["parts"][name])
    return (
        f"{result.counts.too_large:,} candidates: too large; the smallest ({describe_plan(plan)}) "
        f"needs {format_bytes(memory['peak_bytes'])} of {budget} on stage "
        f"{memory['limiting_stage']}, most of it {largest} "
        f"({format_bytes(memory['parts'][largest])})"
    )
