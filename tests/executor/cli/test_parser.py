"""The command line of the executor: words to options, and what is recorded of them."""

import json
import signal
from pathlib import Path

import pytest

from executor.checkpoint.options import AUTO, CheckpointOptions
from executor.cli.options import ExportOptions, MeasureOptions, TokenizeOptions, TraceOptions
from executor.cli.parser import COMMANDS, parse
from executor.cli.run_options import DRY_STEPS, RunOptions
from executor.config.data_options import DataOptions
from executor.config.training_options import TrainingOptions
from executor.multinode.nodes import NodeSettings
from executor.processes.reporter import Supervision
from hardware_profiles.errors import InputError

# keys of run.json: programs read them
RECORDED = {
    *("data", "eval_data", "tokenizer", "text_field", "packing", "skip_bad_rows"),
    *("steps", "seed", "learning_rate", "lr_schedule", "warmup_steps", "decay_steps"),
    *("min_lr_ratio", "weight_decay", "beta1", "beta2", "epsilon", "max_grad_norm", "compile"),
    *("eval_every", "eval_batches", "sample_every", "tensorboard", "dry_run"),
    *("checkpoint_every", "keep", "keep_every", "resume", "init_from", "allow_other_data"),
    *("max_restarts", "preemption_signal", "hang_timeout"),
    *("nodes", "node_rank", "rendezvous", "elastic", "node_timeout"),
}


def run(*words: str) -> RunOptions:
    options = parse(["run", "plan.json", *words])
    assert isinstance(options, RunOptions)
    return options


def test_defaults_of_a_run() -> None:
    options = run()
    assert options.plan == Path("plan.json")
    assert options.data == DataOptions()
    assert options.training == TrainingOptions()
    assert options.checkpoints == options.saving == CheckpointOptions()
    assert options.supervision == Supervision(0, signal.SIGUSR1)
    assert (options.steps, options.hang_timeout, options.launcher) == (20, 600.0, "torchrun")
    assert options.evaluation_data() is None
    assert options.node_settings() is None


def test_words_become_the_options_of_their_subject() -> None:
    options = run("--data", "a:0.3", "--data=b:0.7", "--packing", "none", "--eval-data", "c")
    assert options.data == DataOptions(("a:0.3", "b:0.7"), packing="none")
    assert options.evaluation_data() == DataOptions(("c",), packing="none")
    options = run("--steps", "9", "--lr-schedule", "linear", "--warmup-steps", "1", "--beta1=0")
    assert options.training == TrainingOptions(
        steps=9, lr_schedule="linear", warmup_steps=1, beta1=0.0
    )
    assert options.training.learning_rate_schedule().at(9) == 0.0
    assert run("--preemption-signal", "usr2").supervision.preemption_signal == signal.SIGUSR2
    assert run("--hang-timeout", "0").hang_timeout == 0.0


@pytest.mark.parametrize(
    ("words", "resume"),
    [
        (["--resume"], AUTO),
        (["--resume", "--steps", "4"], AUTO),
        (["--resume", "auto"], AUTO),
        (["--resume=runs/a"], "runs/a"),
        (["--resume", "runs/a", "--steps", "4"], "runs/a"),
    ],
)
def test_resume_takes_a_folder_or_nothing(words: list[str], resume: str) -> None:
    assert run(*words).checkpoints.resume == resume
    assert run(*words, "--dry-run").saving == CheckpointOptions()


def test_a_dry_run_has_two_steps_of_the_same_schedule() -> None:
    options = run("--steps", "50", "--lr-schedule", "cosine", "--dry-run")
    assert options.steps == DRY_STEPS
    assert options.training.learning_rate_schedule().steps == 50


def test_one_of_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--nodes", "4", "--rendezvous", "[::1]:29500", "--elastic", "--node-timeout", "5")
    monkeypatch.setenv("SLURM_NODEID", "3")
    assert run(*words).node_settings() == NodeSettings(4, 3, "::1", 29500, True, 5.0)
    assert run(*words, "--node-rank", "0").node_settings() == NodeSettings(
        4, 0, "::1", 29500, True, 5.0
    )


def test_recorded_options_are_json_values() -> None:
    words = ("--init-from", "weights", "--rendezvous", "a:1", "--dry-run", "--data", "t.txt")
    recorded = run(*words).recorded()
    assert set(recorded) == RECORDED
    kept = json.loads(json.dumps(recorded))
    assert (kept["steps"], kept["init_from"], kept["data"]) == (DRY_STEPS, "weights", ["t.txt"])
    assert (kept["rendezvous"], kept["preemption_signal"]) == (["a", 1], signal.SIGUSR1)


def test_the_other_commands() -> None:
    assert parse(["measure", "--processes", "3"]) == MeasureOptions(processes=3)
    assert parse(["tokenize", "a", "b", "-o", "c.bin", "--force"]) == TokenizeOptions(
        sources=["a", "b"], output=Path("c.bin"), force=True
    )
    assert parse(["export", "r", "--output", "d", "--dtype", "float16"]) == ExportOptions(
        source=Path("r"), output=Path("d"), dtype="float16"
    )
    assert parse(["trace-module", "module:a:b", "--input", "x=int64[B]", "--json"]) == TraceOptions(
        module="module:a:b", inputs=("x=int64[B]",), json=True
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_the_exit_codes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse([name, "--help"])
    assert stopped.value.code == 0
    program = "python -m executor" if name in ("measure", "trace-module") else "shardplan"
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: {program} {name}")
    assert "6 stopped on request" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lerning-rate", "1"], "No such option: --lerning-rate. Did you mean --learning-rate?"),
        (["--launcher", "frok"], "'frok' (must be one of torchrun, fork). Did you mean fork?"),
        (["--min-lr-ratio", "1.5"], "1.5 (must be a number from 0 to 1)"),
        (["--node-timeout", "inf"], "inf (must be a number from 1)"),
        (["--hang-timeout", "nan"], "'nan' (must be a number from 1, or 0 for never)"),
        (["--rendezvous", "host"], "'host' (must be HOST:PORT, a port from 1 to 65533)"),
        (["--preemption-signal", "KILL"], "'KILL' (must be one of SIGTERM,"),
        (["--keep", "0"], "0 (must be a whole number from 1 to 10,000,000)"),
    ],
)
def test_a_wrong_word_is_named(words: list[str], message: str) -> None:
    with pytest.raises(InputError) as raised:
        run(*words)
    assert message in str(raised.value)
