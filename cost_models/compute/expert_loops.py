"""Bytes that a loop over experts moves in addition to one kernel for all experts.

Symbols   E experts   k experts a token goes to   h hidden size   c compute_bytes
Units     bytes a token.

Leaves out: the host's time for each expert (``kernel_launch``).
"""

from __future__ import annotations

from cost_models.model.spec import LayerKind
from hardware_profiles.software.trainer import SoftwareProfile


def loop_bytes(
    kind: LayerKind, hidden_size: int, compute_bytes: float, software: SoftwareProfile
) -> tuple[float, float]:
    """Bytes a token of a forward and of a backward pass beyond 3 k + 1 accesses and twice these.

        forward    7 k + 1       zeros written; for each expert its rows gathered (2 k in all),
                                 weighted (2 k), added to the sum (3 k)
        backward   4 E + 11 k - 3
                                 gradients of sums and weights (8 k); of each expert's rows,
                                 written into zeros of the size of all tokens (E + 3 k), which are
                                 then summed (3 (E - 1))

    Source: counted at torch's dispatcher, transformers MixtralSparseMoeBlock of 2024 (index,
    index_add_ and their gradients).
    """
    feed_forward = kind.feed_forward
    if not (feed_forward.num_experts and software.activations.experts_one_by_one):
        return 0.0, 0.0
    experts, chosen = 1.0 * feed_forward.num_experts, 1.0 * feed_forward.experts_per_token
    forward = 4.0 * chosen
    backward = 4.0 * experts + 11.0 * chosen - 3.0 - 2.0 * (3.0 * chosen + 1.0)
    return compute_bytes * hidden_size * forward, compute_bytes * hidden_size * backward
