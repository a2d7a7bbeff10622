"""``LightningPreflight``: a callback for the Trainer of Lightning.

trainer = lightning.Trainer(..., callbacks=[LightningPreflight(record="runs.csv")])
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Any, Final

from planner.callbacks.watch import RunWatch

NAME: Final = "LightningPreflight"
PACKAGES: Final = ("lightning", "pytorch-lightning", "transformers", "peft")


def __getattr__(name: str) -> Any:
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _callback_class()


@cache
def _callback_class() -> Any:
    """Return the class, which inherits from Lightning's own of the package that is in use."""
    package = "lightning.pytorch"
    if "pytorch_lightning" in sys.modules and package not in sys.modules:
        package = "pytorch_lightning"
    base = import_module(package).Callback

    class LightningPreflight(base):  # type: ignore[misc, valid-type]
        """Checks a run before its first step, and records it; options as ``RunWatch``."""

        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.watch = RunWatch(PACKAGES, **options)
            self.steps = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.watch.is_main = trainer.is_global_zero
            if self.watch.log is None and trainer.logger is not None:
                self.watch.log = lambda scalars: _log(trainer, scalars)
            self.steps = trainer.global_step
            # the strategy has the module in its wrapper: DDP, FSDP or DeepSpeed's engine
            model = getattr(trainer.strategy, "model", None) or pl_module
            self.watch.attach(model, next(iter(trainer.optimizers), None), **_read(trainer))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            if trainer.global_step > self.steps:
                self.steps = trainer.global_step
                self.watch.step()

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            self.watch.recorder.pause()

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            self.watch.recorder.pause()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.watch.finish()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.watch.failed(exception)

    return LightningPreflight


def _log(trainer: Any, scalars: dict[str, float]) -> None:
    """Send scalars to all loggers of a Trainer."""
    for logger in trainer.loggers:
        logger.log_metrics(scalars, step=trainer.global_step)


def _read(trainer: Any) -> dict[str, Any]:
    """Return the arguments of ``check`` that a Trainer gives."""
    words = str(trainer.precision).split("-")
    mixed = words[-1] == "mixed"
    precision = {"bf16": "bf16", "16": "fp16"}.get(words[0]) if mixed else None
    return {"precision": precision, "num_microbatches": trainer.accumulate_grad_batches}
