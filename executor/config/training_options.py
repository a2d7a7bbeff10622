"""Training options of a run, beyond its plan. Imports no torch, for the command line."""

from __future__ import annotations

from dataclasses import dataclass

from executor.config.learning_rate import LearningRate


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Training options of one run; the same on every rank."""

    steps: int
    learning_rate: LearningRate
    seed: int = 0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float | None = 1.0  # None: gradients are not clipped
    evaluate_every: int | None = None  # steps; None: after the last one only
    evaluation_batches: int = 16
    sample_every: int = 10  # interval of steps with memory and waits of all ranks; 0: never
    compile: bool = False  # torch.compile over the layers
