"""Job files of every system, what is submitted, and a real job that loses a node."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from cost_models.plan.plan import Plan
from cost_models.plan_file import read_plan_file, write_plan_file
from hardware_profiles.cluster.catalogue import accelerators
from hardware_profiles.cluster.parse import parse_cluster
from planner.cli.app import main
from planner.launchers.job import System
from planner.launchers.skypilot import accelerator_name
from tests.executor.tiny import tiny

ROOT = Path(__file__).parents[3]
SYSTEMS = get_args(System)
PROGRAMS = {
    "slurm": "sbatch",
    "kubernetes": "kubectl",
    "skypilot": "sky",
    "ray": "ray",
    "ssh": "ssh",
}
SETTINGS = {
    "slurm": ["--partition", "long", "--time", "12:00:00"],
    "kubernetes": ["--image", "registry/me:1", "--storage", "claim"],
    "skypilot": ["--storage", "volume", "--spot"],
    "ray": [],
    "ssh": ["--hosts", "one,user@two"],
}
RUN = ["--data", "my corpus.txt", "--steps", "6"]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes of two GPUs with one rank each."""
    monkeypatch.chdir(tmp_path)
    return written(tmp_path / "plan.json", "2x1xH100-SXM-80GB")


def written(path: Path, cluster: str, **changes: Any) -> Path:
    layout = Plan(data_parallel=2, zero_stage=1, micro_batch_size=2, num_microbatches=2)
    file = tiny(replace(layout, **changes), vocab_size=256, precision="fp32", optimizer="adamw")
    write_plan_file(path, replace(file, cluster=parse_cluster(cluster)))
    return path


def launched(*words: Any) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["launch", *map(str, words)])
    return int(stop.value.code or 0)


def job_file(plan: Path, system: str, *words: str) -> str:
    path = plan.parent / "job"
    settings = [*SETTINGS[system], "--dry-run", "--force", "-o", path, *words]
    assert launched(plan, "--on", system, *settings, "--", *RUN) == 0
    return path.read_text()


# --- job files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("elastic", [False, True])
def test_the_sbatch_script(plan: Path, elastic: bool) -> None:
    text = job_file(plan, "slurm", *["--elastic"] * elastic)
    directives = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in text.splitlines()
        if line.startswith("#SBATCH ")
    )
    assert directives["nodes"] == ("1-2" if elastic else "2")
    assert directives["gpus-per-node"] == "1"
    assert "ntasks-per-node" not in directives  # Slurm would take the fewest nodes of a range
    assert 'srun --ntasks="$nodes" --ntasks-per-node=1' in text
    assert directives["partition"] == "long"
    assert directives["time"] == "12:00:00"
    assert {"requeue", "exclusive"} <= directives.keys()
    assert ("no-kill" in directives) is elastic
    assert ("planner replan" in text) is elastic
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_the_ssh_script_is_bash(plan: Path) -> None:
    text = job_file(plan, "ssh", "--elastic")
    assert "hosts=(one user@two)" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


@pytest.mark.parametrize("elastic", [False, True])
def test_the_train_job(plan: Path, elastic: bool) -> None:
    yaml = pytest.importorskip("yaml")
    text = job_file(plan, "kubernetes", *["--elastic"] * elastic)
    config, runtime, job = yaml.safe_load_all(text)
    assert json.loads(config["data"]["plan.json"]) == json.loads(plan.read_text())
    assert runtime["spec"]["mlPolicy"]["numNodes"] == 2
    trainer = job["spec"]["trainer"]
    assert trainer["numNodes"] == 2
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "1"}
    assert job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "TrainingRuntime",
        "name": runtime["metadata"]["name"],
    }
    script = config["data"]["node.sh"]
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_the_train_job_matches_the_types_of_kubeflow(plan: Path) -> None:
    yaml = pytest.importorskip("yaml")
    models = pytest.importorskip("kubeflow_trainer_api.models")
    _, runtime, job = yaml.safe_load_all(job_file(plan, "kubernetes", "--elastic"))
    for document, kind in ((runtime, "TrainingRuntime"), (job, "TrainJob")):
        read = getattr(models, f"TrainerV1alpha1{kind}").from_dict(document)
        assert json.loads(read.to_json()) == document  # unknown keys would be lost


def test_the_task_of_skypilot(plan: Path) -> None:
    yaml = pytest.importorskip("yaml")
    task = yaml.safe_load(job_file(plan, "skypilot"))
    assert task["num_nodes"] == 2
    assert task["resources"]["accelerators"] == "H100:1"
    assert task["resources"]["use_spot"] is True
    assert task["file_mounts"] == {"/tmp/shardplan/plan.json": str(plan)}
    assert task["volumes"] == {"/shared": "volume"}
    assert subprocess.run(["bash", "-n"], input=task["run"], text=True, check=False).returncode == 0


def test_the_task_is_read_by_skypilot(plan: Path) -> None:
    yaml = pytest.importorskip("yaml")
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml_config(yaml.safe_load(job_file(plan, "skypilot")))
    assert task.num_nodes == 2


def test_the_script_of_ray(plan: Path) -> None:
    module = ast.parse(job_file(plan, "ray", "--elastic"))
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert json.loads(values["PLAN"]) == json.loads(plan.read_text())
    assert (values["NODES"], values["RANKS_PER_NODE"], values["ELASTIC"]) == (2, 1, True)
    assert values["OPTIONS"][:4] == RUN
    assert "num_workers=(1, 2)" in ast.unparse(module)


@pytest.mark.parametrize("system", SYSTEMS)
def test_options_of_run_are_quoted_and_restarts_resume(plan: Path, system: str) -> None:
    text = job_file(plan, system)
    quoted = repr(RUN)[1:-1] if system == "ray" else shlex.join(RUN)
    assert quoted in text
    for flag in ("--output", "--resume", "--checkpoint-every", "--max-restarts"):
        assert flag in text


def test_given_options_of_run_come_first(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--", "-o", "/there", "--resume=/old", "--checkpoint-every=5", "--max-restarts", "0"]
    assert launched(plan, "--on", "slurm", "--dry-run", *words) == 0
    (line,) = re.findall(r"^options=\((.*)\)$", capsys.readouterr().out, re.M)
    assert shlex.split(line) == words[1:]


def test_a_plan_of_a_part_of_a_node_takes_no_whole_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "plan.json", "2x8xA100-80GB")
    assert launched(path, "--on", "slurm", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "--nodes=1\n" in out
    assert "--gpus-per-node=2\n" in out
    assert "--exclusive" not in out
    assert "--rendezvous" not in out


def test_names_of_skypilot_have_no_form_factor() -> None:
    names = {accelerator_name(one.name) for one in accelerators()}
    assert {"A100", "A100-80GB", "H100", "H200", "L4", "T4", "V100", "RTX4090", "B200"} <= names
    assert not any(re.search(r"SXM|PCIe", name) for name in names)


# --- submission -----------------------------------------------------------------------------------


def stub(folder: Path, program: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / program).write_text(f"#!/bin/bash\n{body}\n")
    (folder / program).chmod(0o755)


@pytest.mark.parametrize("system", [system for system in SYSTEMS if system != "ssh"])
def test_the_program_receives_the_job_file(
    system: str, plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = f'echo "$@" > {tmp_path}/words; for w; do [ ! -f "$w" ] || cp "$w" {tmp_path}/sent; done'
    stub(tmp_path / "bin", PROGRAMS[system], keep)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    assert launched(plan, "--on", system, *SETTINGS[system], "--", *RUN) == 0
    words = (tmp_path / "words").read_text().split()
    expected = {
        "slurm": [],
        "kubernetes": ["apply", "-f"],
        "skypilot": ["jobs", "launch", "--yes", "--detach-run"],
        "ray": ["job", "submit", "--working-dir"],
    }[system]
    assert words[: len(expected)] == expected
    if system != "ray":  # its words name the folder of the file
        assert (tmp_path / "sent").read_text() == job_file(plan, system)


def test_a_failed_submission_is_an_error(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub(tmp_path / "bin", "sbatch", "exit 3")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    assert launched(plan, "--on", "slurm") == 5
    assert "ended with exit code 3" in capsys.readouterr().err


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_missing_program_points_to_the_dry_run(
    system: str, plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launched(plan, "--on", system, *SETTINGS[system], "-o", "job") == 2
    assert f"{PROGRAMS[system]} is not on the PATH; --dry-run" in capsys.readouterr().err
    assert not Path("job").exists()


def test_an_existing_file_is_kept(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("job").write_text("mine")
    assert launched(plan, "--on", "slurm", "--dry-run", "-o", "job") == 2
    assert "exists already" in capsys.readouterr().err
    assert Path("job").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["slurm", "--image", "x"], "--image belongs to --on kubernetes or skypilot"),
        (["slurm", "--time", "soon"], "--time 'soon' (must be minutes, HH:MM:SS"),
        (["slurm", "--name", "My Job"], "--name 'My Job' (must be lower-case letters"),
        (["slurm", "--", "--nodes", "2"], "--nodes: launch sets it"),
        (["slurm", "--", "corpus.txt"], "'corpus.txt': options of run begin with --"),
        (["kubernetes", "--storage", "x"], "needs --image"),
        (["kubernetes", "--image", "x"], "needs --storage"),
        (["skypilot"], "needs --storage, where 2 nodes write"),
        (["skypilot", "--storage", "s3://x"], "the plan needs 2 nodes (name a volume)"),
        (["ssh"], "--hosts missing: the plan needs 2 different hosts"),
        (["ssh", "--hosts", "a"], "--hosts a: the plan needs 2 different hosts"),
        (["ssh", "--hosts", "a,b;reboot"], "'b;reboot': not the name of a host"),
        (["ray", "--", "--output", "here"], "--output here: must be an absolute path"),
        (["torque"], "torque"),
    ],
)
def test_bad_options_are_one_message(
    words: list[str], expected: str, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    system, *others = words
    assert launched(plan, "--on", system, "--dry-run", *others) == 2
    assert expected in " ".join(capsys.readouterr().err.split())


def test_tpus_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "plan.json", "4xTPU-v5p", data_parallel=4, num_microbatches=1)
    assert launched(path, "--on", "slurm", "--dry-run") == 2
    assert "GPUs and CPUs only" in " ".join(capsys.readouterr().err.split())


# --- a job that loses a node ----------------------------------------------------------------------


def steps_of(folder: Path) -> list[int]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record["step"] for record in map(json.loads, lines) if "loss" in record]


SRUN = """
while [ "${1:0:2}" = -- ]; do shift; done
pids=()
for rank in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do
    SLURM_NODEID=$rank setsid "$@" & pids+=($!)
done
if [ -n "${KILL_AT:-}" ]; then
    until test -d "runs/job/checkpoints/step-0000000$KILL_AT"; do sleep 0.1; done
    kill -9 "${pids[@]}"
fi
wait "${pids[0]}"
"""


def test_a_slurm_job_that_is_not_elastic_needs_all_its_nodes(plan: Path, tmp_path: Path) -> None:
    done = run_job(plan, tmp_path, nodes=1, elastic=False)
    assert done.returncode == 2
    assert "the plan needs 2 nodes, 1 are here" in done.stderr


def run_job(
    plan: Path, folder: Path, nodes: int, *, elastic: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the sbatch script as Slurm would, on one machine."""
    job = folder / "job"
    words = ["--on", "slurm", "--name", "job", "--dry-run", "--force", "-o", job]
    options = ["--steps", "6", "--checkpoint-every", "2"]
    assert launched(plan, *words, *["--elastic"] * elastic, "--", *options) == 0
    stub(folder / "bin", "srun", SRUN)
    stub(folder / "bin", "scontrol", 'echo "$@" >> scontrol.words; echo 127.0.0.1')
    return subprocess.run(
        ["bash", str(job)],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=280,
        check=False,
        env={
            **os.environ,
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_JOB_NODELIST": "nodes",
            "SLURM_JOB_ID": "7",
            **environment,
        },
    )


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        (6, "stopped", 6),
        (137, "finished", 0),  # a lost node's code, after which node 0 went on
        (137, "stopped", 6),
        (137, "failed", 137),
    ],
)
def test_a_stopped_slurm_job_is_requeued(
    code: int, status: str, expected: int, plan: Path, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "job"
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"status": status}))
    stub(tmp_path / "bin", "srun", f"exit {code}")
    stub(tmp_path / "bin", "scontrol", f'echo "$@" >> {tmp_path}/scontrol.words')
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "nodes",
        "SLURM_JOB_ID": "7",
    }
    job = job_file(plan, "slurm", "--elastic", "--name", "job")
    done = subprocess.run(["bash"], input=job, text=True, env=environment, check=False)
    assert done.returncode == expected
    requeued = "requeue 7" in (tmp_path / "scontrol.words").read_text()
    assert requeued == (expected == 6)


@pytest.mark.slow(seconds=60)
@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="starts ranks over gloo on lo")
def test_a_requeued_job_with_fewer_nodes_plans_again_and_resumes(
    plan: Path, tmp_path: Path
) -> None:
    lost = run_job(plan, tmp_path, nodes=2, KILL_AT="2")
    assert lost.returncode != 0
    done = run_job(plan, tmp_path, nodes=1)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "job"
    new, old = read_plan_file(folder / "plan-for-1-ranks.json"), read_plan_file(plan)
    assert new.plan.world_size == 1
    assert new.workload == old.workload  # the batch is kept
    assert re.search(r"resumed from \S*/checkpoints/step-0*[246] ", done.stderr)
    assert steps_of(folder)[-1] == 6
