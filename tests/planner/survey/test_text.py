"""Answers of several clusters, fronts and inverse questions: short, with what was asked for."""

from typing import Any

import pytest

import planner
from planner.text.paragraphs import LINES
from tests.samples import LLAMA as SMALL

QUESTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "cost": ("2x4xA100-80GB", {"objective": "cost"}),
    "clusters": ("8xA100-80GB,8xH100-SXM,4xL40S,8xA30,8xL4,8xA40,2xH200", {}),
    "run": ("8xA100-80GB,8xH100-SXM", {"tokens": "100B", "price": 2}),
    "precisions": ("8xH100-SXM", {"precision": "bf16,fp8"}),
    "front": ("8xA100-80GB", {"pareto": "time,memory"}),
    "one": ("8xA100-80GB", {"tokens": "100B"}),
    "longest": ("4xA100-80GB", {"find": "longest-sequence"}),
    "fewest": ("8xA100-80GB", {"find": "fewest-gpus", "seq_len": 512}),
}


def rows_of(text: str) -> list[str]:
    """Rows of the last table, without its head."""
    table = [block for block in text.split("\n\n") if "✔" in block][-1].splitlines()
    first = next(number for number, line in enumerate(table) if line.startswith("✔"))
    return table[first:]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_short_answer_has_fifteen_lines_at_most(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, options = QUESTIONS[name]
    answer = planner.plan(SMALL, cluster, fix="pp=1,cp=1", **options)
    for columns in (80, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = answer.text().splitlines()
        assert len(lines) + 1 <= LINES  # and the next command
        assert max(map(len, lines)) <= columns
        assert any(line.startswith("Best ") for line in lines)
    whole = answer.text(verbose=True)
    assert "Searched" in whole
    assert "more with -v" not in whole


@pytest.mark.slow
def test_three_clusters_have_a_row_each_in_a_short_answer() -> None:
    job: dict[str, Any] = {"tokens": "10B", "price": 2, "find": "cheapest-cluster"}
    clusters, fixed = "8xA100-80GB,8xH100-SXM,16xL40S", "cp=2,pp=2"  # an answer of many lines
    answer = planner.plan("llama-3-8b", clusters, seq_len=8192, fix=fixed, **job)
    text = answer.text()
    assert len(rows_of(text)) == 3
    assert len(text.splitlines()) + 1 <= LINES
    assert "1 node of" not in text  # the table says it


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cluster", ["8xA100-80GB", "8xA100-80GB,8xH100-SXM"])
@pytest.mark.parametrize("top", [1, 3, 10])
def test_top_shows_as_many_rows(cluster: str, top: int) -> None:
    answer = planner.plan(SMALL, cluster, global_batch_size=64, fix="pp=1,cp=1", top=top)
    rows = rows_of(answer.text())
    assert len(rows) == len(set(rows)) == top
    assert "more with -v" not in answer.text()
    assert len(answer.to_dict()["plans"]) == len(answer.table) == top
    assert len(rows_of(answer.text(verbose=True))) >= top


def test_a_front_is_shown_from_end_to_end() -> None:
    answer = planner.plan(SMALL, "8xA100-80GB", fix="pp=1,cp=1", pareto="time,memory")
    rows = rows_of(answer.text())[:-1]  # without the number of those left out
    peaks = [f" {found.assessment.memory.peak_bytes / 2**30:.1f} " for found in answer.ranked]
    assert peaks[0] in rows[0]
    assert peaks[-1] in rows[-1]
