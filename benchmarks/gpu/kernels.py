"""Measured and predicted times of single kernels: matmuls, attention, copies, launches.

Every function runs in a process of its own that may use the GPU. Sizes are those of transformers on
a GPU, or small ones for a CPU.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from cost_models.compute.attention import CoreWork, attention_core_seconds, core_ratio
from cost_models.compute.matmul import matmul_seconds
from cost_models.compute.rates import Rates, rates
from cost_models.model.spec import Attention
from hardware_profiles.cluster.schema import Accelerator
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import software_profile

Row = dict[str, Any]

LEAST_SECONDS: Final = 0.05  # of a timed window on a GPU
WINDOWS: Final = 5
SUSTAINED_SECONDS: Final = 8.0  # of the long run of one matmul
BYTES: Final = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
# rows (tokens), summed, columns
SQUARES: Final = tuple((n, n, n) for n in (512, 1024, 2048, 4096, 8192, 16384))
LAYERS: Final = (
    (8192, 4096, 6144),  # queries, keys and values of Llama 3 8B
    (8192, 4096, 4096),
    (8192, 4096, 28672),
    (8192, 14336, 4096),
    (8192, 4096, 128256),  # head
    (4096, 14336, 8192),  # the gradient of a weight
    (2048, 8192, 8192),
    (512, 4096, 4096),  # few tokens
    (16384, 8192, 1024),  # a share of tensor parallelism
    (16384, 8192, 3584),
    (8192, 64, 4096),  # an adapter
    (8192, 4096, 16),
    (4096, 768, 3072),
    (8192, 2048, 768),  # an expert
)
UNALIGNED: Final = ((8192, 4096, 50257), (8192, 4095, 4096), (8192, 4096, 4097))
# sequences, query heads, key heads, tokens, head size
ATTENTIONS: Final = (
    (8, 16, 16, 1024, 64),
    (4, 32, 8, 2048, 128),
    (2, 32, 8, 4096, 128),
    (1, 32, 8, 8192, 128),
    (1, 32, 8, 32768, 128),
    (4, 32, 32, 2048, 80),
    (2, 16, 16, 4096, 256),
)
COPIES: Final = (2**24, 2**27, 2**30)  # bytes
HOST_COPIES: Final = (2**20, 2**24, 2**28)
PREDICTED: Final = (
    "copy",
    "matmul",
    "matmul, sustained",
    "attention forward",
    "attention backward",
)
TINY_MATMULS: Final = ((64, 64, 64), (128, 32, 256))
TINY_ATTENTIONS: Final = ((1, 4, 2, 64, 16),)
TINY_COPIES: Final = (2**16,)


def kernel_rows(device: str, accelerator: Accelerator, seconds: float) -> list[Row]:
    """Measure everything that begins before ``seconds`` have passed."""
    begin = time.perf_counter()
    rows = []
    for row in _rows(device, accelerator):
        rows.append(row)
        if time.perf_counter() - begin > seconds:
            break
    return rows


def _rows(device: str, accelerator: Accelerator) -> Iterator[Row]:
    gpu = device == "cuda"
    for size in COPIES if gpu else TINY_COPIES:
        yield copy_row(device, accelerator, size)
    yield launch_row(device, accelerator)
    if gpu:
        for size in HOST_COPIES:
            yield from host_copy_rows(size)
    for precision in ("bf16", "fp16", "fp32", "fp8") if gpu else ("fp32",):
        if _rates(accelerator, precision) is None:
            continue
        shapes = (*SQUARES, *LAYERS, *UNALIGNED) if gpu else TINY_MATMULS
        for shape in shapes if precision in ("bf16", "fp32") else shapes[:10]:
            row = matmul_row(device, accelerator, precision, shape)
            if row is not None:
                yield row
    for attention in ATTENTIONS if gpu else TINY_ATTENTIONS:
        for causal in (True, False):
            yield from attention_rows(device, accelerator, attention, causal=causal)
    if gpu:
        yield sustained_row(accelerator)


def _rates(accelerator: Accelerator, precision: str, *, long_run: bool = False) -> Rates | None:
    try:
        return rates(accelerator, precision, software_profile("shardplan"), long_run=long_run)
    except InputError:  # the card has no such rate
        return None


def _row(accelerator: Accelerator, op: str, words: str, seconds: float, precision: str = "") -> Row:
    found = predicted_kernel(accelerator, op, precision, words)
    row = {"op": op, "shape": words, "seconds": seconds, "predicted": found}
    return {**row, "precision": precision} if precision else row


def predicted_kernel(accelerator: Accelerator, op: str, precision: str, words: str) -> float | None:
    """Return the predicted seconds of a row by its words; None where nothing predicts it."""
    rate = _rates(accelerator, precision or "fp32", long_run=op.endswith("sustained"))
    software, sizes = software_profile("shardplan"), [float(n) for n in re.findall(r"\d+", words)]
    if op == "launch":
        return software.host.operator_seconds
    if rate is None or op not in PREDICTED:
        return None
    if op == "copy":
        return 2.0 * sizes[0] / rate.memory
    if op.startswith("matmul"):
        m, k, n = sizes
        return float(matmul_seconds(m, k, n, BYTES[precision], rate, in_memory=(k, n)))
    sequences, heads, key_heads, tokens, size = map(int, sizes)
    kind = Attention(heads, key_heads, size, size, causal=words.endswith("True"))
    shape = kind, float(sequences * tokens), float(tokens), 1
    core = float(
        attention_core_seconds(CoreWork(*shape, "flash", BYTES[precision], rate, software))
    )
    return core * (core_ratio("flash", rate, size) if op.endswith("backward") else 1.0)


def timed(call: Callable[[], object], device: str) -> float:
    """Return the seconds of one call: the fastest of some windows of many calls."""
    import torch

    if device == "cpu":
        call()
        return min(_cpu_seconds(call) for _ in range(3))
    call()
    torch.cuda.synchronize()
    count = 1
    while (once := _gpu_seconds(call, count)) < 0.2 * LEAST_SECONDS:
        count *= 4
    count = max(1, round(count * LEAST_SECONDS / once))
    return min(_gpu_seconds(call, count) for _ in range(WINDOWS)) / count


def _cpu_seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _gpu_seconds(call: Callable[[], object], count: int) -> float:
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def matmul_row(
    device: str, accelerator: Accelerator, precision: str, shape: tuple[int, int, int]
) -> Row | None:
    """Return the times of one matmul; None where the device cannot multiply in the precision."""
    import torch

    from executor.compat import scaled_matmul

    m, k, n = shape
    try:
        left = torch.randn(m, k, device=device)
        right = torch.randn(n, k, device=device)
        if precision == "fp8":
            a, b = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
            one = torch.ones((), device=device)

            def call() -> object:
                return scaled_matmul(a, b, one, one, out_dtype=torch.bfloat16)
        else:
            dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
            x, y = left.to(dtype[precision]), right.to(dtype[precision]).t()

            def call() -> object:
                return torch.mm(x, y)

        seconds = timed(call, device)
    except RuntimeError:  # dimensions that fp8 does not take, or too little memory
        return None
    row = _row(accelerator, "matmul", f"m={m}, k={k}, n={n}", seconds, precision)
    return {**row, "tflops": 2.0 * m * k * n / seconds / 1e12}


def attention_rows(
    device: str, accelerator: Accelerator, shape: tuple[int, ...], *, causal: bool
) -> Iterator[Row]:
    """Yield the forward and the backward pass of fused attention."""
    import torch
    import torch.nn.functional as F

    sequences, heads, key_heads, tokens, size = shape
    precision = "bf16" if device == "cuda" else "fp32"
    if _rates(accelerator, precision) is None:
        return
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def drawn(count: int) -> torch.Tensor:
        values = torch.randn(sequences, count, tokens, size, device=device, dtype=dtype)
        return values.requires_grad_()

    query, key, value = drawn(heads), drawn(key_heads), drawn(key_heads)
    grouped = heads != key_heads

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, enable_gqa=grouped
        )

    output = forward()
    gradient = torch.randn_like(output)

    def backward() -> object:
        return torch.autograd.grad(output, (query, key, value), gradient, retain_graph=True)

    flops = 4.0 * sequences * heads * tokens * tokens * size * (0.5 if causal else 1.0)
    words = f"b={sequences}, h={heads}/{key_heads}, s={tokens}, d={size}, causal={causal}"
    with torch.no_grad():
        found = timed(forward, device)
    for op, seconds, share in (
        ("attention forward", found, 1.0),
        ("attention backward", timed(backward, device), 2.5),
    ):
        row = _row(accelerator, op, words, seconds, precision)
        yield {**row, "tflops": share * flops / seconds / 1e12}


def copy_row(device: str, accelerator: Accelerator, size: int) -> Row:
    """Return the time of a copy in the device's memory; bytes read and written count."""
    import torch

    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    seconds = timed(lambda: target.copy_(source), device)
    row = _row(accelerator, "copy", f"bytes={size}", seconds)
    return {**row, "bytes_per_second": 2.0 * size / seconds}


def host_copy_rows(size: int) -> Iterator[Row]:
    """Yield the times of copies between pinned host memory and the device."""
    import torch

    host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(size, dtype=torch.uint8, device="cuda")
    for op, target, source in (("to device", device, host), ("to host", host, device)):
        seconds = timed(lambda a=target, b=source: a.copy_(b, non_blocking=True), "cuda")  # type: ignore[misc]
        yield {
            "op": f"copy {op}",
            "shape": f"bytes={size}",
            "seconds": seconds,
            "bytes_per_second": size / seconds,
        }


def launch_row(device: str, accelerator: Accelerator) -> Row:
    """Return the host's seconds of one small operator with its autograd."""
    from executor.machine.probes import operator_rates

    words = "an operator of 8 elements, forward and backward"
    return _row(accelerator, "launch", words, 1.0 / max(operator_rates(device)))


def sustained_row(accelerator: Accelerator) -> Row:
    """Return the rate of one matmul over seconds, when power and temperature have settled."""
    import torch

    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    torch.mm(a, b)
    begin, last = time.perf_counter(), 0.0
    while time.perf_counter() - begin < SUSTAINED_SECONDS:
        last = _gpu_seconds(lambda: torch.mm(a, b), 200) / 200
    words = f"m={size}, k={size}, n={size}"
    row = _row(accelerator, "matmul, sustained", words, last, "bf16")
    return {**row, "tflops": 2.0 * size**3 / last / 1e12}
