"""Completion in bash, zsh and fish: commands, options, models, clusters and values."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from cost_models.plan.plan import SCHEDULES, Plan
from hardware_profiles.command_line.shells import Bash, Fish, Zsh
from hardware_profiles.options import declared
from hardware_profiles.software.trainer import software_names
from planner.cli import app as cli
from planner.cli.app import COMMANDS, app
from planner.cli.completion import VARIABLE
from planner.request.pins import parse_fixed


def proposed(*words: str) -> list[str]:
    """What a shell proposes for the last word."""
    shell = ShellComplete(app, {}, "shardplan", VARIABLE)
    return [item.value for item in shell.get_completions(list(words[:-1]), words[-1])]


def kinds(*words: str) -> set[str]:
    shell = ShellComplete(app, {}, "shardplan", VARIABLE)
    return {item.type for item in shell.get_completions(list(words[:-1]), words[-1])}


def test_commands_and_options() -> None:
    assert proposed("") == list(COMMANDS)
    assert proposed("va") == ["validate"]
    optimizers = [f"--optimizer{part}" for part in ("", "-kernel", "-precision", "-rank")]
    assert sorted(proposed("fit", "gpt2", "8xH100", "--opt")) == optimizers
    assert "--no-sp" in proposed("fit", "--no")
    assert proposed("plan", "gpt2", "8xH100", "--obj") == ["--objective"]
    assert proposed("no-such-command", "x") == []


def test_models() -> None:
    assert proposed("fit", "llama-2-7") == ["llama-2-7b", "llama-2-70b"]
    assert proposed("models", "GPT2-x") == ["gpt2-xl"]
    assert "meta-llama/Llama-2-7b-hf" in proposed("plan", "meta-llama/")
    assert kinds("fit", "./con") == {"file"}


def test_clusters() -> None:
    names = [f"H100-{kind}GB" for kind in ("SXM-80", "SXM-96", "SXM-64", "PCIe-80", "NVL-94")]
    for start in ("8x", "16x8x", "1..4x8x"):
        assert proposed("plan", "gpt2", f"{start}H100") == [start + name for name in names]
    assert "8xL40S" in proposed("fit", "gpt2", "8x")
    assert "16xL40S" in proposed("fit", "gpt2", "16")
    assert "8xL40S" in proposed("fit", "gpt2", "")
    assert proposed("plan", "gpt2", "8xL40S,4xh100-n") == ["8xL40S,4xH100-NVL-94GB"]
    assert proposed("hardware", "h100-n") == ["H100-NVL-94GB"]
    assert kinds("fit", "gpt2", "/") == {"file"}


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (("fit", "a", "b", "--schedule", ""), list(SCHEDULES)),
        (("fit", "a", "b", "--recompute", "sel"), ["selective", "selective_ops"]),
        (("fit", "a", "b", "--software", "mega"), software_names()),
        (("plan", "a", "b", "--precision", "bf16,f"), ["fp16", "fp32", "fp64", "fp8", "fp4"]),
        (("plan", "a", "b", "--objective", "c"), ["cost"]),
        (("plan", "a", "b", "--find", "large"), ["largest-micro-batch", "largest-model"]),
        (("fit", "a", "b", "--kv-precision", "int"), ["int8", "int4"]),
        (("completion", ""), ["bash", "zsh", "fish"]),
        (("validate", "--only", "korthikanti"), ["korthikanti-2022"]),
    ],
)
def test_values(words: tuple[str, ...], values: list[str]) -> None:
    before, comma, start = words[-1].rpartition(",")
    expected = [before + comma + value for value in values if value.startswith(start)]
    assert proposed(*words) == expected
    assert expected


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (("plan", "a", "b", "--fix", "z"), ["zero="]),
        (("plan", "a", "b", "--fix", "tp=2,z"), ["tp=2,zero="]),
        (("plan", "a", "b", "--fix", "zero="), [f"zero={stage}" for stage in range(4)]),
        (("plan", "a", "b", "--fix", "tp=2,sp="), ["tp=2,sp=on", "tp=2,sp=off"]),
        (("plan", "a", "b", "--fix=zero=3"), ["zero=3"]),
        (("plan", "a", "b", "--fix", "tensor_"), ["tensor_parallel="]),
        (("plan", "a", "b", "--fix", "no_part="), []),
        (("explain", "p.json", "--why-not", "pp=3"), ["pp=32"]),
        (("explain", "p.json", "--why-not", "tp=2,offload_device="), None),
        (("fit", "a", "b", "zer"), ["zero=", "zero_stage="]),
        (("fit", "a", "b", "zero="), [f"zero={stage}" for stage in range(4)]),
        (("fit", "a", "b", "--zero", ""), ["0", "1", "2", "3"]),
        (("plan", "a", "b", "objective=c"), ["objective=cost"]),
        (("fit", "a", "b", "--price", "L40S=0.9,h100-n"), ["L40S=0.9,H100-NVL-94GB="]),
        (("fit", "a", "b", "--failures", "mtbf=1,r"), ["mtbf=1,restart="]),
    ],
)
def test_parts_of_a_plan(words: tuple[str, ...], values: list[str] | None) -> None:
    if values is None:
        values = ["tp=2,offload_device=cpu", "tp=2,offload_device=nvme"]
    assert proposed(*words) == values


def test_every_part_of_a_plan_is_proposed_with_values_that_it_takes() -> None:
    names = proposed("plan", "a", "b", "--fix", "")
    assert names == [f"{one.short}=" for one in declared(Plan).values() if one.option is not None]
    for name in names:
        values = proposed("plan", "a", "b", "--fix", name)
        assert len(values) > 1
        for value in values:
            assert list(parse_fixed(value)) != []
    assert "tp=" not in proposed("plan", "a", "b", "--fix", "tp=2,")


BASH = """
eval "$(shardplan completion bash)"
compopt() {{ echo "$*" | tr '\\n' ' '; }}
COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_shardplan_completion shardplan
echo "${{COMPREPLY[*]}}"
"""


@pytest.fixture
def program(tmp_path: Path) -> dict[str, str]:
    """Environment of a shell that finds ``shardplan``."""
    path = tmp_path / "shardplan"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -m planner "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return {
        "PYTHONPATH": str(Path.cwd()),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "TERM": "xterm",
    }


FISH = 'shardplan completion fish | source; complete -C "shardplan {words}"'


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")
@pytest.mark.parametrize(
    ("words", "proposals"),
    [
        ("fit llama-2-7", ["llama-2-70b", "llama-2-7b"]),
        ("fit gpt2 8xH100-S", ["8xH100-SXM-64GB", "8xH100-SXM-80GB", "8xH100-SXM-96GB"]),
        ("plan a b --fix tp=2,ze", ["tp=2,zero="]),
        ("hardware l4", ["L4", "L40", "L40S"]),
    ],
)
def test_fish_proposes(words: str, proposals: list[str], program: dict[str, str]) -> None:
    done = subprocess.run(
        ["fish", "--no-config", "-c", FISH.format(words=words)],
        env=program,
        capture_output=True,
        text=True,
        check=False,
    )
    assert sorted(line.split("\t")[0] for line in done.stdout.split("\n") if line) == proposals


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("words", "proposals"),
    [
        ("plan a b --fix z", "-o nospace zero="),
        ("plan a b --fix zero =", "0 1 2 3"),
        ("plan a b --fix tp = 2,schedule = zb", "zbv"),
        ("plan a b --fix tp = 2,z", "-o nospace 2,zero="),
        ("plan a b --fix = zero = 3", "3"),
        ("fit a b --optimizer = li", "lion lion_8bit"),
        ("explain p --why-not sp =", "on off"),
    ],
)
def test_bash_takes_an_equals_sign_as_a_word(
    words: str, proposals: str, program: dict[str, str]
) -> None:
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH.format(words=f"shardplan {words}")],
        env=program,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == proposals.split(), done.stderr


def test_zsh_and_fish_get_values_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "shardplan plan a b --fix tp=2,zero=3"
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", "5")
    assert Zsh(app, {}, "shardplan", VARIABLE).complete() == "plain\ntp=2,zero=3\n_"
    monkeypatch.setenv("COMP_CWORD", "tp=2,zero=3")
    assert Fish(app, {}, "shardplan", VARIABLE).complete() == "plain,tp=2,zero=3"
    assert 'string split --max 1 ","' in Fish.source_template
    assert "compadd -U -S ''" in Zsh.source_template
    assert "nospace" in Bash.source_template


def test_files() -> None:
    for words in (("explain", "pl"), ("fit", "a", "b", "-o", "x"), ("validate", "runs")):
        assert kinds(*words) == {"file"}


@pytest.mark.parametrize(
    ("shell", "environment", "line"),
    [
        (BashComplete, {"COMP_CWORD": "1"}, "plain,fit"),
        (ZshComplete, {"COMP_CWORD": "1"}, "plain\nfit\n"),
        (FishComplete, {"COMP_CWORD": "fi"}, "plain,fit"),
    ],
)
def test_each_shell_gets_its_format(
    shell: type[ShellComplete],
    environment: dict[str, str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"COMP_WORDS": "shardplan fi", **environment}.items():
        monkeypatch.setenv(name, value)
    assert shell(app, {}, "shardplan", VARIABLE).complete().startswith(line)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_command_prints_the_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["completion", shell])
    assert not stop.value.code
    script = capsys.readouterr().out
    assert f"{VARIABLE}={shell}_complete" in script
    program = shutil.which(shell)
    if program is not None:
        checked = subprocess.run([program, "-n"], input=script, text=True, check=False)
        assert checked.returncode == 0


def test_other_shells_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["completion", "tcsh"])
    assert stop.value.code == 2
    assert "'tcsh' (must be one of bash, zsh, fish)" in capsys.readouterr().err


def complete(words: str, count: int, *python: str) -> subprocess.CompletedProcess[str]:
    """Complete as a process."""
    return subprocess.run(
        [sys.executable, *python],
        env={
            "PYTHONPATH": str(Path.cwd()),
            "PATH": os.environ["PATH"],
            "COMP_WORDS": words,
            "COMP_CWORD": str(count),
            VARIABLE: "bash_complete",
        },
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_options_of_the_executor_are_completed_by_it() -> None:
    done = complete("shardplan run plan.json --launcher ", 4, "-m", "planner")
    assert done.stdout.split() == ["plain,torchrun", "plain,fork"]
    done = complete("shardplan run --st", 2, "-m", "planner")
    assert done.stdout.split() == ["plain,--steps"]
    assert complete("shardplan run plan.json --data te", 4, "-m", "planner").stdout == "file,te\n"


@pytest.mark.parametrize(
    ("words", "count"), [("shardplan fit gpt2 8x", 3), ("shardplan plan gpt2 8x --f", 4)]
)
def test_completion_and_help_import_no_numpy(words: str, count: int) -> None:
    code = (
        "import sys; from planner.cli.app import main\n"
        "try: main([])\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "heavy = {'numpy', 'torch', 'pandas', 'scipy', 'executor'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = complete(words, count, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("plain,")
