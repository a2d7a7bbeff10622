"""The command line: exit codes, one JSON document, one line for each error."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cost_models.plan.plan import Plan
from cost_models.plan_file import read_plan_file
from hardware_profiles.fields import names_in
from hardware_profiles.options import declared
from planner import fit
from planner.cli import app as cli
from planner.request.pins import parse_fixed, pinned
from tests.samples import LLAMA

FIT = ["fit", "llama-3.2-1b", "8xA100-80GB", "--seq-len", "512"]
PLAN = ["plan", "llama-3.2-1b", "8xA100-80GB", "--seq-len", "512"]


class Ran:
    """What a command left behind."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} in the JSON")

        return json.loads(self.out, parse_constant=refuse)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*words: str) -> Ran:
        try:
            cli.main([str(word) for word in words])
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def write(config: Path, **changes: Any) -> Path:
    config.write_text(json.dumps(LLAMA | changes))
    return config


# --- answers --------------------------------------------------------------------------------------


def test_fits(run: Any) -> None:
    ran = run(*FIT)
    assert ran.code == 0
    assert ran.err == ""
    assert "FITS" in ran.out
    assert "DOES NOT FIT" not in ran.out


def test_does_not_fit(run: Any) -> None:
    ran = run("fit", "llama-3-70b", "1xA100-40GB")
    assert ran.code == 3
    assert "DOES NOT FIT" in ran.out
    assert "FITS with" not in ran.out
    assert "Fixes" in ran.out


@pytest.mark.slow
def test_tight(run: Any) -> None:
    """Somewhere between a sequence that fits and one that does not lies a tight one."""
    low, high, found = 1024, 2**20, ""
    while found != "tight":
        middle = (low + high) // 2
        found = fit("llama-3.2-1b", "1xA100-80GB", recompute="none", seq_len=middle).verdict
        low, high = (middle, high) if found == "fits" else (low, middle)
    base = ["fit", "llama-3.2-1b", "1xA100-80GB", "--recompute", "none", "--json"]
    ran = run(*base, "--seq-len", str(middle))
    assert ran.code == 4
    memory = ran.json["memory"]
    assert ran.json["verdict"] == "tight"
    assert memory["low_bytes"] <= memory["budget_bytes"] < memory["high_bytes"]


def test_json_of_fit(run: Any) -> None:
    ran = run(*FIT, "--json")
    answer = ran.json
    assert ran.err == ""
    keys = names_in("""
        schema_version verdict model cluster workload plan memory time assumptions confidence
        ways_out
    """)
    assert set(keys) <= set(answer)
    assert {"name", "parameters", "active_parameters"} <= set(answer["model"])
    assert {"name", "num_gpus"} <= set(answer["cluster"])
    memory, time = answer["memory"], answer["time"]
    assert {"peak_bytes", "low_bytes", "high_bytes", "budget_bytes", "limiting_stage"} <= set(
        memory
    )
    parts = names_in("weights gradients optimizer activations logits buffers runtime")
    assert tuple(memory["parts"]) == parts
    assert {"step_seconds", "low_seconds", "high_seconds", "mfu", "hfu"} <= set(time)
    assert sum(memory["parts"].values()) == pytest.approx(memory["peak_bytes"])
    assert sum(time["parts"].values()) == pytest.approx(time["step_seconds"])
    assert memory["low_bytes"] < memory["peak_bytes"] < memory["high_bytes"]
    assert time["hfu"] >= time["mfu"]
    assert answer["workload"]["seq_len"] == 512


def test_json_of_plan(run: Any) -> None:
    ran = run(*PLAN, "--json", "--top", "4")
    answer = ran.json
    assert ran.code == 0
    assert {"schema_version", "plans", "search"} <= set(answer)
    assert len(answer["plans"]) == 4
    for plan in answer["plans"]:
        assert {"plan", "memory", "time"} <= set(plan)
    steps = [plan["time"]["step_seconds"] for plan in answer["plans"]]
    assert steps == sorted(steps)
    search = answer["search"]
    assert {"enumerated", "illegal", "too_large", "priced", "simulated", "seconds"} <= set(search)
    assert search["enumerated"] == search["priced"] + sum(search["illegal"].values())


def test_fit_and_plan_agree_on_a_plan(run: Any) -> None:
    best = run(*PLAN, "--json", "--top", "1").json["plans"][0]
    plan = best["plan"]
    words = ["--dp", plan["data_parallel"], "--tp", plan["tensor_parallel"]]
    words += ["--pp", plan["pipeline_parallel"], "--zero", plan["zero_stage"]]
    words += ["--recompute", plan["recompute"], "--micro-batch-size", plan["micro_batch_size"]]
    words += ["--num-microbatches", plan["num_microbatches"], "--global-batch-size", "8"]
    fitted = run(*FIT, *words, "--json").json
    assert fitted["plan"] == plan
    assert fitted["memory"]["peak_bytes"] == best["memory"]["peak_bytes"]
    assert fitted["time"]["step_seconds"] == best["time"]["step_seconds"]


def test_plan_writes_a_file_and_keeps_an_existing_one(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    ran = run(*PLAN, "-o", path, "--json")
    assert ran.code == 0
    assert read_plan_file(path).plan.to_dict() == ran.json["plans"][0]["plan"]
    before = path.read_bytes()
    again = run(*PLAN, "-o", path)
    assert again.code == 2
    assert "exists already" in again.err
    assert path.read_bytes() == before
    assert run(*PLAN, "--fix", "tp=2", "-o", path, "--force").code == 0
    assert read_plan_file(path).plan.tensor_parallel == 2


def test_lists(run: Any) -> None:
    for words in (["models"], ["hardware"], ["models", "gpt2"], ["hardware", "H100-SXM"]):
        assert run(*words).code == 0
        assert run(*words, "--json").json["schema_version"] == 1
    names = {entry["name"] for entry in run("models", "--json").json["models"]}
    assert {"llama-3-8b", "gpt2", "mixtral-8x7b"} <= names


@pytest.mark.slow
def test_a_config_file_and_its_folder_are_the_same_model(run: Any, config: Path) -> None:
    by_file, by_folder = (
        run("fit", path, "1xA100-80GB", "--json").json for path in (config, config.parent)
    )
    assert by_file["memory"] == by_folder["memory"]


# --- names that people type ---


@pytest.mark.parametrize("words", ["H100", "8xH100", "16x8xH100"])
def test_a_name_of_several_accelerators_lists_them(run: Any, words: str) -> None:
    lines = run("hardware", words).out.splitlines()
    names = [f"H100-{kind}GB" for kind in ("SXM-80", "SXM-96", "SXM-64", "PCIe-80", "NVL-94")]
    assert [line.split()[0] for line in lines[1:6]] == names
    assert "GiB" in lines[1]
    assert lines[6].startswith("H100 is taken as H100-SXM-80GB")
    assert "shardplan hardware" not in lines[6]  # the others stand above


def test_words_after_the_cluster_are_options(run: Any) -> None:
    def answer(*words: str) -> Any:
        return run(*words, "--json").json

    typed = answer("fit", "gpt2", "8xH100", "tp=4", "seq_len=1k")
    assert typed == answer("fit", "gpt2", "8xH100", "--tp", "4", "--seq-len", "1024")
    pinned = answer("plan", "gpt2", "8xH100", "tp=2", "zero=1", "--top", "1")
    fixed = answer("plan", "gpt2", "8xH100", "--fix", "tp=2,zero=1", "--top", "1")
    assert pinned["plans"] == fixed["plans"]


# --- bad input ------------------------------------------------------------------------------------

BAD: dict[str, tuple[list[str], str]] = {
    "missing file": (["fit", "./nowhere.json", "8xA100-80GB"], "no such file"),
    "unknown model": (["fit", "lama-3-8b", "8xA100-80GB"], "llama-3-8b"),
    "unknown accelerator": (["fit", "gpt2", "8xA100-80GBB"], "A100"),
    "letter for digit": (["fit", "gpt2", "8xA10O-80GB"], "A100"),
    "ambiguous accelerator": (["fit", "gpt2", "8xV100"], "V100-PCIe-32GB"),
    "no accelerators": (["fit", "gpt2", "0xA100-80GB"], "0"),
    "too many accelerators": (["fit", "gpt2", "9999999x8xA100-80GB"], "1,000,000"),
    "empty cluster": (["fit", "gpt2", ""], "cluster"),
    "empty model": (["fit", "", "8xA100-80GB"], "model"),
    "seq_len 0": ([*FIT[:3], "--seq-len", "0"], "--seq-len 0"),
    "seq_len negative": ([*FIT[:3], "--seq-len", "-1"], "--seq-len -1"),
    "seq_len huge": ([*FIT[:3], "--seq-len", "1" + "0" * 30], "--seq-len 1"),
    "seq_len text": ([*FIT[:3], "--seq-len", "4x"], "seq-len"),
    "targets of a decoder": ([*FIT[:3], "--target-seq-len", "128"], "no encoder and decoder"),
    "longer than positions": (["fit", "gpt2", "8xA100-80GB", "--seq-len", "2048"], "1024 learned"),
    "batch 0": ([*FIT, "--global-batch-size", "0"], "--global-batch-size 0"),
    "micro-batch 0": ([*FIT, "--micro-batch-size", "0"], "--micro-batch-size 0"),
    "micro-batch negative": ([*FIT, "--micro-batch-size", "-3"], "--micro-batch-size -3"),
    "batch not divisible": (
        [*FIT, "--dp", "8", "--global-batch-size", "9"],
        "--global-batch-size 9",
    ),
    "precision": ([*FIT, "--precision", "bf61"], "bf16"),
    "optimizer": ([*FIT, "--optimizer", "adamm"], "adamw"),
    "attention": ([*FIT, "--attention", "flsh"], "flash"),
    "software": ([*FIT, "--software", "megatorn"], "Did you mean megatron"),
    "tp 3": ([*FIT, "--tp", "3"], "does not divide"),
    "tp 0": ([*FIT, "--tp", "0"], "--tp 0"),
    "tp huge": ([*FIT, "--tp", "9" * 25], "--tp 9"),
    "pp 16": ([*FIT, "--pp", "16"], "does not divide the 8"),
    "dp 3": ([*FIT, "--dp", "3"], "8 ranks"),
    "zero 4": ([*FIT, "--zero", "4"], "--zero 4"),
    "recompute": ([*FIT, "--recompute", "ful"], "Did you mean full"),
    "schedule": ([*FIT, "--schedule", "1F1B"], "1f1b"),
    "virtual stages alone": ([*FIT, "--pp", "1", "--virtual-stages", "2"], "--virtual-stages 2"),
    "unknown option": ([*FIT, "--sequence-length", "3"], "--sequence-length"),
    "unknown command": (["fits", "gpt2", "8xA100-80GB"], "fits"),
    "no arguments": (["fit"], "Missing argument 'MODEL'"),
    "top 0": ([*PLAN, "--top", "0"], "--top 0 (must be a whole number from 1 to 1,000)"),
    "top negative": ([*PLAN, "--top=-1"], "--top -1 (must"),
    "top text": ([*PLAN, "--top", "many"], "'--top': 'many' is not a whole number"),
    "more processes than we start": (["fit", "gpt2", "here:1000"], "from 1 to 128"),
    "a device as a model": (["fit", "/dev/zero", "8xA100-80GB"], "not a regular file"),
    "fix unknown": ([*PLAN, "--fix", "tpp=2"], "Did you mean tp"),
    "fix contradictory": ([*PLAN, "--fix", "tp=2,tp=4"], "given twice, as 2 and as 4"),
    "fix text": ([*PLAN, "--fix", "tp=two"], "whole number"),
    "fix nonsense": ([*PLAN, "--fix", "foo=2"], "zero, sp, recompute, mbs"),
    "a part of a plan, to plan": ([*PLAN, "--tp", "2"], "pin it with --fix tp=2"),
    "another part": ([*PLAN, "--micro-batch-size", "2"], "pin it with --fix mbs=2"),
    "an option of fit, to plan": ([*PLAN, "--inference"], "shardplan fit has it"),
    "an option of plan, to fit": ([*FIT, "--top", "3"], "shardplan plan has it"),
    "quantised lora": ([*FIT, "--lora", "8", "--quantisation", "nf4"], "belongs to --qlora"),
    "a value alone": ([*FIT, "fp16"], "Did you mean --precision fp16?"),
    "memory without unit": ([*PLAN, "--require", "memory<=70"], "70GiB, with its unit"),
    "half a failure figure": ([*FIT, "--tokens", "1T", "--failures", "mtbf"], "between them."),
    "a size beyond all": (["fit", "99999999b", "8xA100-80GB"], "from 20m to 2t"),
    "no such folder": ([*PLAN, "-o", "/nowhere/plan.json"], "/nowhere"),
    "output is a folder": ([*PLAN, "-o", "/"], "is a folder"),
    "unknown preset": (["models", "lama-3-8b"], "llama-3-8b"),
    "unknown hardware": (["hardware", "H10O"], "H100"),
    "a module, cut inside": (["fit", "module:os:system", "8xA100-80GB", "--tp", "2"], "data ranks"),
    "a module in a file": (["plan", "module:m:f", "8xA100-80GB", "-o", "m.json"], "unknown"),
    "a module explained": (["fit", "module:m:f", "8xA100-80GB", "--explain"], "known layers"),
    "input without module": (["fit", "gpt2", "8xA100-80GB", "--input", "x=int64[B]"], "belongs to"),
    "a module's sequences": (["fit", "module:m:f", "8xA100-80GB", "--seq-len", "8"], "no meaning"),
}


def assert_one_clear_error(ran: Ran, code: int = 2) -> None:
    assert ran.code == code
    assert ran.out == ""
    assert "Traceback" not in ran.err
    assert "a bug of ours" not in ran.err
    assert ran.err.strip()
    assert len(ran.err.splitlines()) == 1
    assert ran.err.startswith("shardplan: ")


def test_every_way_to_pin_a_part_that_an_error_shows_is_one() -> None:
    for name, one in declared(Plan).items():
        for flag in (*one.flags, *one.off_flags):
            words = pinned(flag)
            assert words is not None, flag
            assert name in parse_fixed(words)


@pytest.mark.parametrize("command", ["fit", "plan", "models", "compare"])
def test_short_help(run: Any, command: str) -> None:
    ran = run(command, "-h")
    assert ran.code == 0, ran.err
    assert "--help" in ran.out


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_line_and_exit_code_2(run: Any, name: str) -> None:
    words, said = BAD[name]
    ran = run(*words)
    assert_one_clear_error(ran)
    assert said in ran.err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": -64}, "hidden_size = -64"),
        ({"hidden_size": 0}, "hidden_size = 0"),
        ({"hidden_size": "64"}, 'hidden_size = "64"'),
        ({"hidden_size": 10**40}, "hidden_size = 1"),
        ({"hidden_size": float("nan")}, "NaN"),
        ({"vocab_size": None}, "vocab_size = null"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "divisor of hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"model_type": "lama"}, "Did you mean llama or llama4?"),
    ],
)
def test_a_bad_config_is_one_clear_line(
    run: Any, config: Path, changes: dict[str, Any], said: str
) -> None:
    ran = run("fit", write(config, **changes), "8xA100-80GB")
    assert_one_clear_error(ran)
    assert said in ran.err
    assert "config.json" in ran.err


@pytest.mark.parametrize("text", ["", "{", "[]", "not json", "[" * 10_000, " " * 5_000_000])
def test_a_file_that_is_no_config_is_one_clear_line(run: Any, config: Path, text: str) -> None:
    config.write_text(text)
    ran = run("fit", config, "8xA100-80GB")
    assert_one_clear_error(ran)
    assert str(config) in ran.err


def test_no_legal_plan_is_exit_code_3_with_the_rules(run: Any) -> None:
    ran = run(*PLAN, "--fix", "tp=3")
    assert ran.code == 3
    assert ran.out == ""
    assert "tp 3" in ran.err
    ran = run(*PLAN, "--global-batch-size", "8", "--fix", "tp=2,pp=1,cp=1,mbs=8")
    assert ran.code == 3
    assert "mbs 8" in ran.err


@pytest.mark.slow
def test_nothing_fits_is_exit_code_3_with_the_smallest_plan(run: Any) -> None:
    ran = run("plan", "llama-3-70b", "2xA100-80GB", "--seq-len", "512")
    assert ran.code == 3
    assert "0 fit" in ran.err
    assert "the smallest" in ran.err
    assert ran.out == ""


def test_our_own_bug_is_one_line_and_exit_code_1(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("planner.api.fit.fit", broken)
    ran = run(*FIT)
    assert ran.code == 1
    assert ran.err.count("\n") == 1
    assert "boom" in ran.err
    assert "--traceback" in ran.err
    with pytest.raises(RuntimeError, match="boom"):
        cli.main([*FIT, "--traceback"])


def test_an_interruption_is_exit_code_130(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("planner.api.fit.fit", stopped)
    ran = run(*FIT)
    assert (ran.code, ran.err) == (130, "shardplan: interrupted\n")


def test_an_interruption_while_it_loads_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    done = subprocess.run(
        [sys.executable, "-c", "from planner.__main__ import main; main()"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "shardplan: interrupted\n")


def test_no_words_at_all_show_the_help(run: Any) -> None:
    ran = run()
    assert ran.code == 2
    assert ran.err.startswith("Usage: shardplan")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_not_waited_for(run: Any, tmp_path: Path) -> None:
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)
    ran = run("fit", pipe, "8xA100-80GB")
    assert_one_clear_error(ran)
    assert "not a regular file" in ran.err


# --- as a process ---------------------------------------------------------------------------------


def test_fit_imports_neither_torch_nor_transformers_nor_pandas() -> None:
    code = (
        "import sys; from planner.cli.app import main\n"
        "try: main(['fit', 'llama-3-8b', '8xA100-80GB', '--seq-len', '8192'])\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "heavy = {'torch', 'transformers', 'pandas', 'scipy', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "FITS" in done.stdout


def test_the_installed_command_says_its_help_and_version() -> None:
    command = Path(sys.executable).with_name("shardplan")
    if not command.exists():
        pytest.skip("not installed as a command")
    helped = subprocess.run(
        [command, "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert helped.returncode == 0
    assert "Exit codes" in helped.stdout
    version = subprocess.run(
        [command, "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert version.stdout.startswith("shardplan ")


@pytest.mark.parametrize("command", ["run", "tokenize"])
def test_the_executor_runs_in_our_place_so_that_signals_reach_it(
    command: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch")  # without it the command names what to install
    (tmp_path / "executor.py").write_text(  # a stand-in that says who it is
        "import os, sys, time\nprint(os.getpid(), sys.argv[1:], flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "planner", command, "plan.json", "--steps", "3"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        process.terminate()
        assert said == f"{process.pid} {[command, 'plan.json', '--steps', '3']}\n"
        assert process.wait(timeout=30) == -signal.SIGTERM


def test_a_reader_that_goes_away_is_no_error() -> None:
    code = "from planner.cli.app import main; main(['models'])"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) in (0, 1)


@pytest.mark.slow
def test_no_plan_is_one_json_document_with_reasons_and_ways_out(run: Any) -> None:
    done = run("plan", "llama-3-70b", "8xA100-80GB", "--require", "offload==none", "--json")
    assert done.code == 3
    answer = done.json
    assert answer["plans"] == []
    assert answer["search"]["too_large"] > 0
    assert "weights and optimizer states takes" in answer["reasons"][0]["reason"]
    assert 16 in [way["num_gpus"] for way in answer["ways_out"]]
    assert answer["assumptions"]


@pytest.mark.slow
def test_optimizer_and_its_precisions_are_options(run: Any, tmp_path: Path) -> None:
    """From the command line to plan.json; what is not trained is said."""
    words = ["--optimizer", "adafactor", "--optimizer-precision", "bf16"]
    words += ["--gradient-precision", "bf16", "--no-master-weights"]
    path = tmp_path / "plan.json"
    done = run(*PLAN, *words, "--top", "1", "-o", path)
    assert done.code == 0, done.err
    assert "bf16 adafactor" in done.out
    assert "optimizer = adafactor" in done.err
    workload = read_plan_file(path).workload
    assert workload.optimizer == "adafactor"
    assert workload.optimizer_state_precision == workload.gradient_precision == "bf16"
    assert not workload.master_weights
    muon = " ".join(run(*FIT, "--optimizer", "muon", "-v").out.split())
    assert "muon updates the matrices of layers, AdamW embedding, head, norms and biases" in muon
    paged = " ".join(run(*FIT, "--optimizer", "paged_adamw_8bit", "-v").out.split())
    assert "fp32 scale for 256 elements" in paged
    assert "paged states are in host memory where the device is full" in paged
    wrong = run(*FIT, "--optimizer", "adamm")
    assert wrong.code == 2
    assert "Did you mean adam" in wrong.err
    foreign = run(*FIT, "--quantisation", "int8")
    assert foreign.code == 2
    assert "--quantisation belongs to --qlora" in foreign.err
    contradiction = run(*FIT, "--precision", "fp32", "--no-master-weights")
    assert contradiction.code == 2
    assert "--no-master-weights" in contradiction.err


def test_trainers_are_listed_by_name(run: Any) -> None:
    assert "torchtitan" in run("software").out
    found = json.loads(run("software", "axolotl", "--json").out)
    assert [one["name"] for one in found["trainers"]] == ["axolotl"]
    ran = run("software", "torchtitn")
    assert_one_clear_error(ran)
    assert "Did you mean torchtitan" in ran.err


def test_a_folder_that_is_not_installed_says_how_to_install_it(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    ran = run("--version")
    assert_one_clear_error(ran)
    assert "pip install" in ran.err
