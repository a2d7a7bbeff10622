"""How to train: everything that a plan does not say.

Imports no torch: the command line reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

from executor.config.learning_rate import LearningRate


@dataclass(frozen=True, slots=True)
class Training:
    """The settings of one run; the same on every rank."""

    steps: int
    learning_rate: LearningRate
    seed: int = 0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float | None = 1.0  # None: gradients are not clipped
    evaluate_every: int | None = None  # steps; None: after the last one only
    evaluation_batches: int = 16
    sample_every: int = 10  # steps of which all ranks tell memory and waiting time; 0: of none
    compile: bool = False  # torch.compile over the layers
