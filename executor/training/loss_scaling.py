"""Loss scaling for fp16: gradients of a multiple of the loss, so that few underflow.

The scale halves where gradients overflow (that step is skipped) and doubles after many steps
without overflow, as in torch.amp.GradScaler (Micikevicius et al., arXiv:1710.03740, sec. 3.2). All
ranks decide by the gradient norm of the whole model, which they have anyway, so all have the same
scale, whatever the layout of ranks. Scales are powers of two, which change no digit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

FIRST_SCALE: Final = 2.0**16  # the defaults of torch.amp.GradScaler
GROWTH_FACTOR: Final = 2.0
BACKOFF_FACTOR: Final = 0.5
GROWTH_INTERVAL: Final = 2000  # steps without an overflow
# from the first scale down to 2^-4: gradients that overflow even so have another cause
MAX_SKIPPED: Final = 20  # consecutive steps


@dataclass(slots=True)
class LossScaler:
    """The scale of the next step; its fields are saved in checkpoints."""

    scale: float = FIRST_SCALE
    good_steps: int = 0  # since the last change
    skipped: int = 0  # in the whole run
    skipped_in_a_row: int = 0

    def update(self, *, overflowed: bool) -> None:
        """Adjust the scale after a step."""
        if overflowed:
            self.scale *= BACKOFF_FACTOR
            self.good_steps = 0
            self.skipped += 1
            self.skipped_in_a_row += 1
            return
        self.skipped_in_a_row = 0
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.scale *= GROWTH_FACTOR
            self.good_steps = 0

    @property
    def always_overflows(self) -> bool:
        """Whether gradients overflow at every scale."""
        return self.skipped_in_a_row >= MAX_SKIPPED

    def state(self) -> dict[str, float | int]:
        """Return plain JSON values."""
        return asdict(self)

    def restore(self, state: dict[str, float | int]) -> None:
        """Restore the fields from ``state``."""
        for name in self.__slots__:
            setattr(self, name, type(getattr(self, name))(state[name]))
