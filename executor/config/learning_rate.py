"""Learning rate schedules: a pure function of the step, so that a resumed run is exact.

Symbols   s step (from 0)   w warmup_steps   d decay_steps   n steps of the run
          p peak   m min_ratio
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

from hardware_profiles.errors import InputError

Schedule = Literal["constant", "linear", "cosine", "wsd"]
SCHEDULES: Final[tuple[str, ...]] = get_args(Schedule)
WSD_SHARE: Final = 0.1  # of the steps decay in wsd (Hu et al., arXiv:2404.06395, sec. 4.2)


@dataclass(frozen=True, slots=True)
class LearningRate:
    """Warm-up, then one of the usual decays.

        warm-up   p (s + 1) / w                                  s < w
        constant  p
        linear    p (m + (1 - m) (1 - x))                        x = (s - w) / d, at most 1
        cosine    p (m + (1 - m) (1 + cos(pi x)) / 2)            Loshchilov and Hutter,
                                                                 arXiv:1608.03983, eq. 5
        wsd       p, then linear over the last d steps           Hu et al., arXiv:2404.06395

    >>> [LearningRate(1.0, "linear", steps=6, warmup_steps=2).at(s) for s in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """

    peak: float
    schedule: Schedule = "constant"
    steps: int = 0  # of the run; unused by constant
    warmup_steps: int = 0
    min_ratio: float = 0.0  # final learning rate relative to the peak
    decay_steps: int | None = None  # None: all after the warm-up; wsd: the last tenth

    def __post_init__(self) -> None:
        if self.schedule == "constant":
            if self.decay_steps is not None:
                raise InputError("--decay-steps: a constant learning rate does not decay")
            return
        if self.warmup_steps >= self.steps:
            raise InputError(
                f"--warmup-steps {self.warmup_steps}: leaves none of the {self.steps} steps for "
                f"the {self.schedule} decay"
            )
        if self.schedule == "wsd" and self.warmup_steps + self._decay_steps > self.steps:
            raise InputError(
                f"--decay-steps {self.decay_steps}: with {self.warmup_steps} warm-up steps more "
                f"than the {self.steps} steps of the run"
            )

    @property
    def _decay_steps(self) -> int:
        if self.decay_steps is not None:
            return self.decay_steps
        if self.schedule == "wsd":
            after = self.steps - self.warmup_steps
            return min(after, max(1, round(WSD_SHARE * self.steps)))
        return self.steps - self.warmup_steps

    def at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        decay = self._decay_steps
        begin = self.steps - decay if self.schedule == "wsd" else self.warmup_steps
        done = min(1.0, max(0.0, (step - begin) / decay))
        left = (1.0 + math.cos(math.pi * done)) / 2.0 if self.schedule == "cosine" else 1.0 - done
        return self.peak * (self.min_ratio + (1.0 - self.min_ratio) * left)
