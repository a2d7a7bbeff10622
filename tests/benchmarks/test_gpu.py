"""Measurements of one GPU: all of it runs on a CPU with small sizes."""

import csv
import json
import os
import time
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import accelerator_name, main, plan_line, summary
from benchmarks.gpu.child import ChildError, in_child
from benchmarks.gpu.plans import file_of, plans, predicted
from cost_models.legality.rules import legality_codes
from cost_models.plan.plan import PlanTable
from executor.support import check_supported
from hardware_profiles.cluster.parse import parse_cluster
from planner.assessment.verdict import budget_bytes


@pytest.mark.slow
def test_every_plan_is_legal_and_fits_on_one_h100_and_the_executor_runs_it() -> None:
    cluster = parse_cluster("1xH100-SXM")
    seen = set()
    for trained in plans():
        scenario, file = file_of(trained, cluster)
        assert legality_codes(scenario, PlanTable.from_plans([file.plan]))[0] == 0, trained.words
        check_supported(file)
        found = predicted(scenario, file)
        assert found["predicted_device"] < 0.95 * budget_bytes(cluster), trained.words
        assert found["predicted_allocated"] < found["predicted_reserved"]
        seen.add(trained.words)
    assert len(seen) == len(list(plans())) >= 40


@pytest.mark.parametrize(
    ("card", "gib", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100-SXM-80GB"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "A100-PCIe-40GB"),
        ("NVIDIA GH200 480GB", 95.6, "GH200-96GB"),
        ("Tesla V100-SXM2-16GB", 15.8, "V100-SXM2-16GB"),
        ("AMD Instinct MI300X", 192.0, "MI300X"),
    ],
)
def test_cards_are_found_by_the_names_that_torch_gives_them(
    card: str, gib: float, name: str
) -> None:
    assert accelerator_name(card, gib * 2**30) == name


def test_a_child_answers_or_says_what_was_wrong() -> None:
    assert in_child(divmod, 7, 2, timeout=20.0) == (3, 1)
    with pytest.raises(ChildError, match="ZeroDivisionError"):
        in_child(divmod, 7, 0, timeout=20.0)
    with pytest.raises(ChildError, match="exit code 3"):
        in_child(os._exit, 3, timeout=20.0)
    with pytest.raises(ChildError, match="longer than 0 s"):
        in_child(time.sleep, 20.0, timeout=0.2)


def test_lines_name_every_error() -> None:
    sizes = {f"{side}{kind}": 2.0**30 for side in ("", "predicted_") for kind in ("allocated",)}
    row = {"plan": "gpt2", "seconds": 1.0, "predicted_seconds": 1.5, "mfu": 0.25, **sizes}
    line = plan_line(row)
    assert "+50.0%" in line
    assert "MFU 25.0%" in line
    assert plan_line({"plan": "gpt2", "failed": "too slow"}).endswith("too slow")
    (text,) = summary([row, {"plan": "x", "failed": "y"}], ["seconds", "device"])
    assert "1 plans: median 50.0%" in text


@pytest.mark.slow(seconds=50)
@pytest.mark.distributed
def test_all_of_it_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tiny", "--out", str(tmp_path)]) == 0
    with (tmp_path / "plans.csv").open(encoding="utf-8", newline="") as stream:
        trained, adapted, unknown = csv.DictReader(stream)
    for row in (trained, adapted):
        assert float(row["seconds"]) > 0
        assert float(row["predicted_seconds"]) > 0
        assert not row["failed"]
    assert "gpt-7" in unknown["failed"]
    with (tmp_path / "kernels.csv").open(encoding="utf-8", newline="") as stream:
        operations = {row["op"] for row in csv.DictReader(stream)}
    assert {"copy", "launch", "matmul", "attention forward", "attention backward"} <= operations
    assert json.loads((tmp_path / "device.json").read_text(encoding="utf-8"))["torch"]
    assert "seconds      2 plans" in capsys.readouterr().out


def test_without_a_gpu_it_ends_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith("benchmarks.gpu: ")
    assert not (tmp_path / "out").exists()


def test_a_folder_is_compared_with_predictions_of_today(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {
        "device.json": '{"name": "NVIDIA H200", "accelerator": "H200-SXM-141GB"}',
        "kernels.csv": "op,precision,shape,seconds,predicted\n"
        "copy,,bytes=1073741824,1.0,1.5\n"
        'matmul,bf16,"m=512, k=4096, n=50257",1.0,0.5\n'
        "copy to host,,bytes=1048576,1.0,\n",
        "plans.csv": "plan,failed,seconds,predicted_seconds,reserved,predicted_reserved\n"
        "gpt2 1024x8,,1e-3,1.5e-3,1e6,2e6\n"
        "gpt-7 64x1,no such model,,,,\n",
        "trainers.csv": "row_id,model,seq_len,gpu,num_gpus,micro_batch_size,step_time_s\n"
        "one,gpt2,1024,H200-SXM-141GB,1,8,1.0\n",
    }
    for name, text in measured.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert main(["--compare", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    rows, table = shown.split("\n\n")
    assert len(rows.splitlines()) == 5  # no figure without a measurement or a prediction
    assert "bf16 matmul, rows not aligned" in table
    assert table.count("+50.0%") >= 4  # of the copy, when measured: median, bias, least and most
    assert "trainers: seconds" in table


def test_a_folder_without_measurements_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--compare", str(tmp_path)]) == 1
    assert "no measurements in" in capsys.readouterr().err
