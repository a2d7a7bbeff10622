"""What is priced in the place of what has no price: stated beside the row, in a wider interval.

A run that was measured exists, whatever nobody wrote down about it. A word that has no meaning here
is read as the usual one of its column, and the interval covers the other ones (``Reading.also``).
A rate or a link of an accelerator that nobody published follows from its other figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Final

from cost_models.compute.rates import BEFORE_AMPERE, best_matmul, multiplied_precision
from cost_models.plan.plan import Plan
from cost_models.plan.workload import Workload
from cost_models.uncertainty import Spread
from cost_models.units import GIB
from hardware_profiles.cluster.catalogue import find_accelerator
from hardware_profiles.cluster.schema import Accelerator, Cluster, Figure
from hardware_profiles.software.trainer import SoftwareProfile
from planner.validation.rows.model import positions_of_name
from planner.validation.rows.reading import Reading
from planner.validation.rows.words import entry_of, words_table

# FLOP/s in fp64 over those in fp32, of cores without tensor cores for it. Source: CUDA C++
# Programming Guide, Throughput of Native Arithmetic Instructions (results a clock of a
# multiprocessor: fp32 64, fp64 2 for compute capability 7.5, 128 and 2 for 8.6, 8.9 and 12.0)
FP64_SHARE: Final[Mapping[str, float]] = {
    "Pascal": 1 / 32,
    "Turing": 1 / 32,
    "Ampere": 1 / 64,
    "Ada": 1 / 64,
    "Blackwell RTX": 1 / 64,
    "Blackwell Ultra": 1 / 64,
    "Volta": 1 / 2,
    "Hopper": 1.0,  # H100 white paper: 67 TFLOPS of tensor cores, as many as fp32 has
    "Blackwell": 1 / 2,  # HGX B200 data sheet: 37 of 75 TFLOPS
    "CDNA": 1 / 2,  # MI100 data sheet: 11.5 of 23.1
    "CDNA2": 1.0,  # MI250X data sheet: matrix 95.7 and 95.7
    "CDNA3": 1.0,  # MI300X data sheet: matrix 163.4 and 163.4
    "CDNA4": 1 / 2,  # MI355X data sheet: matrix 78.6 of 157.3
}
# of 16 bits: an Ascend 910B has 94 of 376 TFLOP/s, an MLU370-X8 24 of 96
FP32_SHARE: Final = 0.25
TPU: Final = "TPU"
# NVIDIA RTX Blackwell GPU Architecture: 1,676 TFLOPS in fp4, 104.8 in fp32 (RTX 5090)
RTX: Final = "Blackwell RTX"
HOST: Final = 15.75e9  # bytes/s of PCIe 3 x16, the slowest link that a server of today has
# Convention, not a measurement: a factor by which an assumed rate or link may be off
ASSUMED_RATE: Final = Spread(1.0 / 3.0, 0.5, "a factor of 1.5, as of an assumed link")
RATE: Final = "its rate is assumed"
# Convention: lengths of which the interval covers the ends. Seven to ten in ten of the known
# sources of a trainer have medians between a quarter of its default and four times as many tokens
SHORTER, LONGER = 1 / 4, 4
# of rows that name none, the smallest that has the stated memory; without it from the third upwards
USUAL_CARDS: Final = ("RTX-4090", "RTX-A6000", "A100-SXM-80GB", "H200-SXM-141GB", "B300-SXM-288GB")
OTHER_CARDS: Final = ("RTX-4090", "H100-SXM-80GB")  # that the interval covers


def with_usual_length(reading: Reading) -> Reading:
    """Return the reading with the trainer's default in the place of an unsaid length of sequences.

    It is at most the learned positions of the model. The interval reaches from a quarter of it to
    four times as many tokens.
    """
    if reading.row.seq_len is not None:
        return reading
    tokens = entry_of(words_table().usual_length, reading.row).value
    tokens = min(tokens, positions_of_name(reading.row) or tokens)
    reading.also += ({"seq_len": round(tokens * share)} for share in (SHORTER, LONGER))
    whose = "the trainer's, memory and time of a quarter to four times it"
    return reading.changed(f"seq_len {tokens} (default: {whose})", seq_len=tokens)


def with_as_many_accelerators_as_ranks(reading: Reading) -> Reading:
    """Return the reading with the ranks of every kind in the place of unsaid accelerators.

    Without data-parallel ranks nothing says how many there are.
    """
    row = reading.row
    if row.num_gpus is not None or row.data_parallel is None:
        return reading
    sizes = (row.tensor_parallel, row.pipeline_parallel, row.context_parallel, row.data_parallel)
    ranks = prod(size or 1 for size in sizes)
    return reading.changed(f"num_gpus {ranks} (default: as many as ranks)", num_gpus=ranks)


def usual_card(reading: Reading) -> str:
    """Return the name of what stands for an accelerator that nobody names.

    It has the memory that the row states, or room for the measured peak.
    """
    row = reading.row
    stated, peak = row.gpu_mem_gb, row.peak_memory_gib or 0.0
    cards = USUAL_CARDS if stated else USUAL_CARDS[2:]
    least = 0.9e9 * stated if stated else peak * GIB  # nominal memory is rounded
    fit = (card for card in cards if find_accelerator(card).memory_capacity.value >= least)
    found = next(fit, cards[-1])
    reading.defaults.append(f"gpu {found} (default: nobody says; or {' or '.join(OTHER_CARDS)})")
    reading.also += ({"gpu": other} for other in OTHER_CARDS if other != found)
    return found


def with_assumed_figures(
    reading: Reading, cluster: Cluster, workload: Workload, software: SoftwareProfile, plan: Plan
) -> Cluster:
    """Return the cluster with a rate of the row's precision and a link to the host, if it needs.

    Unchanged where both are known, and where no such run exists (fp8 on an A100).
    """
    accelerator = cluster.accelerator
    precision = multiplied_precision(workload.precision, software)
    emulated = precision == "bf16" and accelerator.architecture in BEFORE_AMPERE
    if best_matmul(accelerator, precision) is None and not emulated:
        accelerator = _with_rate(reading, accelerator, precision)
    if plan.offload != "none" and accelerator.host_bandwidth is None:
        accelerator = _with_host(reading, accelerator)
    if accelerator is cluster.accelerator:
        return cluster
    return replace(cluster, accelerator=accelerator)


def has_assumed_rate(defaults: Iterable[str]) -> bool:
    """Whether a rate of the row's accelerator is assumed."""
    return any(RATE in default for default in defaults)


def _with_rate(reading: Reading, accelerator: Accelerator, precision: str) -> Accelerator:
    found = _rate(accelerator, precision)
    if found is None:
        return accelerator
    rate, why = found
    reading.defaults.append(f"{precision} on {accelerator.name}: {RATE} ({why})")
    assumed = {**accelerator.peak_flops, precision: Figure(rate, "assumed", why)}
    return replace(accelerator, peak_flops=assumed)


def _rate(accelerator: Accelerator, precision: str) -> tuple[float, str] | None:
    """Return FLOP/s of a precision from those of others, and how; None: it has no units for it."""
    peaks = {name: figure.value for name, figure in accelerator.peak_flops.items()}
    sixteen, single = peaks.get("bf16", peaks.get("fp16")), peaks.get("fp32")
    share = FP64_SHARE.get(accelerator.architecture)
    if precision == "fp64" and single is not None and share is not None:
        return single * share, f"{share:.3g} of fp32's, as others of {accelerator.architecture}"
    if precision == "fp4" and single is not None and accelerator.architecture == RTX:
        return 16.0 * single, "sixteen times fp32's, as an RTX 5090"
    if sixteen is None:
        return None
    if precision == "fp16" or (precision == "fp32" and accelerator.architecture == TPU):
        # XLA multiplies fp32 arrays on a TPU in one pass of bf16, unless told otherwise
        # (docs.jax.dev, jax.default_matmul_precision)
        return sixteen, "that of bf16"
    if precision == "int8":
        return sixteen, "that of 16 bits"
    if precision in ("bf16", "fp32"):
        return single or FP32_SHARE * sixteen, "a quarter of 16 bits" if single is None else "fp32"
    return None


def _with_host(reading: Reading, accelerator: Accelerator) -> Accelerator:
    why = f"{accelerator.name}: {HOST / 1e9:g} GB/s to its host (default: nobody says, as PCIe 3)"
    reading.defaults.append(f"{why}: {RATE}")
    return replace(accelerator, host_bandwidth=Figure(HOST, "assumed", why))
