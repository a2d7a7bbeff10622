"""The command line: save, resume, reshard, start from a folder and export without hand-holding."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile, write_plan_file
from executor.__main__ import main
from executor.checkpoint.format.folder import CheckpointFolder, step_of
from executor.checkpoint.loading.initial_state import InitialState
from executor.checkpoint.options import CheckpointOptions, resume_after_restart
from executor.checkpoint.saving.manager import checkpoint_hook
from executor.data import MarkovCorpus
from executor.processes.fork import run_forked
from executor.training.loop import TrainingHook, TrainingLoop
from executor.training.trainer import StepResult, Trainer
from hardware_profiles.cluster.parse import parse_cluster
from tests.executor.process_tree import descendants, wait_until_ended
from tests.executor.tiny import tiny

pytestmark = pytest.mark.distributed

CLUSTER = parse_cluster("8xA100-80GB")
DP2 = Plan(data_parallel=2, zero_stage=1, micro_batch_size=2)
TP2 = Plan(tensor_parallel=2, micro_batch_size=4)
PP2 = Plan(pipeline_parallel=2, micro_batch_size=2, num_microbatches=2)


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write a plan and return its path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDPLAN_CACHE", str(tmp_path / "cache"))

    def write(layout: Plan, name: str = "plan.json", **options: Any) -> Path:
        options = {"vocab_size": 256, "num_layers": 2, "optimizer": "adamw", **options}
        file = replace(tiny(layout, **options), cluster=CLUSTER)
        write_plan_file(tmp_path / name, file, force=True)
        return tmp_path / name

    return write


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run the command and return its document and what it said."""

    def call(*arguments: Any, code: int = 0) -> Any:
        options = ["--launcher", "fork", "--json", "--learning-rate", "0.01"]
        assert main(["run", *map(str, arguments), *options]) == code, capfd.readouterr().err
        out, err = capfd.readouterr()
        return (json.loads(out) if out else None), err

    return call


def _losses(document: dict[str, Any]) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in document["steps"]}


def _checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_run_saves_resumes_and_reshards(plan, run, tmp_path: Path):
    whole, _ = run(plan(DP2), "--steps", 8, "--output", "whole")
    options = ("--checkpoint-every", 2, "--keep", 2, "--output", "parts")
    first, _ = run(plan(DP2), "--steps", 5, *options, "--resume")
    assert "no checkpoint in parts: the run begins at its first step" in " ".join(first["notes"])
    assert _checkpoints(Path("parts")) == ["step-00000004", "step-00000005"]
    second, said = run(plan(DP2), "--steps", 7, *options, "--resume")
    assert "note: resumed from parts/checkpoints/step-00000005 at step 5\n" in said
    assert second["first_step"] == 5
    expected = _losses(whole)
    assert _losses(first) | _losses(second) == {step: expected[step] for step in range(1, 8)}
    third, said = run(plan(TP2), "--steps", 8, *options, "--resume", "parts")
    assert "resharded: data_parallel 2 -> 1, tensor_parallel 1 -> 2" in said
    assert _losses(third) == {8: pytest.approx(expected[8], rel=1e-12)}
    assert _checkpoints(Path("parts")) == ["step-00000007", "step-00000008"]
    done, said = run(plan(PP2), "--steps", 8, *options, "--resume")
    assert "step 8 of 8 is done; nothing is left to train" in said
    assert done["steps_done"] == 8


@pytest.mark.slow
def test_without_an_output_the_newest_run_goes_on(plan, run):
    _, said = run(plan(DP2), "--steps", 2, "--checkpoint-every", 2)
    assert "will not be kept" not in said
    (folder,) = Path("runs").iterdir()
    found, said = run(plan(DP2), "--steps", 3, "--resume")
    assert "will not be kept" not in said
    assert _checkpoints(folder)[-1] == "step-00000003"  # at the end of a resumed run
    assert list(Path("runs").iterdir()) == [folder]
    assert (found["first_step"], found["steps_done"]) == (2, 3)


@pytest.mark.slow
def test_an_older_checkpoint_puts_the_newer_ones_aside(plan, run):
    options = ("--checkpoint-every", 1, "--keep", 9)
    run(plan(DP2), "--steps", 3, *options, "--output", "run")
    _, said = run(plan(DP2), "--steps", 3, *options, "--resume", "run/checkpoints/step-00000001")
    assert re.search(r"note: step-00000003 renamed to step-00000003\.aside-\w+", said)
    names = [name.partition(".aside")[0] for name in _checkpoints(Path("run"))]
    assert names == [f"step-{n:08d}" for n in (1, 2, 2, 3, 3)]


@pytest.mark.slow
def test_another_output_is_resumed_into_and_goes_on_there(plan, run):
    run(plan(DP2), "--steps", 2, "--checkpoint-every", 2, "--output", "one")
    command = ("--checkpoint-every", 1, "--output", "two", "--resume", "one")
    found, said = run(plan(DP2), "--steps", 3, *command)
    assert "resumed from one/checkpoints/step-00000002" in said
    assert _checkpoints(Path("one")) == ["step-00000002"]
    found, said = run(plan(DP2), "--steps", 4, *command)  # started again with the same command
    assert "resumed from two/checkpoints/step-00000003" in said
    assert found["first_step"] == 3


@pytest.mark.slow
def test_what_cannot_be_resumed_is_refused(plan, run, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("The keeper lit the lamp at dusk.\n" * 40)
    options = ("--checkpoint-every", 1, "--output", "run")
    run(plan(DP2), "--steps", 1, *options, "--data", text)

    def refused(message: str, path: Path, *arguments: Any, data: Any = text) -> None:
        more = (*options, "--data", data, "--resume", *arguments)
        _, err = run(path, "--steps", 2, *more, code=2)
        assert err.splitlines()[-1].startswith("shardplan: ")
        assert re.search(message, err), err

    refused(
        r"step-00000001: a checkpoint of another model: intermediate_size = 96 in the checkpoint, "
        "64 in the plan",
        plan(DP2, intermediate_size=64),
    )
    refused(
        r"another model: rms_norm_eps = 1e-06 in the checkpoint, 0.001 in",
        plan(DP2, rms_norm_eps=1e-3),
    )
    refused(
        r"another model: model_type = \"llama\" in the checkpoint, \"qwen3\"",
        plan(DP2, family="qwen3"),
    )
    refused(
        r"differs from the data at the start of the run: seed was 0, is 1", plan(DP2), "--seed", 1
    )
    refused(r"global_batch_size was 4, is 8", plan(replace(DP2, micro_batch_size=4)))
    refused(r"--resume nowhere: no such folder", plan(DP2), "nowhere")
    text.write_text("Another text.\n" * 40)
    refused("differs from the data at the start of the run", plan(DP2))
    more = (*options, "--data", text, "--resume", "--allow-other-data", "--weight-decay", 0.2)
    found, said = run(plan(DP2, precision="fp32"), "--steps", 2, *more)
    assert found["first_step"] == 1
    assert "note: run/checkpoints/step-00000001: " in said
    assert "precision: fp64 -> fp32" in said
    assert "--weight-decay: 0.1 -> 0.2" in said


@pytest.mark.slow
def test_from_a_folder_to_a_folder(plan, run, capfd):
    options = ("--steps", 2, "--checkpoint-every", 2)
    run(plan(PP2), *options, "--output", "one")
    command = ["export", "one", "--to", "huggingface", "-o", "exported"]
    assert main([*command, "--dtype", "float64"]) == 0
    assert "Written: exported (step 2)" in capfd.readouterr().out
    _, said = run(plan(TP2), *options, "--init-from", "exported", "--output", "two")
    assert "note: weights of exported" in said
    model = AutoModelForCausalLM.from_pretrained("exported", dtype=torch.float64)
    tokens = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, do_sample=False)
    assert tokens.size(1) > 3
    shutil.rmtree("exported/")
    _, err = run(plan(TP2), *options, "--init-from", "exported", code=2)
    assert "exported/config.json: no such file" in err
    assert main(["export", "nowhere", "-o", "x"]) == 2
    assert "shardplan: nowhere: no such folder" in capfd.readouterr().err


class _Stop(TrainingHook):
    """Asks the run to stop after a step, as a signal does."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def after_step(self, result: StepResult) -> None:
        self.trainer.stop_requested = self.trainer.steps_done == 2 and dist.get_rank() == 1


def _stopped(rank: int, file: PlanFile, folder: str, every: int | None) -> str:
    corpus = MarkovCorpus(256, file.workload.seq_len, 0)
    trainer = Trainer(file)
    begun = InitialState(None, None, ())
    hooks = [
        _Stop(trainer),
        checkpoint_hook(
            trainer, Path(folder), CheckpointOptions(checkpoint_every=every), begun, {}
        ),
    ]
    return TrainingLoop(trainer, corpus, steps=99, emit=lambda event: None, hooks=hooks).run()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("every", [None, 2])
def test_a_run_that_is_told_to_stop_saves_its_last_step(every: int | None, tmp_path: Path):
    file = tiny(DP2, vocab_size=256, num_layers=1)
    assert run_forked(_stopped, 2, file, str(tmp_path), every) == ["stopped"] * 2
    assert _checkpoints(tmp_path)[-1] == "step-00000003"


@pytest.mark.slow
def test_a_run_that_fails_leaves_its_checkpoints(plan):
    options = ("--checkpoint-every", 1, "--output", "run", "--learning-rate", 1e30)
    arguments = ["run", plan(DP2, precision="fp32"), "--steps", 50, "--launcher", "fork", *options]
    assert main(list(map(str, arguments))) == 5
    names = _checkpoints(Path("run"))
    assert names
    assert not [name for name in names if "." in name]


@pytest.mark.slow
def test_the_tokenizer_travels_with_an_export(plan, run, tmp_path: Path, capfd):
    words = {word: number for number, word in enumerate(["<unk>", "<end>", "lamp", "lit", "the"])}
    backend = Tokenizer(WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<end>"
    )
    tokenizer.save_pretrained(tmp_path / "words")
    (tmp_path / "text.txt").write_text("the lamp lit the lamp\n" * 40)
    options = ("--data", "text.txt", "--tokenizer", "words", "--checkpoint-every", 1)
    run(plan(Plan(micro_batch_size=4)), "--steps", 1, "--output", "run", *options)
    assert main(["export", "run", "-o", "exported", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert (document["step"], document["notes"]) == (1, [])
    loaded = AutoTokenizer.from_pretrained("exported")
    assert loaded("lamp the")["input_ids"] == [2, 4]
    assert GenerationConfig.from_pretrained("exported").eos_token_id == 1
    shutil.rmtree("words")
    assert main(["export", "run/checkpoints/step-00000001", "-o", "again"]) == 0
    assert "the run's tokenizer is no longer in words: copy it by hand" in capfd.readouterr().err
    assert main(["export", "run", "-o", "exported"]) == 2
    assert "exported: not empty; choose another -o" in capfd.readouterr().err


@pytest.mark.slow(seconds=20)
@pytest.mark.skipif(sys.platform != "linux", reason="kills processes")
def test_a_torchrun_that_is_killed_goes_on_with_the_same_command(plan, run, tmp_path: Path, capfd):
    command = [sys.executable, "-m", "executor", "run", str(plan(DP2)), "--learning-rate", "0.01"]
    command += ["--checkpoint-every", "1", "--output", "run", "--resume", "--steps"]
    checkpoints = CheckpointFolder(tmp_path / "run" / "checkpoints")
    with subprocess.Popen([*command, "100000"], stderr=subprocess.DEVNULL) as started:
        deadline = time.monotonic() + 120
        while not checkpoints.complete() and time.monotonic() < deadline:
            time.sleep(0.05)
        ranks = descendants(started.pid)
        started.kill()
    wait_until_ended(ranks)
    steps = step_of(checkpoints.complete()[0]) + 3
    assert main([*command[3:], str(steps), "--json"]) == 0
    found = _losses(json.loads(capfd.readouterr().out))
    assert len(found) == 3
    whole, _ = run(plan(DP2), "--steps", steps, "--output", "whole")
    assert found == {step: _losses(whole)[step] for step in found}


def test_ranks_that_are_started_again_go_on_with_what_they_saved(tmp_path: Path):
    assert resume_after_restart(None, None) == "auto"
    assert resume_after_restart("elsewhere", None) == "elsewhere"
    assert resume_after_restart("elsewhere", tmp_path) == "elsewhere"
    (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    assert resume_after_restart("elsewhere", tmp_path) == "auto"
