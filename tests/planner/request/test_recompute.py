"""Recomputed layers as one types them: read, priced, written, typed again."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import planner
from cost_models.plan.workload import Workload
from cost_models.plan_file import read_plan_file
from hardware_profiles.errors import InputError
from planner.advice.changes import PinnedPlan, other_plans
from planner.assessment.reach import Reach
from planner.cli import app as cli
from planner.cli.app import app
from planner.runs.compare import compare
from planner.runs.replan import replan
from planner.search.space import enumerate_plans
from tests.samples import llama

CLUSTER = "8xA100-80GB"
OPTIONS: dict[str, Any] = {"seq_len": 256, "pipeline_parallel": 4}


@pytest.fixture(autouse=True)
def no_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """How far a plan can go is another question, and a long search."""
    monkeypatch.setattr("planner.answer.fit_answer.reach", lambda *_: Reach(None, None))


def fitted(**options: Any) -> Any:
    return planner.fit(llama(), CLUSTER, **{**OPTIONS, "recompute": "full", **options})


@pytest.mark.slow
def test_a_number_for_each_stage() -> None:
    answer = fitted(recompute_layers="2,1,0,0")
    assert answer.scenario.stage_recompute_layers == (2, 1, 0, 0)
    assert answer.to_dict()["stage_recompute_layers"] == [2, 1, 0, 0]
    assert answer.plan.recompute_layers == 0
    assert "--recompute full" in str(answer)
    assert "--recompute-layers 2,1,0,0" in str(answer)
    same = fitted(recompute_layers=[2, 1, 0, 0])
    assert same.assessment == answer.assessment
    whole, none = fitted(), fitted(recompute="none")
    peaks = [a.assessment.memory.stages for a in (whole, answer, none)]
    for stage, side in ((0, 0), (2, 2), (3, 2)):
        assert peaks[1][stage] == peaks[side][stage]


def test_a_share_of_the_layers() -> None:
    answer = fitted(recompute="full:1/2")
    assert (answer.plan.recompute, answer.plan.recompute_layers) == ("full", 1)
    assert answer.plan.recompute_every == 2
    assert "--recompute full:1/2" in str(answer)
    same = fitted(recompute_layers=1)  # of two layers a stage
    assert same.assessment.time == answer.assessment.time


def test_a_plain_number_keeps_its_meaning() -> None:
    answer = fitted(recompute_layers="1")
    assert answer.plan.recompute_layers == 1
    assert answer.scenario.stage_recompute_layers is None
    assert answer.assessment == fitted(recompute_layers=1).assessment


def test_which_layers_recompute_is_no_question_without_recomputation() -> None:
    answer = planner.fit(llama(), CLUSTER, recompute_layers="2,1,0,0", **OPTIONS)
    assert answer.plan.recompute == "full"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"recompute_layers": "2,1,0"}, ["recompute_layers = 2,1,0", "3 numbers for 4 stages"]),
        ({"recompute_layers": "3,1,0,0"}, ["recompute_layers = 3,1,0,0", "stage 0 has 2 layers"]),
        ({"recompute_layers": "0,0,0,0"}, ["recompute_layers = [0, 0, 0, 0]", "not all 0"]),
        ({"recompute_layers": "2,x"}, ["recompute_layers = 2,x", "such as 4,2,0,0"]),
        ({"recompute_layers": "-1"}, ["recompute_layers = -1"]),
        ({"recompute_layers": ""}, ["recompute_layers ="]),
        ({"recompute": "full:3/2"}, ["recompute = full:3/2", "1 <= n <= k"]),
        ({"recompute": "full:0/2"}, ["recompute = full:0/2"]),
        ({"recompute": "full:half"}, ["recompute = full:half", "such as full:1/2"]),
        ({"recompute": "ful:1/2"}, ["recompute", "Did you mean full"]),
        ({"recompute": "none:1/2"}, ["recompute_layers = 1", "got none"]),
        ({"recompute": "full:1/4"}, ["recompute full:1/4", "has 2 layers"]),
        ({"recompute": "full:1/2", "recompute_layers": 1}, ["choose one"]),
        ({"recompute": "none", "recompute_layers": "2,1,0,0"}, ["2,1,0,0", "got none"]),
    ],
)
def test_what_cannot_be_is_one_clear_line(options: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        fitted(**options)
    assert "\n" not in str(caught.value)
    for word in said:
        assert word in str(caught.value)


@pytest.mark.slow
def test_a_way_out_takes_back_which_layers_recompute() -> None:
    options = {"seq_len": 32768, "zero_stage": 3, "recompute": "full", "data_parallel": 8}
    answer = planner.fit("llama-3-8b", CLUSTER, recompute_layers="1", **options)
    assert answer.verdict == "does_not_fit"
    changes = other_plans(PinnedPlan(answer.scenario, answer.plan, answer.fixed))
    full = next(change for change in changes if change.change == "recompute full")
    assert full.options == "--recompute full --recompute-layers 0"
    anew = [w.options for w in answer.ways_out if w.kind == "search"]
    assert anew
    assert all(options.endswith("--recompute-layers 0") for options in anew)


@pytest.mark.slow
def test_search_and_file(tmp_path: Path) -> None:
    first, second, fewer = (tmp_path / f"{name}.json" for name in ("list", "share", "fewer"))
    command = ["plan", "llama-3.2-1b", CLUSTER, "--seq-len", "1024", "--fix"]
    listed = "pp=4,mbs=1,recompute=full,recompute_layers=4,2,0,0,tp=1"
    for words, output in ((listed, first), ("pp=4,mbs=1,tp=1,recompute=full:1/2", second)):
        result = CliRunner().invoke(app, [*command, words, "--output", str(output)])
        assert result.exit_code == 0, (result.output, result.exception)
    file = read_plan_file(first)
    assert file.stage_recompute_layers == (4, 2, 0, 0)
    assert "stage_recompute_layers" not in read_plan_file(second).to_dict()
    assert read_plan_file(second).plan.recompute_every == 2
    changed = {field: (a, b) for field, a, b in compare(first, second).changes}
    assert changed["stage_recompute_layers"] == ((4, 2, 0, 0), None)
    # as many layers in all
    terms = {term.name.strip(): term for term in compare(first, second).terms}
    assert terms["recompute"].left != terms["recompute"].right
    again = replan(first, 4).file  # other stages: which layers recompute is asked anew
    assert again.stage_recompute_layers is None
    with pytest.raises(SystemExit) as stop:
        cli.main(["fit", "gpt2", CLUSTER, "--recompute", "full", "--recompute-layers", "1,x"])
    assert stop.value.code == 2
    assert not fewer.exists()


def test_what_is_recomputed_around_what_is_kept(tmp_path: Path) -> None:
    none, ops, full = (fitted(recompute=name) for name in ("none", "selective_ops", "full"))
    peaks = [answer.assessment.memory.peak_bytes for answer in (none, ops, full)]
    assert peaks == sorted(peaks, reverse=True)
    times = [answer.assessment.time.parts.recompute for answer in (none, ops, full)]
    assert times == sorted(times)
    assert len(set(times)) == len(set(peaks)) == 3
    half = fitted(recompute="selective_ops:1/2")
    assert half.assessment.time.parts.recompute == pytest.approx(times[1] / 2)
    assert ops.to_dict()["not_run"] is None
    assert "--recompute selective_ops:1/2" in str(half)
    with pytest.raises(InputError, match="selective_ops with offload activations"):
        fitted(recompute="selective_ops", offload="activations")
    output = tmp_path / "plan.json"
    command = ["plan", "llama-3.2-1b", CLUSTER, "--seq-len", "1024", "--output", str(output)]
    result = CliRunner().invoke(app, [*command, "--fix", "recompute=selective_ops,mbs=1,pp=1"])
    assert result.exit_code == 0, (result.output, result.exception)
    assert read_plan_file(output).plan.recompute == "selective_ops"


def test_the_search_leaves_it_out_unless_it_is_pinned() -> None:
    for fixed, codes in (({}, [0, 1, 2]), ({"recompute": "selective_ops"}, [3])):
        table = enumerate_plans(llama(), Workload(256, 8), 8, fixed)
        assert sorted(set(table.recompute.tolist())) == codes
