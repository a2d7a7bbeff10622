"""Expert parallelism: all-to-all traffic of routed tokens, and its exposed seconds.

Symbols   n tokens that a rank routes   k experts_per_token   E num_experts   h hidden_size
          c compute_bytes   m num_microbatches   ep expert_parallel   t tensor_parallel
Units     bytes; columns of a plan table.

Traffic is that of balanced routing; its seconds wait for the most loaded rank (``most_loaded``).
Leaves out: limits of an expert's tokens without padding.
"""

from __future__ import annotations

import numpy as np

from cost_models.arrays import Count, Real, holds
from cost_models.columnar.columns import on_distinct_rows
from cost_models.communication.traffic import Traffic, no_traffic
from cost_models.model.spec import FeedForward, ModelSpec
from cost_models.partition.rank_view import RankView
from cost_models.partition.recomputed_layers import exchanges_again
from cost_models.plan.recompute import FULL, repeats_module
from hardware_profiles.cluster.links.nvlink_domains import domains_spanned
from hardware_profiles.software.kernels import ForwardSoftware

COUNT_BYTES = 8.0  # an int64
# spread of experts that a bias balances, over that under an auxiliary loss: the most loaded one
# gets 0.04 more than the mean instead of 0.52 to 0.72 (arXiv:2408.15664, table 2, from memory)
BIASED_SPREAD = 0.06
# expected largest of 1, 2, 4, ... standard normal variables
LARGEST_NORMAL = (0.0, 0.564, 1.029, 1.424, 1.766, 2.070, 2.344, 2.595, 2.827, 3.043, 3.247)


def expert_traffic(view: RankView) -> dict[tuple[str, str], Traffic]:
    """Return the all_to_all traffic over expert-parallel ranks.

    For each layer and micro-batch:

        counts    8 E        forward (again with full recomputation, or of ``moe``, and by
                             operator if the trainer keeps no rows that were exchanged)
        rows      c n k h    twice forward (dispatch and combine; recomputed too), twice backward;
                             f k with a capacity factor f: all slots

    Forward-only (frozen) layers have the forward part alone. The bytes of one rank depend on the
    routing, so they are the mean over the ranks of a group, whose sum does not; the most loaded
    rank moves more if routing is not balanced.

    Source: Lepikhin et al., GShard (arXiv:2006.16668), sec. 3.2; no token is dropped.
    """
    table, hidden_bytes = view.table, view.compute_bytes * view.model.hidden_size
    if not holds(table.expert_parallel > 1):
        return {("expert", "all_to_all"): no_traffic(len(table))}
    repeats = (table.recompute == FULL) | repeats_module(table.recompute, "moe")
    repeats = repeats | exchanges_again(view.software, table)
    again = np.where(repeats, 1.0, 0.0)
    tokens = routed_tokens(view)
    total = no_traffic(len(table))
    for layers in view.layers:
        experts = layers.kind.feed_forward
        if not experts.num_experts:
            continue
        repeated = layers.run_again * again
        times = layers.count + repeated
        total += Traffic(times, times * COUNT_BYTES * experts.num_experts)
        times = 2.0 * (layers.count + layers.trained + repeated)
        rows = hidden_bytes * slots_per_token(experts, view.software) * tokens
        total += Traffic(times, times * rows)
    active = np.where(table.expert_parallel > 1, 1.0 * table.num_microbatches, 0.0)
    return {("expert", "all_to_all"): total.times(active)}


def routed_tokens(view: RankView) -> Real:
    """Tokens of a micro-batch that a rank routes: b s, or b s / t if experts are not sharded by t.

    With context parallelism s is the rank's number of tokens. Tensor-parallel ranks that shard each
    expert all route the same tokens; with whole experts, each rank routes its share.
    """
    table = view.table
    return view.tokens / np.where(table.expert_tensor_parallel, 1.0, 1.0 * table.tensor_parallel)


def most_loaded(
    feed_forward: FeedForward, expert_parallel: Count, software: ForwardSoftware
) -> Real:
    """Return the rows of the rank that gets most over their mean; the others wait in every layer.

        1 + v z(ep) / sqrt(E / ep)      v standard deviation of an expert's tokens over their mean
                                        z(n) expected largest of n standard normal variables

    v: ``kernels.routing_spread``; ``BIASED_SPREAD`` of it where a bias balances the experts.

    Source: order statistics of independent experts; v from Wang et al., arXiv:2408.15664, table 2.
    Leaves out: hot experts that stay so, and how v changes in the course of a training.

    >>> from cost_models.model.families import model_spec
    >>> from cost_models.model.presets import load_preset
    >>> from hardware_profiles.software.trainer import software_profile
    >>> model = model_spec(load_preset("mixtral-8x7b").config, name="mixtral-8x7b")
    >>> mixture, megatron = model.kinds[0].feed_forward, software_profile("megatron-core")
    >>> most_loaded(mixture, np.array([1, 2, 8]), megatron).round(3).tolist()
    [1.0, 1.073, 1.37]
    """
    spread = software.kernels.routing_spread
    if not (spread and feed_forward.num_experts):
        return 1.0
    if feed_forward.balanced_by_bias:
        spread = BIASED_SPREAD * spread
    experts = feed_forward.num_experts / np.multiply(1.0, expert_parallel)
    return 1.0 + spread * _largest_normal(expert_parallel) / np.sqrt(experts)


@on_distinct_rows
def _largest_normal(number: Count) -> Real:
    return np.interp(np.log2(number), np.arange(len(LARGEST_NORMAL)), LARGEST_NORMAL)


def slots_per_token(feed_forward: FeedForward, software: ForwardSoftware) -> float:
    """Rows that experts compute for a token: k, or f k with a capacity factor f."""
    return feed_forward.experts_per_token * (software.kernels.one_hot_capacity or 1.0)


def max_experts_per_token(model: ModelSpec) -> int:
    """Largest number of experts of a token over all layers; 0 without experts."""
    return max(kind.feed_forward.experts_per_token for kind in model.kinds)


def expert_groups(model: ModelSpec) -> tuple[int, int]:
    """Groups of experts, and of how many of them the experts of a token are."""
    layers = [kind.feed_forward for kind in model.kinds]
    most = max(layers, key=lambda layer: layer.experts_per_token)
    return most.expert_groups, most.groups_per_token


def exposed_all_to_all_seconds(traffic: Real, passes: Real, view: RankView) -> Real:
    """Seconds of a micro-batch's all-to-all that are not hidden.

    ``overlap.expert_exchange_between_nodes`` and ``..._inside_nodes``: where experts lie in several
    NVLink domains, and in one, another micro-batch's ``passes`` run meanwhile; a hidden second
    costs computation ``overlap.data_parallel_interference`` seconds. Passes that are not paired
    hide nothing: of m v forward passes of a rank's v stages the first w of an average rank,

        w = 1                        on one stage
            p - 1 + (v - 1) p + 1    in a pipeline of p ranks

    Source: Megatron-LM core/pipeline_parallel/combined_1f1b.py (one stage: the first forward and
    the last backward pass run alone), schedules.py, get_pp_rank_microbatches.
    """
    table, overlap = view.table, view.software.overlap
    between, inside = overlap.expert_exchange_between_nodes, overlap.expert_exchange_inside_nodes
    if not (between or inside):
        return traffic
    stride = np.where(table.expert_tensor_parallel, table.tensor_parallel, 1)
    spans = on_distinct_rows(domains_spanned)(view.cluster, table.expert_parallel, stride) > 1.0
    stages = 1.0 * table.pipeline_parallel
    alone = np.where(stages > 1.0, stages * table.virtual_stages, 1.0)
    paired = np.maximum(0.0, 1.0 - alone / (1.0 * table.num_microbatches * table.virtual_stages))
    hidden = np.where(np.where(spans, between, inside), np.minimum(traffic, passes), 0.0) * paired
    return traffic - (1.0 - overlap.data_parallel_interference) * hidden
