"""``PreflightCallback`` for the Trainer of transformers, and for TRL's, which inherit from it.

trainer = Trainer(..., callbacks=[PreflightCallback(record="runs.csv")])
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from planner.callbacks.scalars import log_scalars, tensorboard_scalars
from planner.callbacks.watch import RunWatch

NAME: Final = "PreflightCallback"
PACKAGES: Final = ("transformers", "accelerate", "peft", "trl")


def __getattr__(name: str) -> Any:
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _callback_class()


@cache
def _callback_class() -> Any:
    """Return the class, which inherits from a class of transformers."""
    base = import_module("transformers").TrainerCallback

    class PreflightCallback(base):  # type: ignore[misc, valid-type]
        """Checks a run before its first step, and records it.

        Options as ``RunWatch``: ``log`` is such as ``trainer.log``; without it scalars go to the
        trackers that are running.
        """

        def __init__(self, **options: Any) -> None:
            self.watch = RunWatch(PACKAGES, **options)
            self.sends = self.watch.log is None

        def on_train_begin(
            self, args: Any, state: Any, control: Any, model: Any = None, **more: Any
        ) -> None:
            self.watch.is_main = bool(state.is_world_process_zero)
            if self.sends:
                self.watch.log = lambda scalars: _send(args, state, scalars)
            optimizer = more.get("optimizer") or str(getattr(args.optim, "value", args.optim))
            self.watch.attach(model, optimizer, **read_arguments(args, model))

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.watch.step()

        def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.watch.recorder.pause()

        def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.watch.recorder.pause()

        def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.watch.finish()

    return PreflightCallback


def _send(args: Any, state: Any, scalars: dict[str, float]) -> None:
    """Send scalars to the running trackers, and to TensorBoard where the Trainer reports to it."""
    log_scalars(scalars)
    if "tensorboard" in (args.report_to or []):
        folder = getattr(args, "logging_dir", None) or str(Path(args.output_dir) / "runs")
        tensorboard_scalars(folder, scalars, state.global_step)


def read_arguments(args: Any, model: Any) -> dict[str, Any]:
    """Return the arguments of ``check`` that TrainingArguments give."""
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else None
    kept = next((p for p in model.parameters() if p.requires_grad), None)
    if kept is not None and "float32" not in str(kept.dtype):
        precision = None  # autocast leaves 16-bit weights as they are
    return {
        "precision": precision,
        "num_microbatches": args.gradient_accumulation_steps,
        "recompute": "full" if args.gradient_checkpointing else None,
        "zero_stage": _deepspeed_stage(args),
        "software": _software(args, model, precision),
    }


def _deepspeed_stage(args: Any) -> int | None:
    config = getattr(getattr(args, "hf_deepspeed_config", None), "config", None)
    stage = ((config or {}).get("zero_optimization") or {}).get("stage")
    return None if stage is None else int(stage)


def _software(args: Any, model: Any, precision: str | None) -> str:
    """Return the software profile of a run of the Trainer."""
    stage = _deepspeed_stage(args)
    name = "hf-trainer-liger" if getattr(args, "use_liger_kernel", False) else "hf-trainer"
    if getattr(args, "torch_compile", False):
        name = "torch-compile"
    if stage:
        name += f"+deepspeed-zero{stage}"
    elif name == "hf-trainer" and precision is not None and not _is_sharded(model):
        name = "hf-trainer-autocast"
    elif args.world_size > 1 and not _is_sharded(model):
        name += "+ddp"
    return name


def _is_sharded(model: Any) -> bool:
    from planner.live.wrappers import sharding_of

    return (sharding_of(model).engine or "").startswith("fsdp")
