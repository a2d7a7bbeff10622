"""Interface of a pipeline stage that data and pipeline parallelism rely on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor, nn


class PipelineStage(Protocol):
    """A slice of the model (``executor.model.stage.Stage``), an ``nn.Module``."""

    index: int
    first: bool
    last: bool
    family: Any  # executor.model.families.description.Family
    layouts: Mapping[str, Any]  # layout of every parameter by name
    __call__: Callable[..., Tensor]

    def groups(self) -> Iterator[list[nn.Module]]:
        """Yield the modules that FSDP2 gathers together."""

    def layers(self) -> list[nn.Module]:
        """Return the transformer layers."""

    def expert_modules(self, within: nn.Module | None = None) -> list[nn.Module]:
        """Return the modules that hold routed experts."""

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return a parameter by name (``nn.Module``)."""

    def get_submodule(self, target: str) -> nn.Module:
        """Return a submodule by name (``nn.Module``)."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield all parameters (``nn.Module``)."""
