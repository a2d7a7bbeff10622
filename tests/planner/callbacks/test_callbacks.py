"""Real toy runs with the callbacks: three lines, a row of RUNS.csv that ``learn`` reads."""

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import planner  # noqa: E402
from planner.callbacks.accelerate import AcceleratePreflight  # noqa: E402
from planner.callbacks.watch import DoesNotFit  # noqa: E402
from planner.validation.rows.runs_file import read_runs  # noqa: E402

CLUSTER = "1xA100-80GB"
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}


def llama(**sizes: Any) -> Any:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **heads, **sizes}))


def rows(count: int = 32) -> list[dict[str, Any]]:
    tokens = torch.randint(0, 256, (count, 16))
    return [{"input_ids": one, "labels": one} for one in tokens]


def train(watched: Any, model: Any, optimizer: Any, steps: int = 6) -> None:
    with watched:
        for _ in range(steps):
            tokens = torch.randint(0, 256, (2, 16))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_recorded_loop_is_learnt_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, runs, logged = llama(), tmp_path / "runs.csv", {}
    optimizer = torch.optim.AdamW(model.parameters())
    hook = sys.excepthook
    watched = AcceleratePreflight(
        model, optimizer, record=runs, log=logged.update, cluster=CLUSTER, warm_up=2
    )
    train(watched, model, optimizer)
    assert sys.excepthook == hook
    assert "FITS" in capsys.readouterr().err
    assert set(logged) == {
        "shardplan/predicted_step_seconds",
        "shardplan/predicted_peak_bytes",
        "shardplan/measured_step_seconds",
    }
    (row,) = read_runs(runs)
    assert (row.micro_batch_size, row.seq_len, row.num_layers, row.outcome) == (2, 16, 2, "ok")
    assert planner.validate(runs).summary["priced"] == 1
    learnt = planner.learn(runs, tmp_path / "mine.toml")
    assert learnt.runs[0].run == row.row_id


def test_a_run_is_stopped_only_where_that_was_asked_for() -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    large = {"seq_len": 1 << 20, "micro_batch_size": 512, "cluster": "1xT4"}
    train(AcceleratePreflight(model, optimizer, **large), model, optimizer, steps=1)
    with pytest.raises(DoesNotFit, match="DOES NOT FIT"):
        train(AcceleratePreflight(model, optimizer, stop=True, **large), model, optimizer)


def test_an_error_of_memory_is_recorded_and_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, runs = llama(), tmp_path / "runs.csv"
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros((2, 16), dtype=torch.long)

    def fails() -> None:
        with AcceleratePreflight(model, optimizer, record=runs, cluster=CLUSTER):
            model(input_ids=tokens, labels=tokens)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(torch.OutOfMemoryError):
        fails()
    assert "no room for a tensor of 2.0 GiB" in capsys.readouterr().err
    assert read_runs(runs)[0].outcome == "oom"


@pytest.mark.slow(seconds=20)
@pytest.mark.filterwarnings("default")
def test_the_trainer_of_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from planner.callbacks.hugging_face import PreflightCallback

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=6,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    runs = tmp_path / "runs.csv"
    callback = PreflightCallback(record=runs, cluster=CLUSTER)
    transformers.Trainer(llama(), arguments, train_dataset=rows(), callbacks=[callback]).train()
    (row,) = read_runs(runs)
    assert (row.micro_batch_size, row.global_batch_size) == (2, 4)
    assert row.framework is not None
    assert row.framework.startswith("transformers ")
    assert "hf-trainer" in (row.software or "")
    assert planner.learn(runs, tmp_path / "mine.toml").runs


@pytest.mark.slow(seconds=20)
@pytest.mark.filterwarnings("default")
def test_the_trainer_of_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from planner.callbacks.lightning import LightningPreflight

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def training_step(self, batch: Any, number: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    runs = tmp_path / "runs.csv"
    trainer = lightning.Trainer(
        max_steps=6,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
        callbacks=[LightningPreflight(record=runs, cluster=CLUSTER)],
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(rows(), batch_size=2))
    (row,) = read_runs(runs)
    assert (row.micro_batch_size, row.num_layers, row.outcome) == (2, 2, "ok")


@pytest.mark.slow(seconds=60)
@pytest.mark.filterwarnings("default")
def test_the_trainer_of_trl(tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    from planner.callbacks.hugging_face import PreflightCallback

    words = {"<s>": 0, "</s>": 1}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        max_steps=6,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
    )
    runs = tmp_path / "runs.csv"
    data = datasets.Dataset.from_dict({"input_ids": [row["input_ids"].tolist() for row in rows()]})
    callback = PreflightCallback(record=runs, cluster=CLUSTER)
    trl.SFTTrainer(
        llama(),
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[callback],
    ).train()
    (row,) = read_runs(runs)
    assert (row.micro_batch_size, row.num_layers, row.outcome) == (2, 2, "ok")
    assert "trl " in (row.derived or "")
