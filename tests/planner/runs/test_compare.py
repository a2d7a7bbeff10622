import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cost_models.plan.plan import Plan
from executor.run_folder import LOCK, claimed_folder
from hardware_profiles.cluster.calibration import scaled_rates
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.errors import InputError
from planner.cli.app import app
from planner.runs.compare import compare
from planner.runs.run_record import read_run
from tests.planner.runs.recorded import PLAN, machine, plan_file, write_plan, write_run

PIPELINE = Plan(pipeline_parallel=2, micro_batch_size=1, num_microbatches=4)
CONTEXT = Plan(context_parallel=2, micro_batch_size=4)


@pytest.mark.parametrize("plan", [PLAN, PIPELINE, CONTEXT])
def test_a_run_as_predicted_has_equal_terms(tmp_path: Path, plan: Plan) -> None:
    file = plan_file(plan=plan)
    run = write_run(tmp_path / "run", file, machine())
    found = compare(write_plan(tmp_path / "plan.json", file), run)
    assert len(found.terms) >= 8
    for term in found.terms:
        assert term.difference == pytest.approx(0.0, abs=1e-9), term
    assert any(term.name.endswith("(pipeline)") for term in found.terms) == (plan is PIPELINE)
    assert "inside the stated interval" in " ".join(found.explanation)


def test_a_run_of_two_steps_says_that_none_was_timed(tmp_path: Path) -> None:
    file = plan_file()
    run = write_run(tmp_path / "run", file, machine(), timed_steps=0)
    found = compare(write_plan(tmp_path / "plan.json", file), run)
    assert found.explanation == (
        "the run timed no step (at least three are needed: the first and the watched one do not "
        "count)",
    )


def test_a_run_that_was_killed_is_told_from_one_that_goes_on(tmp_path: Path) -> None:
    file = plan_file()
    folder = write_run(tmp_path / "run", file, machine())
    record = folder / "run.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "status": "running"}))
    with claimed_folder(folder, resume=True):
        assert read_run(folder).status == "running"
    assert read_run(folder).status == "killed"
    (folder / LOCK).touch()  # left by kill -9
    assert read_run(folder).status == "killed"
    found = compare(write_plan(tmp_path / "plan.json", file), folder)
    assert found.explanation[0].startswith("the run was killed: ")


def test_what_is_slower_is_named(tmp_path: Path) -> None:
    file = plan_file()
    slow = machine()
    slow = replace(slow, accelerator=scaled_rates(slow.accelerator, 0.25, "slow"))
    found = compare(
        write_plan(tmp_path / "plan.json", file), write_run(tmp_path / "run", file, slow)
    )
    by_name = {term.name: term for term in found.terms}
    assert by_name["step time"].difference == pytest.approx(-0.75, abs=0.1)
    words = found.explanation
    assert "longer than predicted" in words[0]
    assert words[1].strip().startswith("forward and backward, computing")
    assert "outside the stated interval" in " ".join(words)
    assert any("calibrate --from" in line for line in words)


def test_what_the_medians_of_phases_leave_is_said(tmp_path: Path) -> None:
    file = plan_file()
    run = write_run(tmp_path / "run", file, machine())
    record = json.loads((run / "run.json").read_text())
    record["measured"]["phase_seconds"]["forward_backward"] *= 0.9
    (run / "run.json").write_text(json.dumps(record))
    found = compare(write_plan(tmp_path / "plan.json", file), run)
    (words,) = [words for words in found.explanation if "the rest" in words]
    assert words.split(": ")[1].startswith("+")


def test_two_plans_differ_by_their_terms(tmp_path: Path) -> None:
    first = write_plan(tmp_path / "a.json", plan_file())
    other = replace(PLAN, zero_stage=3)
    second = write_plan(tmp_path / "b.json", plan_file(plan=other))
    found = compare(first, second)
    assert ("zero_stage", 1, 3) in found.changes
    total = found.terms[0]
    parts = [t for t in found.terms if t.unit == "seconds"][1:]
    assert sum((t.left or 0) - (t.right or 0) for t in parts) == pytest.approx(
        (total.left or 0) - (total.right or 0)
    )
    assert "faster a step" in found.explanation[0]
    third = write_plan(tmp_path / "c.json", replace(plan_file(), software="torch-trainer"))
    assert compare(first, third).changes == (("software", "shardplan", "torch-trainer"),)
    same = compare(first, first)
    assert same.changes == ()
    assert same.explanation == ("both take the same time",)


def test_a_run_of_another_plan_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", plan_file(), machine())
    other = write_plan(tmp_path / "b.json", plan_file(plan=replace(PLAN, zero_stage=3)))
    with pytest.raises(InputError, match="a run of another plan: zero_stage differ"):
        compare(other, run)


def test_an_illegal_plan_is_named_by_its_file(tmp_path: Path) -> None:
    good = write_plan(tmp_path / "good.json", plan_file())
    document = json.loads(good.read_text())
    document["plan"]["tensor_parallel"] = 3
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(document))
    for pair in ((good, bad), (bad, good)):
        with pytest.raises(InputError, match=r"bad\.json: .*ranks"):
            compare(*pair)


def test_a_gpu_plan_on_cpu_processes_is_not_judged(tmp_path: Path) -> None:
    file = plan_file(parse_cluster("2xA100-80GB"))
    run = write_run(tmp_path / "run", file, machine())
    found = compare(write_plan(tmp_path / "plan.json", file), run)
    assert found.explanation == (
        "times are not comparable: the plan was priced for 2 A100-SXM-80GB, the run used 2 CPU "
        "processes",
    )
    text = str(found)
    assert "% more" not in text.split("peak memory")[0]
    assert text.count("not comparable") > 2
    for term in found.terms:
        assert term.comparable == (term.unit != "seconds")
        assert term.difference is None or term.comparable


def test_on_the_command_line(tmp_path: Path) -> None:
    file = plan_file()
    plan = write_plan(tmp_path / "plan.json", file)
    run = write_run(tmp_path / "run", file, machine())
    shown = CliRunner().invoke(app, ["compare", str(plan), str(run)])
    assert shown.exit_code == 0
    assert "gradient norm, clipping, update" in shown.stdout
    told = json.loads(CliRunner().invoke(app, ["compare", str(plan), str(run), "--json"]).stdout)
    assert told["terms"][0]["name"] == "step time"
    assert told["schema_version"] == 1


BROKEN: dict[str, Any] = {
    "no run": (lambda d: d.clear(), "plan"),
    "ranks": (lambda d: d["measured"].update(ranks=[1]), "is not a run.json of this version"),
    "memory": (lambda d: d["measured"]["ranks"][0].pop("memory"), "not a run.json of this version"),
    "old": (lambda d: d["plan"].pop("contents"), "older version"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_run_is_named(tmp_path: Path, name: str) -> None:
    spoil, said = BROKEN[name]
    file = plan_file()
    run = write_run(tmp_path / "run", file, machine())
    document = json.loads((run / "run.json").read_text())
    spoil(document)
    (run / "run.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=said):
        compare(write_plan(tmp_path / "plan.json", file), run)
    with pytest.raises(InputError, match=r"holds no run\.json"):
        compare(tmp_path / "plan.json", tmp_path)
