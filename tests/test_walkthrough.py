"""docs/tutorials/walkthrough.md: every command runs as it stands, one after the other."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "tutorials" / "walkthrough.md"


def commands() -> str:
    return "\n".join(re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE))


@pytest.mark.slow(seconds=160)
@pytest.mark.distributed
def test_the_page_runs_from_a_plan_to_a_text(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "bin").mkdir()
    for name, module in (("shardplan", "planner"), ("python", None)):
        script = tmp_path / "bin" / name
        run = f"-m {module} " if module else ""
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {run}"$@"\n')
        script.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SHARDPLAN_CACHE": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resharded: data_parallel 4 -> 1" in done.stderr
    assert "The keeper " in done.stdout.splitlines()[-1]
    run = json.loads((tmp_path / "tour" / "resumed" / "run.json").read_text())
    assert run["first_step"] >= 10
    assert run["steps_done"] == 40
    assert run["steps"][-1]["loss"] < 3.5
    assert json.loads((tmp_path / "tour" / "model" / "config.json").read_text())["model_type"]
