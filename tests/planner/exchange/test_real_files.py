"""Files that people run, from public repositories (sources inside), and what they state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hardware_profiles.errors import InputError
from planner.exchange.flags import parse_flags
from planner.exchange.python_recipe import parse_recipe
from planner.exchange.registry import read_config
from planner.exchange.shell_script import read_script
from planner.request.model import resolve_model

REAL = Path(__file__).parent / "real"
CASES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "megatron_llama3_8b_fp8.sh": (
        "megatron",
        {
            "tensor_parallel": 1,
            "zero_stage": 1,
            "precision": "fp8",
            "gradient_precision": "bf16",
            "global_batch_size": 128,
            "seq_len": 8192,
            "attention_kernel": "flash",
        },
        "layer norms are priced as RMS norms",
    ),
    "megatron_mixtral_8x7b.sh": (
        "megatron",
        {"expert_parallel": 2, "zero_stage": 1, "precision": "fp32", "global_batch_size": 4},
        None,
    ),
    "megatron_2023_frontier.sh": (
        "megatron",
        {
            "tensor_parallel": 8,
            "pipeline_parallel": 2,
            "pipeline_schedule": "interleaved_1f1b",
            "virtual_stages": 4,
            "global_batch_size": 64,
            "recompute": "full",
            "recompute_layers": 2,
            "precision": "bf16",
            "zero_stage": 0,
        },
        None,
    ),
    "torchtitan_llama3_70b.toml": (
        "torchtitan",
        {
            "tensor_parallel": 8,
            "sequence_parallel": True,
            "zero_stage": 3,
            "recompute": "full",
            "micro_batch_size": 8,
            "num_microbatches": 1,
            "seq_len": 8192,
        },
        "compile is off",
    ),
    "torchtitan_2024_llama3_8b.toml": (
        "torchtitan",
        {"micro_batch_size": 1, "zero_stage": 3, "recompute": "ops:every-2nd-mm"},
        "compile is off",
    ),
    "nanotron_tiny_llama.yaml": (
        "nanotron",
        {
            "data_parallel": 2,
            "tensor_parallel": 2,
            "sequence_parallel": True,
            "pipeline_parallel": 2,
            "pipeline_schedule": "1f1b",
            "global_batch_size": 4,
        },
        None,
    ),
    "nemo_llama3_70b.py::pretrain_recipe": (
        "nemo",
        {
            "tensor_parallel": 4,
            "pipeline_parallel": 4,
            "virtual_stages": 5,
            "context_parallel": 2,
            "sequence_parallel": True,
            "zero_stage": 1,
            "global_batch_size": 512,
            "micro_batch_size": 1,
            "seq_len": 8192,
        },
        None,
    ),
    "nemo1_llama.yaml": (
        "nemo",
        {"precision": "fp32", "recompute": "selective", "seq_len": 4096, "zero_stage": 0},
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_real_file_is_read(name: str) -> None:
    target, expected, note = CASES[name]
    reading = read_config(str(REAL / name))
    assert reading.target == target
    assert {key: reading.settings.get(key) for key in expected} == expected
    assert (note is None) is (reading.notes == ())
    assert note is None or any(note in each for each in reading.notes)
    assert reading.unknown == (("no-such-flag",) if "frontier" in name else ())


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
