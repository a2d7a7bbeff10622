"""Memory of attention masks that keep the documents of one sequence apart.

Symbols  b micro_batch_size   s seq_len   c compute_bytes   a, k query and key/value heads
         d head_dim   e value_head_dim
Units    bytes.

torch's fused kernels add a mask of shape (b, 1, s, s) to the scores and do not support grouped
queries with it: keys and values are repeated for every query head, and saved so. All layers of a
stage with the same window share a mask; each micro-batch has its own. Capped scores and kernels
with document support (profiles whose activations.window_needs_mask is false) need no mask.
Leaves out the masks of eager attention, next to its scores.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cost_models.activations.operators import needs_window_mask
from cost_models.arrays import Real
from cost_models.model.spec import Attention, LayerKind
from cost_models.partition.rank_view import RankView
from cost_models.plan.workload import Workload
from hardware_profiles.software.trainer import SoftwareProfile


def mask_bytes(view: RankView) -> Real:
    """Bytes of one micro-batch's masks on a stage: c b s^2 for every window."""
    workload, software = view.workload, view.software
    windows = {
        _narrower(layers.kind.attention, workload)
        for layers in view.layers
        if _masked(layers.kind.attention, workload, software)
    }
    one = workload.compute_bytes * workload.seq_len**2
    return one * len(windows) * np.multiply(1.0, view.table.micro_batch_size)


def masked_key_bytes(attention: Attention, workload: Workload, software: SoftwareProfile) -> float:
    """Bytes a token by which saved keys and values grow: c (a - k) (d + e).

    Where a window needs a mask they have grown already, see ``activations.score_bytes``.
    """
    needed = _masked(attention, workload, software)
    if not needed or needs_window_mask(attention, workload.seq_len, software):
        return 0.0
    heads = attention.num_heads - attention.num_kv_heads
    width = attention.head_dim + attention.value_head_dim
    return workload.compute_bytes * heads * width


def as_computed(kind: LayerKind, workload: Workload, software: SoftwareProfile) -> LayerKind:
    """Return the layer as the kernels compute it: with a mask they leave no scores out.

    A kernel that knows documents computes their scores only: of a causal one, half of its length a
    token.
    """
    attention = kind.attention
    known = workload.attention_kernel == "flash" and not software.activations.window_needs_mask
    if workload.document_mask and workload.document_length and known:
        share = 0.5 if attention.causal else 1.0
        seen = max(1, round(share * workload.document_length))
        window = seen if attention.window is None else min(seen, attention.window)
        return replace(kind, attention=replace(attention, causal=False, window=window))
    by_window = needs_window_mask(attention, workload.seq_len, software)
    if _masked(attention, workload, software) or (
        workload.attention_kernel == "flash" and by_window
    ):
        return replace(kind, attention=replace(attention, causal=False, window=None))
    return kind


def _masked(attention: Attention, workload: Workload, software: SoftwareProfile) -> bool:
    """Whether the core takes a document mask."""
    fused = workload.attention_kernel == "flash" and not attention.capped
    fused = fused and attention.delta_rule is None  # its kernels take the documents' starts
    return bool(workload.document_mask and fused and software.activations.window_needs_mask)


def _narrower(attention: Attention, workload: Workload) -> int | None:
    """Return the window, or None if it covers the whole sequence."""
    window = attention.window
    return None if window is None or window >= workload.seq_len else window
