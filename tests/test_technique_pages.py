"""docs/techniques/: sections of every page, its examples, and the trainers that it names."""

import doctest
import re
from pathlib import Path
from typing import Any

import pytest

from cost_models.legality.capabilities import targets
from cost_models.plan.plan import Plan

FOLDER = Path(__file__).parents[1] / "docs" / "techniques"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
SECTIONS = ["What it costs", "Worked number", "When to take it", "In shardplan"]
EIGHT: dict[str, Any] = {"data_parallel": 8}


def pipeline(schedule: str) -> Plan:
    stages = 1 if schedule in ("gpipe", "1f1b", "zero_bubble") else 2
    return Plan(2, 1, 4, stages, schedule, num_microbatches=16)  # type: ignore[arg-type]


# the layouts whose trainers the row "exports" of a page names, together
LAYOUTS = {
    "tensor-parallel": [Plan(2, 4)],
    "sequence-parallel": [Plan(2, 4, sequence_parallel=True)],
    "context-parallel": [
        Plan(2, context_parallel=4),
        Plan(2, context_parallel=4, context_parallel_method="ulysses"),
        Plan(2, context_parallel=4, zero_stage=3),
    ],
    "gpipe": [pipeline("gpipe")],
    "1f1b": [pipeline("1f1b"), pipeline("interleaved_1f1b")],
    "zero-bubble": [pipeline("zero_bubble"), pipeline("interleaved_zero_bubble"), pipeline("zbv")],
    "dualpipe": [pipeline("dualpipev")],
    "zero": [Plan(8, zero_stage=stage) for stage in (1, 2, 3)],
    "offload": [
        Plan(8, zero_stage=2, offload="optimizer"),
        Plan(8, zero_stage=3, offload="weights"),
        Plan(8, zero_stage=3, offload="weights", offload_device="nvme"),
    ],
    "zero-plus-plus": [Plan(8, zero_stage=3, quantised_weights=True, quantised_gradients=True)],
    "experts": [Plan(8, expert_parallel=8)],
}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_page_has_its_sections_and_is_short(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = [title for title in re.findall(r"^## (.*)$", text, re.M) if title in SECTIONS]
    assert found == SECTIONS
    assert "**Source** " in text
    assert 40 <= len(text.splitlines()) <= 90
    rows = re.findall(r"^\| ([\w, ]+) \|", text.split("## In shardplan")[1], re.M)
    words = {word for row in rows for word in row.split(", ")}
    assert {"estimates", "plans", "runs", "exports"} <= words


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_worked_numbers_are_those_of_the_code(page: Path) -> None:
    failed, tried = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
    assert tried > 0
    assert failed == 0


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_the_trainers_of_a_page_are_those_that_run_its_layouts(name: str) -> None:
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| exports \| (.*) \|$", text, re.M)
    runnable = targets()
    named = {word for word in re.findall(r"[\w-]+", row) if word in runnable}
    able = {
        target
        for target, limits in runnable.items()
        for plan in LAYOUTS[name]
        if not limits.problems_of_plan(plan, experts=plan.expert_parallel > 1)
    }
    assert named == able


def test_the_index_has_every_page() -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", index)) == {page.name for page in PAGES}
