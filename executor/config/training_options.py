"""Training options of a run, beyond its plan. Imports no torch, for the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from executor.config.bounds import BelowOne, Count, Natural, Positive, Rate, Share
from executor.config.learning_rate import LearningRate, Schedule
from hardware_profiles.options import Option

# titles of the options in the help
TRAINING: Final = "training"
WATCHING: Final = "evaluation and metrics"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """Training options of one run; the same on every rank."""

    steps: Annotated[Count, Option(common=True, group=TRAINING, help="default: {default}")] = 20
    seed: Annotated[Natural, Option(group=TRAINING, help="default: {default}")] = 0
    learning_rate: Annotated[
        Rate, Option(common=True, group=TRAINING, help="peak (default: {default})")
    ] = 1e-3
    lr_schedule: Annotated[
        Schedule,
        Option(
            group=TRAINING,
            help="decay after the warm-up (default: {default}; wsd: constant, then linear)",
        ),
    ] = "constant"
    warmup_steps: Annotated[
        Natural, Option(metavar="N", group=TRAINING, help="default: {default}")
    ] = 0
    decay_steps: Annotated[
        Count | None,
        Option(
            metavar="N",
            group=TRAINING,
            help="default: all after the warm-up; wsd: the last tenth of the steps",
        ),
    ] = None
    min_lr_ratio: Annotated[
        Share,
        Option(
            metavar="R",
            group=TRAINING,
            help="final learning rate relative to --learning-rate (default: {default})",
        ),
    ] = 0.0
    weight_decay: Annotated[Rate, Option(group=TRAINING, help="default: {default}")] = 0.1
    beta1: Annotated[BelowOne, Option(group=TRAINING, help="default: {default}")] = 0.9
    beta2: Annotated[BelowOne, Option(group=TRAINING, help="default: {default}")] = 0.999
    epsilon: Annotated[Positive, Option(group=TRAINING, help="default: {default}")] = 1e-8
    max_grad_norm: Annotated[
        Rate,
        Option(
            group=TRAINING, help="clip gradients to this norm (default: {default}; 0: do not clip)"
        ),
    ] = 1.0
    compile: Annotated[
        bool,
        Option(
            group=TRAINING,
            help="torch.compile the layers (runs eagerly, with a note, where no compiler is found)",
        ),
    ] = False
    eval_every: Annotated[
        Count | None,
        Option(
            metavar="N",
            group=WATCHING,
            help="evaluate after every N steps (default: after the last one)",
        ),
    ] = None
    eval_batches: Annotated[
        Count,
        Option(
            metavar="K",
            group=WATCHING,
            help="global batches of an evaluation at most (default: {default})",
        ),
    ] = 16
    sample_every: Annotated[
        Natural,
        Option(
            metavar="N",
            group=WATCHING,
            help="record memory and waiting time of all ranks every N steps (default: {default}; "
            "0: never)",
        ),
    ] = 10

    def learning_rate_schedule(self) -> LearningRate:
        """Return the learning rate as a function of the step, or raise an InputError."""
        return LearningRate(
            peak=self.learning_rate,
            schedule=self.lr_schedule,
            steps=self.steps,
            warmup_steps=self.warmup_steps,
            min_ratio=self.min_lr_ratio,
            decay_steps=self.decay_steps,
        )
