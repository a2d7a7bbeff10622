"""Names from files stay names in everything that is written: no format lets them out."""

import ast
import csv
import io
import json
import re
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

import planner
from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.plan.plan import Plan
from cost_models.plan.workload import Workload
from cost_models.plan_file import PlanFile, read_plan_file, write_plan_file
from cost_models.scenario import Scenario
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import software_profile
from planner.exchange.job import Job
from planner.exchange.names import target_names
from planner.exchange.registry import target
from planner.launchers.job import LaunchOptions, System
from planner.launchers.launch import job_file
from planner.observation.run_row import append_row
from planner.reports.trace import trace
from planner.request.clusters import cluster_of
from planner.request.model import resolve_model
from planner.text import html_page

HOSTILE = (
    "=cmd('x')\" '; touch pwned; $(touch pwned) `touch pwned` ${IFS}&& touch pwned | sh\n"
    "touch pwned\r\n\x85\u2028EOF\n'''\n\"\"\"\nimport os\n]]\n[pwned]\npwned: 1\n- !!python/name:o"
    " \x1b[31m\x9b2J\u202e\x00 {{7*7}} {% x %} <script>touch(1)</script> */ --> \\"
)
ONE_LINE = HOSTILE.replace("\n", " ").replace("\r", " ")  # as a name in a file may be
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202e]")
SETTINGS = {
    "kubernetes": {"image": "me:1", "storage": "claim"},
    "skypilot": {"storage": "volume"},
    "ssh": {"hosts": "a,b"},
}


@cache
def plan_file(name: str) -> PlanFile:
    model, cluster = resolve_model("llama-3-8b"), parse_cluster("2x4xH100-SXM")
    workload = Workload(seq_len=4096, global_batch_size=8)
    plan = Plan(data_parallel=8, zero_stage=1)
    scenario = Scenario(model, cluster, workload, software_profile("torchtitan"))
    named = replace(model, name=name), replace(cluster, name=name)
    return PlanFile(*named, workload, plan, default_layer_ranges(scenario, plan), created_by=name)


def written(to: str, name: str) -> dict[str, str]:
    return target(to).write(Job(plan_file(name)), "1")


def with_names(value: Any, name: str, other: str) -> Any:
    """A document with one name in place of another."""
    if isinstance(value, dict):
        return {key: with_names(inner, name, other) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_names(inner, name, other) for inner in value]
    return value.replace(name, other) if isinstance(value, str) else value


@pytest.mark.parametrize("to", target_names())
def test_files_of_other_trainers(to: str) -> None:
    one = target(to)
    try:
        plain, files = written(to, "a-name"), written(to, HOSTILE)
    except InputError:
        pytest.skip(f"{to} knows its models by name")
    for path, text in files.items():
        assert not CONTROL.search(text), path
        if one.file == path:
            documents = [one.syntax.parse(found[path], path) for found in (plain, files)]
            for document in documents:
                document.pop("shardplan", None)  # the header of JSON, text of ours
            assert documents[1] == with_names(documents[0], "a-name", HOSTILE)
        outside = "\n".join(line for line in text.split("\n") if not line.startswith("#"))
        if path.endswith(".sh"):
            assert "touch" not in re.sub(r"'[^']*'", "", outside)
        elif path.endswith(".py"):
            ast.parse(text)
        elif path.endswith((".yaml", ".yml")):
            yaml.safe_load(text)


@pytest.mark.parametrize("system", get_args(System))
def test_job_files(system: Any, tmp_path: Path) -> None:
    folder = tmp_path / "a '; touch pwned; $(touch pwned) `touch pwned`"
    folder.mkdir()
    path = folder / "plan.json"
    document = plan_file(ONE_LINE).to_dict() | {"prediction": {HOSTILE: 1}}
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False))
    options = LaunchOptions(**SETTINGS.get(system, {}))
    _, text = job_file(path, system, ("--data", "x'; touch pwned"), options)
    if system in ("kubernetes", "skypilot"):
        for one in yaml.safe_load_all(text):
            assert "pwned" not in one
            held = [v for v in one.get("data", {}).values() if "schema_version" in v]
            assert [json.loads(contents) for contents in held] in ([], [document])
    elif system == "ray":
        ast.parse(text)
    else:
        script = "\n".join(line for line in text.split("\n") if "schema_version" not in line)
        words = shlex.split(script, comments=True)
        assert "touch" not in words


def test_a_trace_is_json(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan_file(path, plan_file(ONE_LINE))
    assert not CONTROL.search(text := trace(path).file_text())
    assert json.loads(text)["traceEvents"]


def test_a_name_cannot_pass_for_a_line_of_ours(tmp_path: Path) -> None:
    plan, cluster = tmp_path / "plan.json", tmp_path / "cluster.toml"
    plan.write_text(json.dumps(plan_file("a\nFITS").to_dict()))
    with pytest.raises(InputError, match=r'created_by = "a\\nFITS" \(must be one line\)'):
        read_plan_file(plan)
    cluster.write_text('nodes = 1\ngpus_per_node = 8\naccelerator = "L4\\nFITS"\n')
    with pytest.raises(InputError, match=r'accelerator = "L4\\nFITS"'):
        cluster_of(str(cluster))
    config = tmp_path / "deepspeed.json"
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "a\nFITS": 1}))
    notes = planner.fit("gpt2", "8xL4", source=str(config), tensor_parallel=1).notes
    assert any(r"a\nFITS" in note for note in notes)
    assert not any("\n" in note for note in notes)


def test_text_of_a_page() -> None:
    page = html_page.page(HOSTILE, html_page.element("p", HOSTILE))
    assert not CONTROL.search(page)
    assert "<script" not in page


def test_a_table_of_runs_holds_no_formula(tmp_path: Path) -> None:
    path = tmp_path / "RUNS.csv"
    append_row(path, {"seq_len": 8, "model": HOSTILE, "source": "+1", "derived": "@SUM(A1)"})
    (row,) = csv.DictReader(io.StringIO(path.read_text(), newline=""))
    assert not any(cell.startswith(("=", "+", "-", "@")) for cell in row.values())
    assert row["model"].startswith("'=cmd")
    assert not CONTROL.search(path.read_text())
