"""Kernel and host figures that trainer profiles and serving engine profiles share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from hardware_profiles.fields import Amount, Positive
from hardware_profiles.software.profile import ProfileGroup


class ForwardKernels(ProfileGroup, frozen=True, kw_only=True):
    """Memory-bound operators and attention of a forward pass.

    "Accesses" are reads and writes of elements in the compute precision.
    """

    rms_norm_accesses: Amount  # per norm and hidden element
    rms_norm_fp32_bytes: Amount  # in addition, fp32 copies of a norm that is not fused
    layer_norm_accesses: Amount
    layer_norm_in_fp32_accesses: Amount  # weights multiply before the cast back
    residual_accesses: Amount  # per residual add and hidden element
    activation_accesses: Amount  # per FFN element, gated activation
    # per FFN element, in addition, of an activation that is a chain of operators, by its name
    unfused_activation_accesses: Mapping[str, Amount]
    rotary_accesses: Amount  # per query/key element
    dropout_accesses: Amount  # per element of a dropout that is its own kernel
    eager_scores_accesses: Amount  # per head and pair of tokens
    rate_share: Positive  # of the matmul and memory rates expected of a GPU
    flash_efficiency: Amount  # of the achievable matmul rate, on the FLOPs executed
    flash_share_since_hopper: Amount  # of that, on Hopper and later
    pads_matmuls: bool  # 16-bit operands whose rows are no multiple of 8 elements
    # slots of an expert over its share of a sequence's tokens, filled and emptied by products with
    # one-hot masks; 0: tokens are sorted by expert
    one_hot_capacity: Amount
    # standard deviation of the tokens of an expert over their mean; 0: routing is balanced
    routing_spread: Amount
    weighting_bytes: Amount  # per element of experts' outputs, beyond one read in 16 bits
    misaligned_bf16_batches: Amount  # slowdown of batched matmuls of such operands in bf16, or 1


class Host(ProfileGroup, frozen=True, kw_only=True):
    """Operators that the host launches."""

    step_operators: Amount
    operator_seconds: Amount  # host seconds per operator where the machine was not measured


class ForwardSoftware(Protocol):
    """Software whose forward pass is priced: a trainer or a serving engine."""

    @property
    def kernels(self) -> ForwardKernels:
        """Memory-bound operators and attention."""

    @property
    def host(self) -> Host:
        """Operators that the host launches."""
