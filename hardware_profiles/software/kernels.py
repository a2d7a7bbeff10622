"""What the formulas of a forward pass read of whoever runs it: a trainer or a serving engine."""

from __future__ import annotations

from typing import Protocol


class ForwardKernels(Protocol):
    """Numbers that software profiles and serving profiles share, under the same names."""

    @property
    def rms_norm_accesses(self) -> float:
        """Reads and writes of an RMS norm, per hidden element."""

    @property
    def rms_norm_fp32_bytes(self) -> float:
        """Bytes that a norm written out moves in fp32 beside them."""

    @property
    def layer_norm_accesses(self) -> float:
        """Reads and writes of a layer norm."""

    @property
    def layer_norm_in_fp32_accesses(self) -> float:
        """The same, where the weights multiply in fp32."""

    @property
    def residual_accesses(self) -> float:
        """Reads and writes of a residual add."""

    @property
    def activation_accesses(self) -> float:
        """Reads and writes per feed-forward element of a gated activation."""

    @property
    def rotary_accesses(self) -> float:
        """Reads and writes per element of queries and keys."""

    @property
    def dropout_accesses(self) -> float:
        """Reads and writes of a dropout on its own."""

    @property
    def eager_scores_accesses(self) -> float:
        """Reads and writes per score of eager attention."""

    @property
    def flash_efficiency(self) -> float:
        """Share of the achievable matmul rate that a flash kernel reaches."""

    @property
    def flash_share_since_hopper(self) -> float:
        """Share of that on Hopper and later."""

    @property
    def operator_seconds(self) -> float:
        """Host seconds an operator, where the machine was not measured."""
