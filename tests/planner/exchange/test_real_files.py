"""Files that people run, from public repositories (sources inside), and what they state."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest

import planner
from cost_models.plan_file import write_plan_file
from hardware_profiles.errors import InputError
from planner.cli.app import main
from planner.exchange.registry import read_config
from planner.exchange.syntax.flags import parse_flags
from planner.exchange.syntax.python_recipe import parse_recipe
from planner.exchange.syntax.shell_script import read_script
from planner.request.model import resolve_model

REAL = Path(__file__).parent / "real"
TABLE = Path(__file__).with_name("real_files.csv")  # what each file states, and how it is priced
BETWEEN = " | "
with TABLE.open(encoding="utf-8", newline="") as lines:
    CASES = {line["file"]: line for line in csv.DictReader(lines)}


@pytest.mark.parametrize("name", CASES)
def test_a_real_file_is_read(name: str) -> None:
    case = CASES[name]
    expected = dict(setting.split("=", 1) for setting in case["settings"].split(BETWEEN))
    reading = read_config(str(REAL / name))
    assert reading.target == case["target"]
    assert {key: str(reading.settings.get(key)) for key in expected} == expected
    assert (case["note"] == "") is (reading.notes == ())
    assert any(case["note"] in note for note in reading.notes or ("",))
    assert BETWEEN.join(reading.unknown) == case["unknown"]


def test_every_file_names_its_source() -> None:
    table = (REAL / "README.md").read_text()
    files = {str(each.relative_to(REAL)) for each in REAL.rglob("*.*") if each.suffix != ".md"}
    assert files >= {name.partition("::")[0] for name in CASES}
    for name in files:
        head = (REAL / name).read_text()[:300]
        assert re.search(r"# Trimmed from \S+/\S+@\w{10}: \S+ \(", head) or name in table, name


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_fit_answers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES[name]
    with pytest.raises(SystemExit) as end:
        main(["fit", case["model"], case["cluster"], "--from", str(REAL / name)])
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    if case["error"]:
        assert end.value.code == 2
        assert case["error"] in errors
    else:
        assert end.value.code in (0, 3, 4, 7), errors  # a verdict
        assert "read as a file of" in errors


def test_a_named_file_is_found_above(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "z3.json").write_text('{"zero_optimization": {"stage": 3}}')
    (tmp_path / "examples" / "full").mkdir(parents=True)
    job = tmp_path / "examples" / "full" / "job.yaml"
    job.write_text("base_model: x\ndeepspeed: configs/z3.json\n")
    assert read_config(str(job)).settings["zero_stage"] == 3


def test_flags_behind_a_launcher_module() -> None:
    text = "python -m torch.distributed.run --nnodes 2 train.py --bf16 True --lr 1"
    assert parse_flags(text, "x") == {"torchrun": {"nnodes": 2}, "bf16": "True", "lr": 1}


def test_accelerate_launch_states_the_sharding(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nmixed_precision: bf16\n"
    )
    job = tmp_path / "job.sh"

    def settings(launcher: str, arguments: str = "") -> dict[str, object]:
        script = f"train.py --per_device_train_batch_size 1 --output_dir x {arguments}"
        job.write_text(f"accelerate launch {launcher} --num_processes 8 {script}\n")
        return dict(read_config(str(job)).settings)

    found = settings("--config_file fsdp.yaml")
    assert (found["zero_stage"], found["precision"]) == (3, "bf16")
    assert found["software"] == "hf-trainer+fsdp2"
    assert "zero_stage" not in settings("--config_file elsewhere.yaml")  # open, not DDP
    assert settings("--use_deepspeed --zero_stage 2")["zero_stage"] == 2
    flags = "--config_file fsdp.yaml"
    assert settings(flags, "--fsdp shard_grad_op")["zero_stage"] == 2  # arguments win
    assert settings("--multi_gpu")["zero_stage"] == 0


def test_one_rank_of_a_file_that_shards_is_priced_unsharded(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}')
    answer = planner.fit("qwen2.5-0.5b", "1xA100-80GB", source=str(file))
    assert answer.plan.zero_stage == 0
    assert "ZeRO 2 shards nothing" in answer.notes[-1]
    offload = '"stage": 2, "offload_optimizer": {"device": "cpu"}'
    file.write_text(file.read_text().replace('"stage": 2', offload))
    answer = planner.fit("qwen2.5-0.5b", "1xA100-80GB", source=str(file))
    assert (answer.plan.zero_stage, answer.plan.offload) == (2, "optimizer")  # ZeRO-Offload
    found = planner.plan("qwen2.5-0.5b", "1xA100-80GB", source=str(file))
    assert found.best.world_size == 1


def test_adapters_that_are_given_replace_those_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "axolotl.yaml"
    file.write_text("base_model: x\nadapter: qlora\nload_in_4bit: true\nlora_r: 32\n")
    answer = planner.fit("qwen2.5-0.5b", "1xA100-80GB", source=str(file), lora=8)
    workload = answer.scenario.workload
    assert (workload.adapter, workload.adapter_rank) == ("lora", 8)


def test_a_misspelt_key_is_named_by_fit_and_plan(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2}, "gradient_acumulation_steps": 4}')
    for command in ("fit", "plan"):
        with pytest.raises(SystemExit):
            main([command, "qwen2.5-0.5b", "2xA100-80GB", "--from", str(file)])
        said = " ".join(capsys.readouterr().err.split())
        assert "so not priced: gradient_acumulation_steps (is gradient_accumulation_steps" in said


def test_the_stage_of_a_file_holds_for_a_trainer_that_is_named(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}')
    answer = planner.fit("qwen2.5-0.5b", "4xA100-80GB", source=str(file), software="deepspeed")
    assert answer.plan.zero_stage == 1


def test_a_file_for_other_processes_than_the_cluster_has_says_so(tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text("distributed_type: FSDP\nfsdp_config: {}\nnum_processes: 8\n")
    answer = planner.fit("qwen2.5-0.5b", "4xA100-80GB", source=str(file))
    assert answer.notes[-1].endswith("starts 8 processes; priced: 4 accelerators")
    answer = planner.fit("qwen2.5-0.5b", "8xA100-80GB", source=str(file))
    assert not any("processes" in note for note in answer.notes)


def test_a_file_with_other_layers_than_the_model_says_so(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    shape = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008"
    file.write_text(
        f"torchrun --nproc_per_node 8 pretrain_gpt.py {shape} --swiglu --bf16 --seq-length 4096 "
        "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear "
        "--tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 64\n"
    )
    notes = planner.fit("llama-3-8b", "8xA100-80GB", source=str(file)).notes
    assert notes[-1].endswith(
        "layers have 6.48 B parameters; priced: llama-3-8b, whose layers have 6.98 B"
    )
    notes = planner.fit("llama-2-7b", "8xA100-80GB", source=str(file)).notes
    assert not any("its layers" in note for note in notes)
    with pytest.raises(InputError, match="vocab_size is not in the file"):
        planner.fit(str(file), "8xA100-80GB")


def test_the_model_is_read_from_the_file_itself() -> None:
    sizes = {
        "megatron_llama3_8b_fp8.sh": 8_030_261_248,  # Llama 3 8B (arXiv:2407.21783)
        "torchtitan_llama3_70b.toml": 70_553_706_496,
        "nemo_llama3_70b.py::pretrain_recipe": 70_553_706_496,
    }
    for name, parameters in sizes.items():
        assert resolve_model(str(REAL / name)).num_parameters == parameters
    gpt = resolve_model(str(REAL / "megatron_2023_frontier.sh"))
    assert (gpt.family, gpt.num_layers, gpt.hidden_size) == ("gpt2", 48, 6144)


def test_one_of_several_functions_must_be_named() -> None:
    text = "def a():\n    return f(x=1)\ndef b():\n    return f(x=2)\n"
    with pytest.raises(InputError, match=r"name one as x.py::NAME \(a, b\)"):
        parse_recipe(text, "x.py")
    assert parse_recipe(text, "x.py::b")["x"] == 2
    with pytest.raises(InputError, match=r"no function 'bb'"):
        parse_recipe(text, "x.py::bb")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("X='--a  b'\nrun $X \"$X\"", ["run", "--a", "b", "--a  b"]),
        ('A=(--x "p q")\nA+=(--y)\nrun "${A[@]}" ${#A[@]}', ["run", "--x", "p q", "--y", "3"]),
        ("if [[ $X == 1 || -z $Y ]]; then T=2; else T=3; fi; run $T", ["run", "2"]),
        ("for n in 1 2; do M=$n; done\nrun ${M:+-m $M}", ["run", "-m", "1"]),
        ("N=$(( (2+1)*4 / 3 ))\nrun ${N} # $N\n", ["run", "4"]),
        ("F=a/b.json\nrun ${F##*/} ${F%.json} ${F/a/c} ${U:-$F}", None),
        ("cat <<EOF\nrun --a\nEOF\nC='run --b 1'\neval $C", ["run", "--b", "1"]),
        ("run a \\\n  b &> log", ["run", "a", "b"]),
    ],
)
def test_shell_words(script: str, words: list[str] | None) -> None:
    expected = ["run", "b.json", "a/b", "c/b.json", "a/b.json"] if words is None else words
    assert expected in read_script(script).commands


@pytest.mark.parametrize("text", ["", "ls", "${", "if then fi", "A=(", "[[ a", "\\", "`", "$(("])
def test_a_script_without_flags_is_an_error(text: str) -> None:
    with pytest.raises(InputError, match="no command with flags"):
        parse_flags(text, "x.sh")


def test_one_file_may_have_another_name(tmp_path: Path, capsys: Any) -> None:
    plan = tmp_path / "plan.json"
    write_plan_file(plan, planner.plan("qwen2.5-0.5b", "2xA100-80GB", top=1).plan_file())
    named = tmp_path / "mine.yaml"
    with pytest.raises(SystemExit):
        main(["export", str(plan), "--to", "accelerate", "-o", str(named)])
    assert "Start      accelerate launch --config_file mine.yaml" in capsys.readouterr().out
    assert "# Start: accelerate launch --config_file mine.yaml" in named.read_text()
    with pytest.raises(SystemExit):
        main(["export", str(plan), "--to", "lightning", "-o", str(tmp_path / "job.py")])
    assert "name a folder" in capsys.readouterr().err


def test_a_script_of_transformers_says_how_to_save_its_arguments(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("import transformers\nargs = transformers.TrainingArguments('x', bf16=True)\n")
    with pytest.raises(InputError, match=r"to_json_string\(\)\), then --from args.json"):
        planner.fit("qwen2.5-0.5b", "2xA100-80GB", source=str(file))


def test_the_name_of_an_organisation_is_no_other_model(tmp_path: Path) -> None:
    file = tmp_path / "axolotl.yaml"
    file.write_text("base_model: Qwen/Qwen2.5-0.5B\nmicro_batch_size: 1\n")
    answer = planner.fit("qwen2.5-0.5b", "1xA100-80GB", source=str(file))
    assert not any("names the model" in note for note in answer.notes)
