"""``validate`` from end to end, on a few runs and on the published ones."""

import json
from pathlib import Path

import pytest

import planner
from hardware_profiles.errors import InputError
from planner.cli.app import main
from planner.validation.answer import FILES

RUNS = """\
row_id,source_group,framework,model,gpu,gpu_mem_gb,num_gpus,seq_len,micro_batch_size,\
global_batch_size,zero_stage,recompute,flash_attention,outcome,step_time_s,peak_memory_gib,\
memory_definition,usable
fine,mine,torch,llama-3-8b,A100-SXM,80,8,4096,1,8,3,full,1,ok,1.7,24,torch allocated,time+mem
died,mine,torch,llama-3-70b,A100-SXM,80,8,8192,4,32,0,none,1,oom,,,,oom
strange,mine,torch,nobody-knows,A100-SXM,80,8,4096,1,8,3,full,1,ok,1.7,,,time
vague,theirs,torch,llama-3-8b,A100-SXM,80,8,4096,,,3,,1,ok,,,,partial
"""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    path = tmp_path / "runs.csv"
    path.write_text(RUNS)
    return path


def test_the_page_shows_what_validate_prints(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "reference" / "validate.md"
    table, printed = page.read_text(encoding="utf-8").split("```text\n")[1:3]
    path = tmp_path / "runs.csv"
    path.write_text(table.split("```")[0])
    answer = planner.validate(path)
    assert answer.text().split("\n") == printed.split("```")[0].rstrip().split("\n")
    assert answer.rows.software.tolist() == ["fms-fsdp", "torch-trainer+deepspeed-zero3"]


def test_rows_are_compared_or_say_why_not(runs: Path) -> None:
    answer = planner.validate(runs)
    rows = answer.rows.set_index("row_id")
    fine = rows.loc["fine"]
    assert fine.predicted_step_seconds > 0
    assert fine.time_error == pytest.approx(fine.predicted_step_seconds / 1.7 - 1)
    assert fine.measured_peak_bytes == 24 * 2**30
    assert fine.memory_kind == "allocated"
    assert rows.loc["died"].verdict == "does_not_fit"
    assert "architecture is not given" in rows.loc["strange"].skipped
    assert any("micro_batch_size" in default for default in rows.loc["vague"].defaults)
    assert answer.summary["skipped"] == {rows.loc["strange"].skipped: 1}
    assert answer.summary["verdicts"]["died_said_to_fit"] == 0
    assert answer.summary["time"]["by"]["source_group"]["mine"]["n"] == 1
    assert set(answer.groups.what) == {"time", "memory"}


def test_a_step_faster_than_the_peak_is_shown_and_not_compared(runs: Path) -> None:
    """The tokens of all eight GPUs were taken for those of one."""
    runs.write_text(RUNS.replace("full,1,ok,1.7,24", "full,1,ok,0.2,24"))
    answer = planner.validate(runs)
    fine = answer.rows.set_index("row_id").loc["fine"]
    assert "times the accelerator's peak" in fine.impossible
    assert fine.measured_step_seconds == 0.2
    assert fine.time_error is None or fine.time_error != fine.time_error
    assert fine.memory_error == pytest.approx(fine.predicted_peak_bytes / (24 * 2**30) - 1)
    assert "times the accelerator's peak" in str(answer)


@pytest.mark.slow
def test_rows_that_deny_themselves_are_reported_apart() -> None:
    """Less was measured than weights, gradients and AdamW's moments take (words.toml)."""
    answer = planner.validate(only=["litgpt"], what="memory")
    rows = answer.rows.set_index("row_id")
    apart = rows[rows.partial]
    assert set(apart.model) == {"llama3.2-1b", "llama3.2-3b", "phi-3-mini"}
    assert set(apart.peft) == {"none"}
    assert apart.memory_error.notna().all()
    assert all("less was measured" in " ".join(said) for said in apart.defaults)
    memory = answer.summary["memory"]
    assert memory["partial"]["all_rows"]["n"] == 3
    assert memory["all_rows"]["n"] == int((rows.memory_error.notna() & ~rows.partial).sum()) == 60


def test_what_fit_predicts_is_what_validate_compares(runs: Path) -> None:
    fine = planner.validate(runs).rows.set_index("row_id").loc["fine"]
    fit = planner.fit(
        "llama-3-8b",
        "8xA100-SXM-80GB",
        seq_len=4096,
        global_batch_size=8,
        software=fine.software,
        zero_stage=3,
        recompute="full",
        micro_batch_size=1,
    ).to_dict()
    assert fine.predicted_step_seconds == fit["time"]["step_seconds"]
    parts = fit["memory"]["parts"]
    allocated = sum(parts.values()) - parts["runtime"]
    assert fine.predicted_peak_bytes == pytest.approx(allocated, rel=1e-12)
    assert fine.verdict == fit["verdict"]


def test_a_row_without_a_price_leaves_the_others(runs: Path) -> None:
    """Trainium2 has no matmuls in 4 bits."""
    names = RUNS.splitlines()[0] + ",precision"
    cells = "mine,torch,llama-3-8b,Trainium2,,16,4096,1,16,3,full,1,ok,9.0,,,time"
    runs.write_text(f"{names}\nplain,{cells},\nfour,{cells},nvfp4\nagain,{cells},\n")
    answer = planner.validate(runs)
    rows = answer.rows.set_index("row_id")
    assert rows.time_error.notna().to_list() == [True, False, True]
    assert rows.time_error["plain"] == rows.time_error["again"]
    assert "no rate is known for fp4" in rows.skipped["four"]
    assert (answer.summary["rows"], answer.summary["priced"]) == (3, 2)
    row = " ".join(str(answer).split("four  ")[1].split("again  ")[0].split())
    assert row.startswith("line 3 is not priced: Trainium2: no rate is known for fp4")


def test_good_rows_are_priced_and_every_bad_cell_is_listed(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = RUNS.splitlines()
    bad = "bad,mine,torch,llama-3-8b,A100-SXM,80,many,4096,1,8,9,full,1,ok,1.7,,,time"
    runs.write_text("\n".join([*lines[:2], bad, *lines[2:], lines[1], "short"]))
    listed = [
        ("line 3, column num_gpus", "'many' (must be a whole number from 1 to 1e+06, or empty)"),
        ("line 3, column zero_stage", "'9' (must be a whole number from 0 to 3, or empty)"),
        ("line 7, column row_id", "'fine' stands twice (first in line 2)"),
        ("line 8", "1 cells for 18 columns"),
    ]
    with pytest.raises(SystemExit) as stop:
        main(["validate", str(runs)])
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out.startswith("row ")
    assert "\nfine  " in out
    assert "\nbad  " not in out
    assert "4 rows, 3 priced" in out
    said = err.splitlines()
    assert said[0] == f"shardplan: {runs}: 4 errors"
    assert [tuple(line.strip().split(": ", 1)) for line in said[1:]] == listed
    with pytest.raises(SystemExit) as stop:
        main(["validate", str(runs), "--json"])
    assert stop.value.code == 2
    document = json.loads(capsys.readouterr().out)
    assert [(cell["line"], cell["column"]) for cell in document["bad_cells"]] == [
        (3, "num_gpus"),
        (3, "zero_stage"),
        (7, "row_id"),
        (8, None),
    ]
    assert document["bad_cells"][0]["value"] == "many"
    assert [row["line"] for row in document["rows"]] == [2, 4, 5, 6]
    answer = planner.validate(runs)
    assert str(answer).endswith("line 8: 1 cells for 18 columns")


def test_every_row_shows_prediction_measurement_and_error(tmp_path: Path) -> None:
    runs = tmp_path / "runs.csv"
    names = "step_time_s,tokens_per_second_per_gpu,mfu_pct,flops_definition,peak_memory_gib"
    head = (
        f"row_id,model,gpu,gpu_mem_gb,num_gpus,seq_len,zero_stage,outcome,memory_definition,{names}"
    )
    cells = "llama-3-8b,A100-SXM,80,8,4096,3"
    rows = (
        f"step,{cells},ok,torch allocated,1.7,,,,24",
        f"speed,{cells},ok,,,2600,,,",
        f"mfu,{cells},ok,,,,41,model,",
        f"died,{cells},oom,,,,,,",
        f"unknown,{cells.replace('llama-3-8b', 'none-such')},ok,,1,,,,",
    )
    runs.write_text("\n".join([head, *rows]))
    answer = planner.validate(runs)
    text = str(answer).split("\n\n")[0]
    assert max(map(len, str(answer).splitlines())) <= 80
    lines = [line.split() for line in text.splitlines()]
    records = {row["row_id"]: row for row in answer.to_dict()["rows"]}
    step = records["step"]
    assert lines[0] == ["row", "predicted", "measured", "error"]
    assert lines[1][:3] == ["step", "step,", "s"]
    assert lines[1][-4:] == [
        f"{step['predicted_step_seconds']:.2f}",
        "1.70",
        f"{100 * step['time_error']:+.1f}",
        "%",
    ]
    assert lines[2][:2] == ["allocated,", "GiB"]
    assert lines[2][-3:] == ["24.0", f"{100 * step['memory_error']:+.1f}", "%"]
    assert text.count("tokens/s per GPU") == text.count("MFU, %") == 1
    speed = records["speed"]
    assert speed["measured_tokens_per_second_per_gpu"] == 2600
    ratio = speed["predicted_tokens_per_second_per_gpu"] / 2600
    assert ratio == pytest.approx(1 / (1 + speed["time_error"]))
    mfu = records["mfu"]
    assert mfu["predicted_mfu"] / 0.41 == pytest.approx(1 / (1 + mfu["time_error"]))
    assert lines[7][0] == "died"
    assert lines[8][-2:] == ["ran", "out"]
    assert "line 6 is not priced: the architecture is not given" in " ".join(text.split())
    assert text.endswith("\nEmpty cells of 4 rows took defaults: --json lists them")


def test_a_preset_of_a_mixture_stands_among_the_mixtures(tmp_path: Path) -> None:
    runs = tmp_path / "runs.csv"
    cells = "H100-SXM,64,4096,3,8,1"
    rows = (f"mixture,mixtral-8x7b,{cells}", f"dense,llama-3-8b,{cells}")
    head = "row_id,model,gpu,num_gpus,seq_len,zero_stage,expert_parallel,step_time_s"
    runs.write_text("\n".join([head, *rows]))
    rows = planner.validate(runs).rows
    assert dict(zip(rows.row_id, rows.model_kind, strict=True)) == {
        "mixture": "moe",
        "dense": "dense",
    }


def test_words_without_a_meaning_are_listed_after_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        "row_id,framework,optimizer,recompute,notes,model,gpu,gpu_mem_gb,num_gpus,seq_len,outcome\n"
        "a,my trainer,adamw (shampoo blocks),full,foo=1,llama-3-8b,H100-SXM,80,8,2048,ok\n"
        "b,TRL,adamw (shampoo blocks),full,compile=0,llama-3-8b,H100-SXM,80,8,2048,ok\n"
    )
    answer = planner.validate(path)
    listed = str(answer)[str(answer).index("Not understood") :].splitlines()
    assert listed[:4] == [
        "Not understood, and not priced:",
        "  framework: my (a)",
        "  notes: foo=1 (a)",
        "  optimizer: shampoo (a and 1 more)",
    ]
    words = [row["not_understood"] for row in answer.to_dict()["rows"]]
    assert words == [
        ["framework: my", "notes: foo=1", "optimizer: shampoo"],
        ["optimizer: shampoo"],
    ]
    assert any("trainer unknown" in text for text in answer.rows.defaults[0])
    answer.write(tmp_path / "out")
    assert "optimizer: shampoo" in (tmp_path / "out" / FILES[0]).read_text()


def test_a_measurement_without_its_definition_is_named(tmp_path: Path) -> None:
    path = tmp_path / "RUNS.csv"
    path.write_text(
        "model,gpu,num_gpus,seq_len,step_time_s,tflops_per_gpu,peak_memory_gib,outcome\n"
        "llama-3-8b,H100-SXM,8,4096,1,,60,ok\n"
        "llama-3-8b,H100-SXM,8,4096,,400,,ok\n"
        "llama-3-8b,H100-SXM,8,4096,1,400,,ok\n"
        "llama-3-8b,H100-SXM,8,4096,,,60,oom\n"
    )
    answer = planner.validate(path)
    memory, flops = (
        "no memory_definition: the peak is not compared",
        "no flops_definition: tflops_per_gpu is not compared",
    )
    rows = answer.to_dict()["rows"]
    assert [row["lacks_definition"] for row in rows] == [memory, flops, None, None]
    assert memory in str(answer)
    assert flops in str(answer)
    time = planner.validate(path, what="time").to_dict()["rows"]
    assert [row["lacks_definition"] for row in time] == [None, flops, None, None]


def test_a_source_that_is_left_out_stays_beside_the_means(tmp_path: Path) -> None:
    header, *rows = RUNS.splitlines()
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([f"{header},left_out", f"{rows[0]},only a sketch", f"{rows[3]},"]))
    time = planner.validate(path).summary["time"]
    assert time["left_out"] == {"mine": "only a sketch"}
    assert time["over_groups"]["groups"] == []
    assert time["by"]["source_group"]["mine"]["n"] == 1


def test_a_file_without_a_good_row_is_refused(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.write_text(RUNS.replace(",4096,", ",many,"))
    with pytest.raises(SystemExit) as stop:
        main(["validate", str(runs)])
    assert stop.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"shardplan: {runs}: 3 errors"
    assert [line.split(":")[0].strip() for line in said[1:]] == [
        f"line {number}, column seq_len" for number in (2, 4, 5)
    ]


def test_time_or_memory_alone(runs: Path) -> None:
    time = planner.validate(runs, what="time")
    assert "memory" not in time.summary
    assert time.rows.measured_peak_bytes.isna().all()
    assert planner.validate(runs, what="memory").rows.measured_step_seconds.isna().all()
    assert len(planner.validate(runs, only="theirs").rows) == 1


def test_bad_questions_are_one_line(runs: Path) -> None:
    with pytest.raises(InputError, match=r"no source_group is 'mini'\. Did you mean mine"):
        planner.validate(runs, only=["mini"])
    with pytest.raises(InputError, match="what = 'speed'"):
        planner.validate(runs, what="speed")  # type: ignore[arg-type]
    runs.write_text(RUNS + RUNS.splitlines()[-1] + "\n")
    assert "'vague' stands twice" in str(planner.validate(runs).bad_cells[0])


def test_the_command_prints_one_json_document(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["validate", str(runs), "--json"])
    assert not stop.value.code
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"schema_version", "rows", "bad_cells", "summary"}
    assert document["rows"][0]["row_id"] == "fine"
    assert document["rows"][0]["time_inside"] in (True, False)
    assert document["rows"][1]["predicted_step_seconds"] is not None
    assert document["rows"][2]["predicted_step_seconds"] is None
    assert document["rows"][2]["defaults"] == []


def test_files_are_not_overwritten_unasked(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    for options, code in (([], 0), ([], 2), (["--force"], 0)):
        with pytest.raises(SystemExit) as stop:
            main(["validate", str(runs), "-o", str(folder), *options])
        assert (stop.value.code or 0) == code
    assert "exists already" in capsys.readouterr().err
    assert {path.name for path in folder.iterdir()} == set(FILES)
    with pytest.raises(SystemExit) as stop:
        main(["validate", "--time", "--memory"])
    assert stop.value.code == 2


@pytest.mark.slow
def test_the_published_tables_are_as_the_readme_says() -> None:
    answer = planner.validate(only=["megatron-sc21", "korthikanti-2022"], what="time")
    groups = answer.summary["time"]["by"]["source_group"]
    assert groups["megatron-sc21"]["mean_absolute_error"] < 0.05
    assert groups["korthikanti-2022"]["mean_absolute_error"] < 0.05
    text = str(answer)
    assert "megatron-sc21" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "<pre>" in answer._repr_html_()
