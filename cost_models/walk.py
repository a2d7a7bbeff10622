"""Places on the way back through one layer at which a rank may be fullest.

Symbols   h hidden_size   F ffn_hidden_size   a, k query and key/value heads   d, e sizes of a head
          s seq_len   t tensor_parallel   c compute_bytes
Units     bytes a token, elements of gradients; columns of a plan table.

    mlp        the widest place: gradients inside the MLP; only its last matrix has its gradient
    routed     the experts' outputs, whose gradients are weighted in fp32
    experts    they are done, and where others share them than the layer, on their way
    columns    its first matrices, whose input is whole again and whose input's gradient is whole
    norm       the norm before the MLP, whose own backward pass is wide where h is
    attention  gradients of scores (eager), or what travels between ranks (context parallelism)
    end        the first norm: nothing else is left of the layer but all its weights' gradients
    done       the gradient of its input, and the layer's gradients on their way to other ranks

A norm in fp32 that is written out (Llama) holds five fp32 tensors while the square of its input is
differentiated; what it saved in 16 bits is gone, the gradient that passes it by is there instead. A
layer norm is one kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cost_models.activations import FP32, FULL, feed_forward_bytes, norm_bytes
from cost_models.arrays import Real
from cost_models.context_parallel import buffer_bytes_per_token, is_blockwise
from cost_models.model import LayerKind, Weight
from cost_models.parameters import routed_numel
from cost_models.plan import PlanTable
from cost_models.rank_parameters import block_numel
from cost_models.workload import Workload
from hardware_profiles.software import SoftwareProfile

MLP_PARTS = ("mlp", "experts", "shared_experts", "router")


class Place(NamedTuple):
    """One place."""

    freed: Real  # of what the layer saved, gone by then
    working: Real  # there beside
    gradients: Real  # elements of weight gradients that are there by then
    in_attention: bool  # where a dropped attention core is there again
    done: bool = False
    experts_done: bool = False


def norm_working_bytes(
    kind: LayerKind, width: float, compute: float, software: SoftwareProfile
) -> float:
    """Bytes a token that the backward pass of a norm holds beside what was saved."""
    if kind.norm == "layer" or software.rms_norm_saved_fp32_bytes == 0.0:
        return 3.0 * compute * width
    return 5.0 * max(FP32, compute) * width


def places(
    kind: LayerKind,
    trained: LayerKind,
    hidden_size: int,
    everything: Real,
    mlp_working: Real,
    workload: Workload,
    software: SoftwareProfile,
    table: PlanTable,
) -> list[Place]:
    """Return the places of one layer, which saved ``everything``; ``trained``: its own weights."""
    compute, tensor = workload.compute_bytes, 1.0 * table.tensor_parallel
    along = np.where(table.sequence_parallel, tensor, 1.0)
    hidden = compute * hidden_size / along
    norm = norm_bytes(kind, hidden_size, compute, software) / along
    turned = norm_working_bytes(kind, hidden_size, compute, software) / along
    inside = feed_forward_bytes(kind.feed_forward, compute, software) / tensor
    mlp = np.minimum(inside + hidden, everything)
    matrices = [w for w in trained.weights if w.part in MLP_PARTS and not w.is_routed_expert]
    routed = routed_numel(trained, table.expert_tensor, table.expert_parallel)
    by_mlp = block_numel(tuple(matrices), table.tensor_parallel) + routed
    last = _last_matrix(tuple(matrices))
    outputs = [w for w in trained.weights if w.part == "attention" and w.cut == "row"]
    by_output = by_mlp + block_numel(tuple(outputs), table.tensor_parallel)
    rest = [w for w in trained.weights if not w.is_routed_expert]
    whole = block_numel(tuple(rest), table.tensor_parallel) + routed
    after = norm if kind.norms_after else 0.0 * norm
    scores = np.where(is_blockwise(table), 0.0, _score_working(kind, workload, software) / tensor)
    exchange = buffer_bytes_per_token(kind.attention, compute, table)[1]
    feed_forward = kind.feed_forward
    width = feed_forward.ffn_hidden_size * max(1, feed_forward.experts_per_token)
    width += feed_forward.shared_ffn_hidden_size
    outputs_of = (2.0 if feed_forward.gated else 1.0) * width / tensor
    columns = compute * (outputs_of + 2.0 * hidden_size) + hidden
    # the last matrix has given back its input, unless the activation keeps that itself
    saves = software.activation_saved.get(feed_forward.activation, 1.0) > 0.0
    closed = compute * width / tensor * float(saves or feed_forward.gated)
    by_first = block_numel(last, table.tensor_parallel) + 2.0 / 3.0 * routed
    mixture = []
    if feed_forward.num_experts:
        # what each rank routes: all tokens, or its share where it holds experts whole
        rows = feed_forward.experts_per_token * hidden_size * table.expert_tensor / tensor
        wide = max(FP32, compute) if feed_forward.weighted_in_fp32 else compute
        weighted = (wide + (compute if compute < wide else 0.0)) * rows + 2.0 * hidden
        # computed again up to the last tensor that is saved: what came back is there meanwhile
        again = np.equal(table.recompute, FULL) & (table.expert_parallel > 1)
        weighted = weighted + np.where(again, compute * rows, 0.0)
        mixture = [
            Place(after, weighted, 0.0 * by_mlp, False),
            Place(
                np.minimum(inside, everything),
                compute * rows + 2.0 * hidden,
                by_mlp,
                False,
                experts_done=True,
            ),
        ]
    return [
        *mixture,
        Place(
            after + closed, mlp_working - 2.0 * (compute * hidden_size - hidden), by_first, False
        ),
        Place(np.minimum(inside, everything), columns, by_mlp, False),
        Place(mlp, turned, by_mlp, False),
        Place(
            np.minimum(mlp + norm, everything),
            np.maximum(scores, exchange) + 3.0 * hidden,
            by_output,
            True,
        ),
        Place(np.maximum(everything - norm, 0.0), turned, whole, True),
        Place(everything, hidden, whole, True, done=True),
    ]


def _last_matrix(matrices: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """Return the matrices that close the MLP: their gradients come first."""
    return tuple(w for w in matrices if w.cut == "row")


def _score_working(kind: LayerKind, workload: Workload, software: SoftwareProfile) -> Real:
    """Bytes a token of the gradients of eager scores, whole rows of them.

    2 w a s - c a s [16 bits]    gradient and result of the softmax in w = max(4, c) bytes; the
                                 16-bit weights, which were saved too, are gone
    """
    if workload.attention_kernel != "eager":
        return np.asarray(0.0)
    compute = workload.compute_bytes
    wide = max(FP32, compute)
    pairs = kind.attention.num_heads * np.multiply(1.0, workload.seq_len)
    working: Real = (2.0 * wide - (compute if compute < wide else 0.0)) * pairs
    return working
