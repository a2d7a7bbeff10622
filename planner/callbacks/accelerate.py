"""``AcceleratePreflight``: a hook for loops with Accelerate, or for any loop of torch.

with AcceleratePreflight(model, optimizer, accelerator=accelerator, record="runs.csv"):
    for batch in loader: ...
"""

from __future__ import annotations

from typing import Any, Final

from planner.callbacks.scalars import log_scalars
from planner.callbacks.watch import Log, RunWatch
from planner.live.optimizers import WRAPPED
from planner.live.wrappers import ranks_of_run

PACKAGES: Final = ("accelerate", "transformers", "peft")


class AcceleratePreflight:
    """Checks a run before its first forward pass, and records it at the end of the block.

    ``accelerator``: gives precision and accumulation, and receives the scalars; without it, any
    loop. Optimizer steps are counted by a hook of the optimizer. Other options as ``RunWatch``.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        accelerator: Any = None,
        log: Log | None = None,
        **options: Any,
    ) -> None:
        self.model, self.optimizer, self.accelerator = model, optimizer, accelerator
        self.watch = RunWatch(PACKAGES, log=log or self._send, **options)
        self._steps: Any = None

    def __enter__(self) -> AcceleratePreflight:
        inner = next(
            (getattr(self.optimizer, one) for one in WRAPPED if hasattr(self.optimizer, one)),
            self.optimizer,
        )
        self._steps = inner.register_step_post_hook(lambda *_: self.watch.step())
        read = {}
        if self.accelerator is not None:
            self.watch.is_main = bool(self.accelerator.is_main_process)
            mixed = str(self.accelerator.mixed_precision)
            read["precision"] = mixed if mixed in ("bf16", "fp16", "fp8") else None
            read["num_microbatches"] = self.accelerator.gradient_accumulation_steps
        else:
            self.watch.is_main = ranks_of_run()[0] == 1 or _rank() == 0
        self.watch.attach(self.model, inner, **read)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._steps.remove()
        if error is None:
            self.watch.finish()
        else:
            self.watch.failed(error)

    def _send(self, scalars: dict[str, float]) -> None:
        """Send scalars to the accelerator's trackers, or to the running ones."""
        if self.accelerator is not None and getattr(self.accelerator, "trackers", None):
            self.accelerator.log(scalars)
        else:
            log_scalars(scalars)


def _rank() -> int:
    import os

    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0
