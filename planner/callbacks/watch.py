"""The part of a callback that does not depend on the trainer.

Before the first forward pass the run is checked and three lines are printed; after the last step
(or when memory runs out) one row is added to a table of runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from hardware_profiles.errors import InputError, ShardplanError
from hardware_profiles.terminal import say
from planner.answer.fit_answer import FitAnswer
from planner.api.check import CheckAnswer, check
from planner.live.batches import batch_of
from planner.live.wrappers import unwrapped
from planner.observation.recorder import StepRecorder, versions
from planner.observation.run_row import append_row, run_row
from planner.out_of_memory.explanation import explain_out_of_memory

PREFIX: Final = "shardplan/"  # of scalars
MEMORY_ERROR: Final = "OutOfMemoryError"
Log = Callable[[dict[str, float]], None]


class DoesNotFit(RuntimeError):
    """Raised before the first step where a run does not fit and was to be stopped."""


class RunWatch:
    """State of one watched run; its options are those of every callback.

    ``packages``: whose versions are recorded, the trainer's first. ``stop``: raise ``DoesNotFit``
    where the run does not fit. ``record``: a table of runs that gets a row. ``log``: receives
    scalars. ``options``: arguments of ``planner.check``.
    """

    def __init__(
        self,
        packages: tuple[str, ...],
        *,
        stop: bool = False,
        record: str | Path | None = None,
        warm_up: int = 3,
        log: Log | None = None,
        **options: Any,
    ) -> None:
        self.packages, self.stop, self.record, self.log = packages, stop, record, log
        self.options = options
        self.is_main = True  # rank 0 prints and records
        self.answer: CheckAnswer | None = None
        self.failure: str | None = None  # why the run could not be checked
        self.recorder = StepRecorder(warm_up)
        self._hook: Any = None
        self._done = False
        self._previous: Any = None

    def attach(self, model: Any, optimizer: Any = None, **read: Any) -> None:
        """Check the run with the batch of the first forward pass of a model in training mode.

        ``read``: what the trainer knows (arguments of ``check``); ``options`` replace it.
        """
        inside = unwrapped(model)

        def before(module: Any, args: Any, kwargs: Any) -> None:
            if not module.training:
                return
            self._hook.remove()
            given = dict(kwargs) or tuple(args)
            if args and kwargs:
                given = {**batch_of(args, inside).arguments, **kwargs}
            self.check_now(model, optimizer, given, **read)
            self.recorder.start()

        self._hook = inside.register_forward_pre_hook(before, with_kwargs=True)
        self._previous = sys.excepthook
        sys.excepthook = self._excepthook

    def check_now(self, model: Any, optimizer: Any, inputs: Any, **read: Any) -> None:
        """Check the run, print three lines, and stop it if that was asked for.

        A run that cannot be checked goes on; one line says why.
        """
        given = {**{k: v for k, v in read.items() if v is not None}, **self.options}
        try:
            self.answer = check(model, **{"optimizer": optimizer, "inputs": inputs, **given})
        except ShardplanError as error:
            self.failure = str(error)
            if self.is_main:
                say(f"shardplan: this run was not checked: {error}")
            return
        if self.is_main:
            for line in self.answer.lines:
                say(line)
        self._log(self.predicted())
        if self.stop and self.answer.verdict == "does_not_fit":
            self._detach()
            raise DoesNotFit("\n".join(self.answer.lines))

    def step(self) -> None:
        """Note the end of an optimizer step."""
        self.recorder.step()

    def failed(self, error: BaseException) -> None:
        """Record a run that ran out of memory, and explain the error; ignore other errors."""
        if type(error).__name__ != MEMORY_ERROR and "out of memory" not in str(error):
            return
        if self.is_main and not self._done:
            say(str(explain_out_of_memory(_traceback_text(error))))
        self.finish(out_of_memory=True)

    def finish(self, *, out_of_memory: bool = False) -> None:
        """Compare with the prediction, log scalars, and add the row."""
        self._detach()
        if self._done or self.answer is None:
            return
        self._done = True
        measured = self.recorder.measured(out_of_memory=out_of_memory)
        scalars = {}
        if measured.step_seconds:
            scalars["measured_step_seconds"] = measured.step_seconds
        if measured.reserved:
            scalars["measured_reserved_bytes"] = float(measured.reserved)
        self._log(scalars)
        if self.is_main and measured.step_seconds:
            predicted = self.answer.step_seconds
            say(
                f"shardplan: a step took {measured.step_seconds:.3g} s "
                f"(predicted {predicted:.3g} s, median of {measured.steps})"
            )
        fit = self.answer.fit
        if self.record is None or not self.is_main:
            return
        if not isinstance(fit, FitAnswer):
            say(f"shardplan: {self.answer.live.name} was traced: RUNS.csv has no columns for it")
            return
        if measured.step_seconds is None and not out_of_memory and measured.peak is None:
            say("shardplan: too few steps to record (--warm-up steps are left out)")
            return
        try:
            append_row(Path(self.record), run_row(fit, measured, versions(*self.packages, "torch")))
        except InputError as error:
            say(f"shardplan: {error}")
            return
        say(f"shardplan: added this run to {self.record} (shardplan learn {self.record})")

    def predicted(self) -> dict[str, float]:
        """Return the scalars of the prediction."""
        assert self.answer is not None
        return {
            "predicted_step_seconds": self.answer.step_seconds,
            "predicted_peak_bytes": self.answer.peak_bytes,
        }

    def _log(self, scalars: Mapping[str, float]) -> None:
        if self.log is not None and self.is_main and scalars:
            self.log({f"{PREFIX}{name}": value for name, value in scalars.items()})

    def _excepthook(self, kind: Any, error: BaseException, trace: Any) -> None:
        previous = self._previous or sys.__excepthook__
        self.failed(error)
        previous(kind, error, trace)

    def _detach(self) -> None:
        """Remove the hooks of module and interpreter."""
        if self._hook is not None:
            self._hook.remove()
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._previous


def _traceback_text(error: BaseException) -> str:
    """Return a traceback as Python prints it."""
    import traceback

    return "".join(traceback.format_exception(error))
