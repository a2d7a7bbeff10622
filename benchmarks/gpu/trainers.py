"""Short runs of the trainers that people use on one GPU: measured by them, priced by ``validate``.

Hugging Face's Trainer and a loop of plain torch train the modules of transformers, as a user would
write it, with random weights and tokens. Each run becomes a row of a table of runs, in the words
that a user would enter; ``planner.validate`` reads the table, so that predictions rest on the words
alone. The packages accelerate, peft, bitsandbytes and liger-kernel are needed by some runs: where
one is missing, the run says so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.gpu.plans import peaks
from cost_models.model.presets import load_preset

WARM_UP: Final = 3
TIMED: Final = 5
GIB: Final = 2.0**30
WORDS: Final = {
    "trainer": "Hugging Face Trainer (transformers {transformers})",
    "loop": "own PyTorch loop over the modules of transformers",
}
OPTIMIZERS: Final = {"adamw_8bit": "8-bit adamw", "adafactor": "adafactor"}

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run; ``loop`` is Hugging Face's Trainer or plain torch."""

    loop: str
    model: str
    seq_len: int
    batch: int
    accumulation: int = 1
    weights: str = "fp32"  # fp32 under autocast, or bf16
    checkpointing: bool = False
    optimizer: str = "adamw"  # of torch; or the name by which the Trainer knows it
    adapter: str = ""  # "lora" or "qlora", of rank 16
    targets: str = "all-linear"
    compiled: bool = False
    liger: bool = False
    attention: str = "sdpa"

    @property
    def name(self) -> str:
        """The run in short."""
        parts = [f"{self.model} {self.seq_len}x{self.batch}x{self.accumulation}", self.weights]
        parts += [self.optimizer, self.adapter and f"{self.adapter} {self.targets}"]
        parts += ["checkpointing" * self.checkpointing, "compiled" * self.compiled]
        parts += ["liger" * self.liger, self.attention if self.attention != "sdpa" else ""]
        return f"{self.loop}: " + ", ".join(part for part in parts if part)


def runs() -> Iterator[Run]:
    """Yield runs of one GPU: families, precisions, adapters, optimizers, kernels."""
    hf, loop = "trainer", "loop"
    yield Run(hf, "gpt2", 1024, 8)
    yield Run(loop, "gpt2", 1024, 16, compiled=True)
    yield Run(hf, "llama-3.2-1b", 2048, 4)
    yield Run(loop, "llama-3.2-1b", 2048, 4)
    yield Run(loop, "llama-3.2-1b", 2048, 4, weights="bf16")
    yield Run(hf, "llama-3.2-1b", 2048, 4, weights="bf16")
    yield Run(hf, "llama-3.2-1b", 2048, 8, weights="bf16", checkpointing=True)
    yield Run(hf, "llama-3.2-1b", 2048, 2, accumulation=4)
    yield Run(hf, "llama-3-8b", 2048, 4, weights="bf16", adapter="lora", checkpointing=True)
    yield Run(hf, "llama-3-8b", 2048, 1, weights="bf16", adapter="lora", targets="q_proj,v_proj")
    yield Run(hf, "llama-3-8b", 2048, 4, weights="bf16", adapter="qlora", checkpointing=True)
    yield Run(hf, "qwen2.5-1.5b", 2048, 4, liger=True)
    yield Run(hf, "qwen2.5-1.5b", 2048, 4)
    yield Run(hf, "qwen2.5-0.5b", 4096, 2, compiled=True)
    yield Run(hf, "gemma-3-1b", 2048, 4)
    yield Run(hf, "gpt2-medium", 1024, 8, attention="eager")
    yield Run(hf, "mistral-7b", 2048, 2, weights="bf16", checkpointing=True, optimizer="adamw_8bit")
    yield Run(loop, "qwen2.5-1.5b", 4096, 2, checkpointing=True)
    yield Run(hf, "bert-large", 512, 32)
    yield Run(hf, "llama-3.2-3b", 2048, 4, checkpointing=True)
    yield Run(hf, "llama-3-8b", 2048, 2, weights="bf16", checkpointing=True, optimizer="adafactor")
    yield Run(hf, "qwen3-1.7b", 2048, 4, weights="bf16", optimizer="adamw_torch")
    yield Run(loop, "gpt2-xl", 1024, 4)
    yield Run(hf, "phi-1.5", 2048, 4)
    yield Run(hf, "t5-base", 512, 16)
    yield Run(hf, "smollm2-135m", 2048, 8)


def tiny_runs() -> Iterator[Run]:
    """Yield runs for a CPU."""
    yield Run("loop", "gpt2", 8, 1)


def rows_of(run: Run, number: int, facts: dict[str, Any], found: dict[str, Any]) -> list[Row]:
    """Return the rows of a table of runs, in a user's words: one for each kind of memory."""
    words = f"{WORDS[run.loop].format(**facts)}, torch {facts['torch'].partition('+')[0]}"
    words += ", Liger" * run.liger + ", torch.compile" * run.compiled
    notes = [f"optim={run.optimizer}"] if run.loop == "trainer" else []
    if run.loop == "trainer":
        notes.append("bf16=True")
    elif run.weights == "fp32":
        notes.append("autocast")
    notes.append("random tokens")  # sequences of one length
    peft = "none"
    if run.adapter:
        peft = f"{run.adapter} r=16 {'all linear' if run.targets == 'all-linear' else 'q,v'}"
    row: Row = {
        "source": "python -m benchmarks.gpu",
        "source_group": f"{facts['accelerator']}-{facts['date']}",
        "framework": words,
        "notes": ", ".join(notes),
        "model": run.model,
        "seq_len": run.seq_len,
        "gpu": "here" if facts["name"] == "cpu" else facts["accelerator"],
        "num_gpus": 1,
        "recompute": "full" if run.checkpointing else "none",
        "micro_batch_size": run.batch,
        "global_batch_size": run.batch * run.accumulation,
        "precision": "bf16, 16-bit weights" if run.weights == "bf16" else "bf16",
        "master_weights": int(run.weights == "fp32"),
        "optimizer": OPTIMIZERS.get(run.optimizer, "adamw"),
        "peft": peft,
        "flash_attention": int(run.attention != "eager"),
        "outcome": "ok",
        "step_time_s": round(found["seconds"], 6),
    }
    kinds = (
        ("allocated", "torch allocated"),
        ("reserved", "torch reserved"),
        ("device", "nvidia-smi"),
    )
    rows = [
        {
            **row,
            "row_id": f"{facts['accelerator'].lower()}-{number:02d}-{kind}",
            "peak_memory_gib": round(found[kind] / GIB, 4),
            "memory_definition": words,
            "usable": "time+mem" if kind == "allocated" else "mem",
        }
        for kind, words in kinds
        if kind in found
    ]
    return rows or [{**row, "row_id": f"cpu-{number:02d}", "usable": "time"}]


def measured(run: Run, device: str) -> dict[str, Any]:
    """Train some steps; return the median seconds of a step and the peaks in bytes."""
    import torch

    model = _model(run, device)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = (_trained if run.loop == "trainer" else _looped)(run, model, device)
    return {"seconds": statistics.median(seconds[WARM_UP:]), **peaks(device)}


def _model(run: Run, device: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

    from executor.compat import hugging_face_config

    values = load_preset(run.model).config
    config = hugging_face_config(values)
    config.use_cache = False
    kinds = {"bert": AutoModelForMaskedLM, "t5": AutoModelForSeq2SeqLM}
    dtype = torch.float32 if run.weights == "fp32" else torch.bfloat16
    with torch.device(device):
        model = kinds.get(values["model_type"], AutoModelForCausalLM).from_config(
            config, dtype=dtype, attn_implementation=run.attention
        )
    if run.adapter:
        model = _adapted(run, model)
    return model.train()


def _adapted(run: Run, model: Any) -> Any:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if run.adapter == "qlora":
        _in_four_bits(model)
        model.is_loaded_in_4bit = True
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=run.checkpointing)
    targets = run.targets if run.targets == "all-linear" else run.targets.split(",")
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM")
    return get_peft_model(model, adapter)


def _in_four_bits(model: Any) -> None:
    """Replace the linear layers but the head, as loading in four bits does."""
    import bitsandbytes as bnb
    import torch

    for parent in list(model.modules()):
        for name, linear in list(parent.named_children()):
            if not isinstance(linear, torch.nn.Linear) or name == "lm_head":
                continue
            four = bnb.nn.Linear4bit(
                linear.in_features,
                linear.out_features,
                bias=linear.bias is not None,
                compute_dtype=torch.bfloat16,
                compress_statistics=True,
                quant_type="nf4",
                device="meta",
            )
            place = linear.weight.device
            values = linear.weight.data.cpu()
            four.weight = bnb.nn.Params4bit(
                values, requires_grad=False, quant_type="nf4", module=four
            ).to(place)
            setattr(parent, name, four)


def _batches(run: Run, model: Any) -> Any:
    """Return a dataset of random tokens."""
    import torch

    class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 100_000

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            drawn = torch.Generator().manual_seed(index)
            size = model.config.get_text_config().vocab_size
            tokens = torch.randint(0, size, (run.seq_len,), generator=drawn)
            return {"input_ids": tokens, "labels": tokens.clone()}

    return Tokens()


def _trained(run: Run, model: Any, device: str) -> list[float]:
    """Return the seconds of steps of Hugging Face's Trainer."""
    import tempfile

    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *arguments: Any, **others: Any) -> None:
            self.begin = _now(device)

        def on_step_end(self, *arguments: Any, **others: Any) -> None:
            seconds.append(_now(device) - self.begin)

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=run.batch,
            gradient_accumulation_steps=run.accumulation,
            max_steps=WARM_UP + TIMED,
            bf16=device == "cuda",
            use_cpu=device == "cpu",
            gradient_checkpointing=run.checkpointing,
            torch_compile=run.compiled,
            use_liger_kernel=run.liger,
            optim="adamw_torch_fused" if run.optimizer == "adamw" else run.optimizer,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=model, args=settings, train_dataset=_batches(run, model), callbacks=[Clock()]
        )
        torch.manual_seed(0)
        trainer.train()
    return seconds


def _looped(run: Run, model: Any, device: str) -> list[float]:
    """Return the seconds of steps of a loop in plain torch."""
    import contextlib

    import torch

    if run.checkpointing:
        model.gradient_checkpointing_enable()
    called: Callable[..., Any] = torch.compile(model) if run.compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    data = torch.utils.data.DataLoader(_batches(run, model), batch_size=run.batch)
    rows = iter(data)
    mixed = run.weights == "fp32" and device == "cuda"
    seconds: list[float] = []
    while len(seconds) < WARM_UP + TIMED:
        begin = _now(device)
        for _ in range(run.accumulation):
            batch = {name: values.to(device) for name, values in next(rows).items()}
            with torch.autocast("cuda", torch.bfloat16) if mixed else contextlib.nullcontext():
                loss = called(**batch).loss
            (loss / run.accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(_now(device) - begin)
    return seconds


def _now(device: str) -> float:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
