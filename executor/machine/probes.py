"""Short measurements in one process, run by all processes of the machine at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle
from typing import Any, Final

from hardware_profiles.progress import tracked

# Each rate is the best of several windows, to reduce the influence of other programs. A window is
# longer than the operating system's time slices, and its rate is the mean over all processes, so
# that a process that briefly has a core to itself does not determine the result.
WINDOW: Final = 0.15  # seconds
WINDOWS: Final = 4
MATRIX: Final = 512  # rows and columns of matmuls on a CPU; larger ones are hardly faster
COLD_PAIRS: Final = 24  # of matrices, used in turn: in training, operands come from memory
GPU_MATRIX: Final = 8192
COPY_BYTES: Final = 2**25  # larger than a core's share of the caches
CHAIN: Final = 100  # small operators in one forward and backward pass
COLLECTIVE_BYTES: Final = (2**10, 2**16, 2**20, 2**23)
MESSAGE_BYTES: Final = (2**10, 2**18, 2**22)
COLLECTIVE_SECONDS: Final = 0.15
COLLECTIVE: Final = ("all_reduce_seconds", "all_gather_seconds")
MEASURING: Final = "measurement {number} of {total}"
ATTENTION: Final = (1, 4, 256, 64)  # sequences, heads, tokens, head_dim


def measure_rank(rank: int, processes: int) -> dict[str, Any]:
    """Run all measurements in one process; every rank runs the same sequence."""
    import torch

    measures: dict[str, Callable[[], Any]] = {
        "fp64": lambda: matmul_rates(torch.float64, MATRIX, "cpu"),
        "fp32": lambda: matmul_rates(torch.float32, MATRIX, "cpu"),
        "bf16": lambda: matmul_rates(torch.bfloat16, MATRIX, "cpu"),
        "memory_bandwidth": lambda: copy_rates(COPY_BYTES, "cpu"),
        "operators_per_second": lambda: operator_rates("cpu"),
        "attentions_per_second": attention_rates,
    }
    if processes > 1:
        measures |= {
            "all_reduce_seconds": lambda: [_all_reduce_seconds(n) for n in COLLECTIVE_BYTES],
            "all_gather_seconds": lambda: [_all_gather_seconds(n) for n in COLLECTIVE_BYTES],
            "message_seconds": lambda: [_message_seconds(rank, n) for n in MESSAGE_BYTES],
        }
    # rank 0 reports; a collective takes three kinds of windows at several sizes
    names = tracked(list(measures), MEASURING, size=lambda one: 8.0 if one in COLLECTIVE else 1.0)
    return {name: measures[name]() for name in (names if rank == 0 else measures)}


def _calls_per_second(call: Callable[[], object], device: str) -> list[float]:
    """Return the calls per second of this process in each window."""
    import torch
    import torch.distributed as dist

    call()
    rates = []
    for _ in range(WINDOWS):
        if dist.is_initialized():
            dist.barrier()
        begin, count, elapsed = time.perf_counter(), 0, 0.0
        while elapsed < WINDOW:
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            count += 1
            elapsed = time.perf_counter() - begin
        rates.append(count / elapsed)
    return rates


def matmul_rates(dtype: Any, size: int, device: str) -> list[float]:
    """Return the FLOP/s of square matmuls; on a CPU the matrices exceed the caches."""
    import torch

    pairs = COLD_PAIRS if device == "cpu" else 1
    left, right = (
        [torch.rand(size, size, device=device).to(dtype) for _ in range(pairs)] for _ in range(2)
    )
    turns = cycle(zip(left, right, strict=True))
    rates = _calls_per_second(lambda: torch.mm(*next(turns)), device)
    return [2.0 * size**3 * rate for rate in rates]


def copy_rates(size: int, device: str) -> list[float]:
    """Return the bytes/s of copies; both the bytes read and those written count."""
    import torch

    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return [2.0 * size * rate for rate in _calls_per_second(lambda: target.copy_(source), device)]


def operator_rates(device: str) -> list[float]:
    """Return small operators per second, including autograd's overhead."""
    import torch

    leaf = torch.ones(8, device=device, requires_grad=True)

    def chain() -> None:
        x = leaf
        for _ in range(CHAIN):
            x = x * 1.0001
        torch.autograd.grad(x, leaf, torch.ones_like(x))

    return [2.0 * CHAIN * rate for rate in _calls_per_second(chain, device)]


def attention_rates() -> list[float]:
    """Return forward and backward passes of fused attention per second."""
    import torch
    import torch.nn.functional as F

    query, key, value = heads = [torch.rand(ATTENTION, requires_grad=True) for _ in range(3)]
    gradient = torch.rand(ATTENTION)

    def attend() -> None:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(output, heads, gradient)

    return _calls_per_second(attend, "cpu")


def score_seconds(attention_seconds: float, flops: float) -> float:
    """Return the seconds per attention score in a forward pass, without its matmuls.

    There are two matmuls in the forward pass and five in the backward pass; the remaining time is
    split in the same ratio.

    >>> round(score_seconds(1e-3 + 7 * 2 * 64 * 4 * 256 * 256 / 1e11, 1e11) * 3.5 * 4 * 256**2, 9)
    0.001
    """
    sequences, heads, tokens, head_dim = ATTENTION
    scores = sequences * heads * tokens * tokens
    rest = attention_seconds - 14.0 * head_dim * scores / flops
    return max(rest, 0.05 * attention_seconds) / (3.5 * scores)


def _all_reduce_seconds(size: int) -> float:
    """Return the seconds of one all-reduce of ``size`` bytes on the slowest rank."""
    import torch
    import torch.distributed as dist

    data = torch.zeros(size // 4)
    return _together(lambda: dist.all_reduce(data), busy=True)


def _all_gather_seconds(size: int) -> float:
    """Return the seconds of one all-gather of ``size`` bytes on the slowest rank."""
    import torch
    import torch.distributed as dist

    from executor.compat import all_gather

    own = torch.zeros(-(-size // 4 // dist.get_world_size()))
    whole = torch.zeros(len(own) * dist.get_world_size())
    return _together(lambda: all_gather(whole, own), busy=True)


def _message_seconds(rank: int, size: int) -> float:
    """Return the seconds of one message of ``size`` bytes between neighbours (0-1, 2-3, ...)."""
    import torch
    import torch.distributed as dist

    data, peer = torch.zeros(size // 4), rank ^ 1

    def ping_pong() -> None:
        if peer >= dist.get_world_size():
            return
        first, second = (dist.send, dist.recv) if rank < peer else (dist.recv, dist.send)
        first(data, peer)
        second(data, peer)

    return _together(ping_pong, busy=False) / 2


def _together(call: Callable[[], object], *, busy: bool) -> float:
    """Return the seconds of a call that all ranks repeat: slowest rank, best window.

    ``busy``: each rank computes before every call, as in training, so that ranks arrive at
    different times and are woken from sleep; the seconds of the computation are subtracted. The
    result is at least the time of consecutive calls, because other programs can disturb that
    difference.
    """
    import torch
    import torch.distributed as dist

    left, right = (torch.rand(MATRIX, MATRIX) for _ in range(2))
    product = torch.empty_like(left)

    def timed(count: int, *calls: Callable[[], object]) -> float:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            for each in calls:
                each()
        slowest = torch.tensor((time.perf_counter() - begin) / count)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    computation: list[Callable[[], object]] = []
    if busy:
        computation.append(lambda: torch.mm(left, right, out=product))
    timed(1, *computation, call)
    count = int(COLLECTIVE_SECONDS / max(timed(3, *computation, call), 1e-6))
    count = max(3, min(count, 300))
    whole = [timed(count, *computation, call) for _ in range(WINDOWS)]
    if not busy:
        return min(whole)
    alone = [timed(count, *computation) for _ in range(WINDOWS)]
    back_to_back = [timed(count, call) for _ in range(WINDOWS)]
    return max(min(whole) - min(alone), min(back_to_back))
