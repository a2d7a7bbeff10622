"""Seconds that the passes of a pipeline rank wait for its host.

Waits are for launches of operators, for groups of adapters, and for what is offloaded.

Units: seconds of a micro-batch, columns of a plan table. A pair of numbers is (forward, backward).
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from cost_models.activations.live import layer_bytes
from cost_models.arrays import Real, among, holds
from cost_models.communication.host_link import (
    activation_offload_seconds,
    states_link,
    weight_fetch_seconds,
)
from cost_models.compute.adapters import adapter_wait
from cost_models.compute.kernel_launch import deferred_launches, host_wait, kernel_gaps
from cost_models.compute.rates import Rates
from cost_models.memory.optimizer_states import updated_elements
from cost_models.partition.frozen_weights import offloaded_frozen_bytes
from cost_models.partition.rank_view import RankView
from cost_models.partition.schedules import SPLIT_CODES
from cost_models.plan.recompute import FULL

Pair = tuple[Real, Real]  # of a forward and of a backward pass


class DeviceSeconds(Struct, frozen=True):
    """Seconds that the device computes for one micro-batch."""

    forward: Real
    backward: Real
    recompute: Real
    weights: Real  # of ``backward``, the gradients of weights
    core: Real  # of ``forward``, the attention cores

    @property
    def passes(self) -> Pair:
        """Forward pass; backward pass with recomputation."""
        return self.forward, self.backward + self.recompute


class DevicePasses(Struct, frozen=True):
    """The passes of a micro-batch on the device of a rank, before they wait for the host."""

    view: RankView
    rate: Rates
    device: DeviceSeconds
    # collectives inside layers, which are in the same queue as the kernels: those of tensor
    # parallelism, and of context parallelism where attention does not hide them
    inside: Pair
    link: float  # bytes/s to the host

    @property
    def seconds(self) -> Pair:
        """Forward pass; backward pass with recomputation; with collectives inside layers."""
        forward, backward = self.device.passes
        return forward + self.inside[0], backward + self.inside[1]


def waiting_seconds(passes: DevicePasses, starts: Pair) -> Pair:
    """Seconds that passes wait for the host: launches (``starts``), adapters, offload."""
    host = host_seconds(passes, starts)
    return with_weight_offload(passes, with_activation_offload(passes, host))


def deferred_seconds(passes: DevicePasses, starts: Pair, host: Pair) -> Real:
    """Seconds of a micro-batch's weight gradients, which a split backward pass defers.

    Those by which the pass, with all that it waits for (``host``), is longer than without them: the
    first half waits for its own launches and for what is loaded.
    """
    device = passes.device
    split = among(passes.view.table.pipeline_schedule, SPLIT_CODES)
    if not holds(split):
        return device.weights
    first = replace(device, backward=device.backward - device.weights)
    deferred = np.minimum(starts[1], deferred_launches(passes.view, passes.rate.operator))
    alone = waiting_seconds(replace(passes, device=first), (starts[0], starts[1] - deferred))
    return np.where(split, device.weights + host[1] - alone[1], device.weights)


def host_seconds(passes: DevicePasses, starts: Pair) -> Pair:
    """Seconds that the device waits for the host to start operators, and around adapters.

    The waits around adapters and the gaps between kernels are in the same queue as the kernels.
    """
    view, adapters, busy = passes.view, adapter_waits(passes), passes.seconds
    waits = view.software.host.synchronous
    gaps = kernel_gaps(view) if view.cluster.accelerator.device == "gpu" else (0.0, 0.0)

    def wait(each: int) -> Real:
        queued = adapters[each] + gaps[each]
        device = busy[each] + queued
        return host_wait(starts[each], device, passes.rate, synchronous=waits) + queued

    return wait(0), wait(1)


def adapter_waits(passes: DevicePasses) -> Pair:
    """Seconds that passes wait for the host around adapters that ZeRO-3 shards one by one."""
    view, software, table = passes.view, passes.view.software, passes.view.table
    forward, backward = np.zeros(len(table)), np.zeros(len(table))
    wraps = software.sharding.adapters_apart & (table.zero_stage >= 3) & (table.shard_ranks > 1)
    if not holds(wraps):
        return forward, backward
    for layers in view.layers:
        if not holds(layers.trained):
            continue
        sizes = layers.kind, view.own(layers.kind).tokens, table.tensor_parallel, view.compute_bytes
        wait = adapter_wait(*sizes, passes.rate, software)
        wait = np.where(wraps, wait, 0.0)
        forward = forward + layers.count * wait
        times = layers.count + np.where(table.recompute == FULL, layers.recomputed, 0.0)
        backward = backward + times * wait
    return forward, backward


def with_activation_offload(passes: DevicePasses, host: Pair) -> Pair:
    """Return ``host`` with the seconds of activation offload that passes do not hide.

    Leaves out: collectives inside layers that use the link to the host, too.
    """
    view = passes.view
    offloads = view.table.offloads_activations
    if not holds(offloads):
        return host
    saved = np.where(offloads, layer_bytes(view), 0.0)
    forward, backward = passes.seconds
    prefetched = view.software.overlap.activation_prefetch
    down, up = activation_offload_seconds(
        saved, forward + host[0], backward + host[1], passes.link, prefetched=prefetched
    )
    return host[0] + down, host[1] + up


def with_weight_offload(passes: DevicePasses, host: Pair) -> Pair:
    """Return ``host`` with the seconds of weight fetching that passes do not hide.

    Leaves out: collectives that use the link to the host, too.
    """
    offloads = passes.view.table.offloads_weights
    if not holds(offloads):
        return host
    fetched = np.where(offloads, fetched_bytes(passes.view), 0.0)
    device, inside = passes.device, passes.inside
    forward, backward = device.forward + inside[0], device.backward + inside[1]
    link = states_link(passes.link, passes.view.software)
    down, up = weight_fetch_seconds(fetched, forward + host[0], backward + host[1], link)
    return host[0] + down, host[1] + up


def fetched_bytes(view: RankView) -> Real:
    """Bytes of weights that a pass fetches from host memory, forward and backward.

    A rank's shards of trained weights, in 16 bits where these are kept next to the fp32 ones, and
    of frozen ones as they are stored.
    """
    kept = view.software.sharding.compute_shards
    each = view.compute_bytes if kept else view.workload.master_bytes
    return each * updated_elements(view) + offloaded_frozen_bytes(view)
