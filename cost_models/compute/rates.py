"""Achieved rates of an accelerator: FLOP/s of matmuls, bytes/s, host seconds an operator."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from cost_models.plan.workload import QUANTISED
from hardware_profiles.cluster.schema import Accelerator
from hardware_profiles.errors import InputError
from hardware_profiles.software.kernels import ForwardSoftware
from hardware_profiles.software.trainer import SoftwareProfile

# Share of the peak that the best large matmul reaches where no measurement exists: the median of
# the measured NVIDIA cards (stas00/ml-engineering, MAMF: A100 0.87, A100-PCIe 0.81,
# H100 0.80, GH200 0.84, B200 0.78, GB200 0.73, B300 0.79)
ACHIEVABLE_SHARE = 0.80
# Of cards of other vendors than NVIDIA, but TPUs: the median of the measured ones (the catalogue:
# MI300X 0.51, MI350X 0.52, MI325X 0.60, MI355X 0.63, Gaudi3 0.68, MI250X 0.72, Gaudi2 0.97)
ACHIEVABLE_SHARE_OF_OTHERS = 0.63
ACHIEVABLE_SHARE_BEFORE_HOPPER = 0.87  # as the A100: short matmuls of these were not bound by power
# The same of GeForce cards, whose tensor cores add up in fp32 at half their rate, so that neither
# power nor operands limit them, and whose clocks are above the data sheet's. torch.mm over the
# peak, medians over cards: RTX 3080 Ti 1.12, 3090 1.07, 4060 Ti 1.01, 4070 SUPER 1.07, 4090 1.00,
# 5060 Ti 1.02, 5080 0.91, 5090 1.13 (zzc0721/torch-performance-test-data: database.md and issues)
ACHIEVABLE_SHARE_OF_GEFORCE = 1.0
# The same without tensor cores (fp32): fitted on 22 runs of BERT on V100 (shardplan validate --time
# --only nvidia-bert)
FP32_SHARE = 0.99
# Cards whose fp32 lanes were doubled on Volta's register files and schedulers (128 lanes of a
# multiprocessor instead of 64) reach less of that peak: medians of the best torch.mm over the peak,
# 12 cards of GA10x, Ada and Blackwell RTX (0.37 to 0.79), H200 and H20 (0.77, 0.73): achievable
# fp32 rates in hardware_profiles/cluster/data/accelerators
FP32_SHARE_OF_DOUBLED_LANES = 0.65
FP32_SHARE_SINCE_HOPPER = 0.75
# The same in 4 bits: 5239 of 9000 TFLOP/s for 8192 x 8192 x 8192 on a B200 (cuBLASLt 13.3, mxfp4:
# deepseek-ai/DeepGEMM, pull request 348)
FP4_SHARE = 0.58
LOWER_SHARES: Final[Mapping[str, float]] = {"fp32": FP32_SHARE, "fp4": FP4_SHARE}
# Rate of the typical large matmul over the best one, where shapes are unknown: the median of 183
# bf16 shapes on an A100-PCIe, 0.718 of peak (MooreThreads/SimuMax@4dcaae5:
# configs/system/a100_pcie.json), over the best, 0.811 (stas00/ml-engineering, MAMF 252.9 TFLOP/s)
TYPICAL_SHARE = 0.886
# Share of the datasheet's bandwidth that a copy kernel reaches; STREAM-like tests on A100 and H100
# read 0.87 to 0.93 (stas00/ml-engineering: compute/accelerator, memory bandwidth)
MEMORY_SHARE = 0.88
# A long run on a GPU keeps this share of the best matmul, which is the best of many short ones on a
# cool card. Fitted: median over the runs of eight sources on A100 (python -m
# benchmarks.accuracy.cross_validate)
SUSTAINED_SHARE = 0.965
# Joules of a 16-bit FLOP in long runs: power over it is the rate that the power limit leaves; half
# as much in 8 bits, a quarter in 4. Fitted: Hopper on runs on H100, Blackwell on runs on GB200 and
# B200 (python -m benchmarks.accuracy.cross_validate, in steps of 0.5 %). That matmuls of these
# chips are bound by power: thonking.ai/p/strangely-matrix-multiplications; a GB300 held at 500 W
# makes 617 TFLOP/s, 0.81 pJ (facebookexperimental/triton, pull request 2023, not fitted).
# Published, all on boards of little power: Volta, 83 TFLOP/s on a V100-PCIe of 250 W (Markidis et
# al., arXiv:1803.04014, abstract); Turing, 24 on a T4 of 70 W, whose power limit NVIDIA names as
# the cause (forums.developer.nvidia.com/t/264462); Ampere, 198 to 215 on an A100-PCIe of 250 W, and
# Ada, 52 to 59 on an L4 of 72 W, medians over fp16 and bf16 from 8192 on
# (zzc0721/torch-performance-test-data, issues 108 and 120). CDNA3: fitted on runs on MI300X (750 W)
# and MI325X (1000 W) of three sources (each left out in turn: 1.64 to 1.76); it bounds training: a
# matmul alone takes 1.1 to 1.3 pJ.
JOULES_A_FLOP: Final[Mapping[str, float]] = {
    "Volta": 3.0e-12,
    "Turing": 2.9e-12,
    "Ampere": 1.2e-12,
    "Ada": 1.3e-12,
    "Hopper": 0.98e-12,
    "CDNA3": 1.7e-12,
    "Blackwell": 0.81e-12,
    "Blackwell Ultra": 0.81e-12,  # as Blackwell: the same process
}
# without bf16 in their tensor cores: torch multiplies in fp32 (torch.cuda.is_bf16_supported:
# including_emulation)
BEFORE_AMPERE = ("Pascal", "Volta", "Turing")
DOUBLES_INTEGERS = ("Ampere", "Ada", "Hopper", "Blackwell")
BEFORE_HOPPER = ("Pascal", "Volta", "Turing", "Ampere")
CUDA: Final = (*BEFORE_HOPPER, "Ada", "Hopper", "Blackwell", "Blackwell RTX", "Blackwell Ultra")
# GeForce cards add up in fp32 at half the rate of their tensor cores: what sets up and feeds a tile
# has twice the time. 35 square matrices of seven such cards (zzc0721/torch-performance-test-data:
# tests/cost_models/compute/test_measured_matmuls.py)
HALVED_SETUP: Final = 0.5
# with asynchronous matmul instructions, which kernels written for Ampere do not use; Ada and the
# RTX cards of Blackwell have Ampere's instructions
SINCE_HOPPER = ("Hopper", "Blackwell", "Blackwell Ultra")
# 128 fp32 lanes of a multiprocessor, half of them shared with integers (Ampere: but A100 and A30)
DOUBLED_LANES = ("Ampere", "Ada", "Blackwell RTX")
# Two multiprocessors multiply a tile together, and each reads half of one operand (tcgen05.mma with
# cta_group::2: NVIDIA PTX ISA): operands are read half as often. 514 bf16 matmuls of a B200 and six
# fp8 ones of a GB200, of another source, come nearer (python -m benchmarks.step_time.fit_matmul)
SHARED_OPERANDS = ("Blackwell", "Blackwell Ultra")
# FLOP of a multiprocessor's tensor cores a clock in 16 bits (data sheets of A100, H100 and B200:
# 312, 989, 2250 TFLOP/s of 108, 132, 148 multiprocessors at 1.41 to 1.86 GHz), and exponentials
# (CUDA C++ Programming Guide, arithmetic instructions: 16 of compute capability 8.0, 9.0 and 10.0)
TENSOR_FLOP_A_CLOCK: Final[Mapping[str, float]] = {
    "Ampere": 2048.0,
    "Hopper": 4096.0,
    "Blackwell": 8192.0,
    "Blackwell Ultra": 8192.0,
}
# The same of multiprocessors with 128 lanes of fp32 (RTX A6000, L40S: 155, 362 TFLOP/s of 84, 142
# multiprocessors at 1.80 and 2.49 GHz)
WIDE_TENSOR_FLOP_A_CLOCK: Final = 1024.0
EXPONENTIALS_A_CLOCK: Final = 16.0
# Share of the memory bandwidth at which a TPU moves rows of tokens into the order of their experts.
# On v5p a mixture without attention, 8 experts of 14336 of which a token has 2, makes an MFU of
# 50.4 %; one of 56 of 2048 of which it has 14 makes 28 % (AI-Hypercomputer/maxtext, issue 1256):
# 0.61 us more for each expert of a token, 12 accesses of 4096 elements with MaxText's full
# recomputation. The first then makes 50.2 %.
GATHER_SHARES: Final[Mapping[str, float]] = {"TPU": 0.066}
# Keys that a token visits beyond half the sequence under a causal mask, in kernels for Hopper:
# those of blocks on the diagonal, and multiprocessors that wait for others with longer rows.
# Measured on an H200: 1.22 times half an unmasked pass at 2048 tokens and heads of 128 (other
# shapes give 225 to 490 keys; hardware_profiles/cluster/measured/H200-SXM-141GB-2026-11-27). Of
# kernels for Ampere the share of the peak was measured with such masks (arXiv:2307.08691), and
# none are added.
MASKED_KEYS: Final = 225.0
# Efficiency of such a kernel on Blackwell over its efficiency on Hopper, each a share of the rate:
# FlashAttention-2 makes 374 of 1481 TFLOP/s on a GB200 and 329 of 714 on an H200
# (Azure/AI-benchmarking-guide: Azure_Results/ND_GB200_v6_results.md, ND_H200_v5_results.md)
AMPERE_KERNELS_ON_BLACKWELL = 0.55


class Rates(Struct, frozen=True):
    """Rates of an accelerator in one precision."""

    matmul: float  # FLOP/s
    memory: float  # bytes/s
    operator: float  # host seconds to start one operator
    host_is_device: bool  # a CPU: starting an operator and running it add up
    score: float = 0.0  # CPU: seconds of one attention score, without its matmuls
    units: float = 0.0  # multiprocessors of a GPU; 0: unknown, or a CPU
    core: float | None = None  # FLOP/s of attention cores and head, where they differ (fp8)
    attention: float = 1.0  # of a flash core's rate: cores in fewer bits than the head
    flash: float = 1.0  # share of a flash kernel's efficiency that it reaches on this architecture
    setup: float = (
        1.0  # over tensor cores' 16-bit rate: a tile's setup takes as long in any precision
    )
    shares_operands: bool = False  # pairs of multiprocessors read one operand of a tile once
    copies_fp8: bool = False  # matmuls in 8 bits read operands along one direction only
    pads_matmuls: bool = False  # a compiler pads operands whose rows are not aligned
    misaligned_batches: float = 1.0  # least slowdown of batched matmuls whose rows are not aligned
    # over Ampere's FLOP a clock: kernels that read few bytes at a time have Ampere's instructions
    over_ampere: float = 1.0
    exponential: float = 0.0  # FLOP of tensor cores in the time of an exponential
    masked_keys: float = 0.0  # that a flash kernel visits beyond those under a causal mask
    halves_tensor_cores: bool = False  # GeForce: adds up in fp32 at half the rate, feeds any row
    single: float | None = None  # FLOP/s in fp32, without tensor cores; None: not known
    cache: float = 0.0  # bytes of an L2 that saves memory traffic between kernels; 0: none
    array: float = 0.0  # rows, and columns, of a systolic array; 0: none
    gather: float = 1.0  # of ``memory``: tokens in the order of their experts

    @property
    def of_core(self) -> Rates:
        """The rates of attention cores and head."""
        if self.core is None:
            return self
        setup = HALVED_SETUP if self.halves_tensor_cores else 1.0
        return replace(self, matmul=self.core, core=None, setup=setup)

    @property
    def of_single(self) -> Rates:
        """The rates of matrices in fp32; those of this precision where fp32's are unknown."""
        if self.single is None:
            return self
        setup = self.setup * self.single / self.matmul
        return replace(self, matmul=self.single, core=None, setup=setup)

    @property
    def of_unknown_shapes(self) -> Rates:
        """The rates of a typical large matmul; a CPU's are measured over such shapes."""
        return self if self.host_is_device else replace(self, matmul=TYPICAL_SHARE * self.matmul)


def rates(
    accelerator: Accelerator, precision: str, software: ForwardSoftware, *, long_run: bool = True
) -> Rates:
    """Return the rates of an accelerator in a precision; unknown is an error, not a guess.

    On a CPU both rates are measured with all processes at work. On a GPU the rate is that of the
    best large matmul (ACHIEVABLE_SHARE of the peak where it is not measured) as sustained in long
    runs; ``long_run`` false: of a single matmul on a cool card.
    """
    best = best_matmul(accelerator, precision)
    if best is None:
        have = ", ".join(sorted(accelerator.peak_flops)) or "none"
        raise InputError(
            f"{accelerator.name}: no rate is known for {precision} (known: {have}); choose one "
            "with --precision"
        )
    measured = accelerator.device == "cpu"
    sixteen = best_matmul(accelerator, "bf16") or best_matmul(accelerator, "fp16") or best
    few = precision in (*QUANTISED, "int8")
    eight = best_matmul(accelerator, "bf16") if few else None
    halved = _halves_tensor_cores(accelerator)
    setup = best / sixteen * (HALVED_SETUP if halved else 1.0)
    if long_run and not measured:
        best = sustained(accelerator, precision, best)
        eight = None if eight is None else sustained(accelerator, "bf16", eight)
    units = accelerator.compute_units
    cache, array = accelerator.l2_cache, accelerator.systolic_array
    share = 1.0 if measured else software.kernels.rate_share
    single = None if measured else best_matmul(accelerator, "fp32")
    clock = None if halved else _tensor_flop_a_clock(accelerator)
    since_hopper = software.kernels.flash_share_since_hopper
    flash, masked_keys, of_flash = _flash_kernel(accelerator.architecture, since_hopper, clock)
    return Rates(
        matmul=share * best,
        memory=accelerator.memory_bandwidth.value * (1.0 if measured else share * MEMORY_SHARE),
        operator=_operator_seconds(accelerator, software),
        host_is_device=measured,
        score=accelerator.score_seconds.value if accelerator.score_seconds is not None else 0.0,
        core=None if eight is None else share * eight,
        setup=setup,
        shares_operands=accelerator.architecture in SHARED_OPERANDS,
        copies_fp8=accelerator.architecture == "Hopper",
        single=None if single is None else share * single,
        flash=flash,
        units=0.0 if measured or units is None else units.value,
        pads_matmuls=software.kernels.pads_matmuls,
        misaligned_batches=software.kernels.misaligned_bf16_batches if precision == "bf16" else 1.0,
        halves_tensor_cores=halved,
        masked_keys=masked_keys,
        attention=1.0 if measured else _flash_in_fp32(accelerator, precision, best),
        over_ampere=1.0 if clock is None else clock / TENSOR_FLOP_A_CLOCK["Ampere"],
        exponential=0.0 if of_flash is None else of_flash / EXPONENTIALS_A_CLOCK,
        cache=0.0 if cache is None else cache.value,
        array=0.0 if array is None else array.value,
        gather=GATHER_SHARES.get(accelerator.architecture, 1.0),
    )


def training_rates(
    accelerator: Accelerator, precision: str, software: SoftwareProfile, num_ranks: int = 1
) -> Rates:
    """Return the rates of the slowest rank under a trainer.

    Its recipe of matmuls in 8 or 4 bits has rates of its own; setting up a tile takes as long.
    torch emulates bf16 on cards before Ampere, at the rate of fp32.
    """
    emulated = precision == "bf16" and accelerator.architecture in BEFORE_AMPERE
    multiplied = "fp32" if emulated else multiplied_precision(precision, software)
    found = rates(accelerator, multiplied, software)
    waits = 1.0 + software.kernels.rank_spread * slowest_of(num_ranks)
    rate = {name: getattr(found, name) for name in ("matmul", "memory", "core", "single")}
    found = replace(found, **{n: None if r is None else r / waits for n, r in rate.items()})
    if precision not in QUANTISED:
        return found
    share, attention = software.fp8.matmul_share, software.fp8.attention_rate
    return replace(
        found, matmul=share * found.matmul, setup=share * found.setup, attention=attention
    )


def multiplied_precision(precision: str, software: SoftwareProfile) -> str:
    """Return what matmuls read: "int8" for 8 bits that a recipe multiplies as integers."""
    return "int8" if precision == "fp8" and software.fp8.integers else precision


def slowest_of(num_ranks: int) -> float:
    """Return how far the slowest of some ranks lies behind their mean, in standard deviations.

        Phi^-1((n - 3/8) / (n + 1/4))    Phi: the normal distribution

    Ranks that exchange weights or gradients wait for the slowest: chips of different speed, hosts
    that collect garbage, log or load data, batches of other lengths.

    Leaves out: that the slowest may be another rank in each layer or step.

    Source: G. Blom, Statistical Estimates and Transformed Beta-Variables, 1958, sec. 6.9; that jobs
    wait for the slowest rank: arXiv:2505.05713.

    >>> [round(slowest_of(n), 2) for n in (1, 2, 8, 64)]
    [0.0, 0.59, 1.43, 2.34]
    """
    return NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))


def _operator_seconds(accelerator: Accelerator, software: ForwardSoftware) -> float:
    """Return the host's seconds to start an operator: of this machine, or of the trainer.

    The catalogue's figure is one of the CPU beside an accelerator (Grace), for a plain torch
    operator: a trainer that takes longer for each keeps its own.
    """
    launch, usual = accelerator.kernel_launch, software.host.operator_seconds
    if launch is None:
        return usual
    return max(launch.value, usual) if launch.kind == "published" else launch.value


def _flash_kernel(
    architecture: str, since_hopper: float, clock: float | None
) -> tuple[float, float, float | None]:
    """Return a flash kernel's share of its efficiency, masked keys, and tensor FLOP a clock.

    ``clock``: FLOP of the architecture. A kernel for Ampere (``since_hopper`` below 1) has Ampere's
    instructions on a later one.
    """
    if architecture not in SINCE_HOPPER:
        return 1.0, 0.0, clock
    if since_hopper >= 1.0:
        return since_hopper, MASKED_KEYS, clock
    share = since_hopper * (1.0 if architecture == "Hopper" else AMPERE_KERNELS_ON_BLACKWELL)
    return share, 0.0, clock and TENSOR_FLOP_A_CLOCK["Ampere"]


def _flash_in_fp32(accelerator: Accelerator, precision: str, matmul: float) -> float:
    """Return the rate of a flash kernel's products of fp32 operands over that of matmuls.

        min(1, R_tf32 / 3 R)     R: ``matmul``; three products in TF32 make one of fp32, allow_tf32
                                 or not

    1 for other operands, and without TF32: cores without tensor cores.

    Leaves out: where TF32 is not allowed such a kernel can be faster than the matmuls around it
    (A100, Hopper); the peak in fp32 bounds all that is counted in it.

    Source: pytorch/pytorch, aten/src/ATen/native/transformers/cuda/mem_eff_attention/gemm_kernel_
    utils.h (OpMultiplyAddFastF32 since compute capability 8.0): flash kernels proper have 16 bits.
    """
    if precision not in ("fp32", "tf32") or "tf32" not in accelerator.peak_flops:
        return 1.0
    tf32 = sustained(accelerator, "tf32", best_matmul(accelerator, "tf32") or matmul)
    return min(1.0, tf32 / (3.0 * matmul))


def best_matmul(accelerator: Accelerator, precision: str) -> float | None:
    """Return FLOP/s of the best large matmul.

    A precision that is not measured reaches the same share of its peak as the 16-bit ones, so that
    16-bit formats of one peak share one measurement.
    """
    peaks, measured = accelerator.peak_flops, accelerator.achievable_flops
    if precision in measured:
        return measured[precision].value
    peak = peak_of(accelerator, precision)
    if peak is None:
        return None
    if precision == "fp32" and (share := _share_of_wide_multiprocessors(accelerator)):
        return share * peak
    if precision in LOWER_SHARES:
        return LOWER_SHARES[precision] * peak
    known = next((name for name in ("bf16", "fp16") if name in measured and name in peaks), None)
    if known is not None:
        return measured[known].value * (peak / peaks[known].value)
    return _usual_share(accelerator) * peak


def peak_of(accelerator: Accelerator, precision: str) -> float | None:
    """Return the datasheet's dense FLOP/s; None: unknown.

    Where a datasheet's figure for 8-bit integers is not in the catalogue: twice that of bf16, and
    four times where bf16 adds up in fp32 at half the rate (GeForce), which integers do not.

    Source: NVIDIA's architecture white papers, tables of peak rates: A100, GA102 (RTX 3090: 71
    TFLOPS and 284 TOPS), H100, AD102 (RTX 4090: 165 and 661), RTX Blackwell (RTX 5090: 210 and
    838).
    Worked number: integers on an RTX 3090, 71 TFLOP/s in bf16: 4 * 71 = 284e12 a second; on an
    A100, 2 * 312 = 624e12.
    Leaves out: sparse matrices, boost clocks above the datasheet's.
    """
    known = accelerator.peak_flops.get(precision)
    sixteen = accelerator.peak_flops.get("bf16")
    if known is not None:
        return known.value
    if precision != "int8" or sixteen is None:
        return None
    if accelerator.architecture not in DOUBLES_INTEGERS:
        return None
    return (4.0 if _is_geforce(accelerator) else 2.0) * sixteen.value


def _usual_share(accelerator: Accelerator) -> float:
    """Return the share of its peak that the best large matmul reaches, where none is measured."""
    if _is_geforce(accelerator):
        return ACHIEVABLE_SHARE_OF_GEFORCE
    if accelerator.architecture in BEFORE_HOPPER:
        return ACHIEVABLE_SHARE_BEFORE_HOPPER
    known = accelerator.architecture in (*CUDA, "TPU")
    return ACHIEVABLE_SHARE if known else ACHIEVABLE_SHARE_OF_OTHERS


def _tensor_flop_a_clock(accelerator: Accelerator) -> float | None:
    """Return the 16-bit FLOP of a multiprocessor's tensor cores a clock, or None."""
    if _has_wide_multiprocessors(accelerator):
        return WIDE_TENSOR_FLOP_A_CLOCK
    return TENSOR_FLOP_A_CLOCK.get(accelerator.architecture)


def _share_of_wide_multiprocessors(accelerator: Accelerator) -> float | None:
    """Return the share of fp32's peak in reach where a multiprocessor has 128 lanes of it, or None.

    Ampere's A100 and A30 have 64: their tensor cores are 16 times as fast.
    """
    if accelerator.architecture in SINCE_HOPPER:
        return FP32_SHARE_SINCE_HOPPER
    return FP32_SHARE_OF_DOUBLED_LANES if _has_wide_multiprocessors(accelerator) else None


def _has_wide_multiprocessors(accelerator: Accelerator) -> bool:
    """Return whether a multiprocessor has 128 lanes of fp32; an A100 of the same Ampere has 64."""
    single, sixteen = (accelerator.peak_flops.get(name) for name in ("fp32", "bf16"))
    narrow = single is not None and sixteen is not None and sixteen.value > 8.0 * single.value
    return accelerator.architecture in DOUBLED_LANES and not narrow


def _is_geforce(accelerator: Accelerator) -> bool:
    """Return whether it is a GeForce card with tensor cores of half the rate in fp32."""
    named = any(alias.startswith("GeForce") for alias in accelerator.aliases)
    return named and _halves_tensor_cores(accelerator)


def _halves_tensor_cores(accelerator: Accelerator) -> bool:
    """Return whether tensor cores add up in fp32 at half their rate: twice fp32's without them."""
    peaks = accelerator.peak_flops
    single, sixteen = peaks.get("fp32"), peaks.get("bf16")
    return single is not None and sixteen is not None and sixteen.value < 2.5 * single.value


def sustained(accelerator: Accelerator, precision: str, best: float) -> float:
    """Return the FLOP/s of large matmuls sustained in long runs, limited by power.

        min(share · best, P / e)    P watts that the board may draw, e joules a FLOP
        share · best · P / P0       where e is unknown and the board, built for P0, is held to P:
                                    as if its own power bound it already, the slowest it can be

    Leaves out: power of memory and links, which e includes.

    Source: JOULES_A_FLOP and SUSTAINED_SHARE of this file, with the measurements and the runs on
    which they were fitted.
    """
    if precision == "fp32":
        return best
    share = SUSTAINED_SHARE * best
    limit = power_limit(accelerator, precision)
    if limit is not None:
        return min(share, limit)
    if accelerator.power_limit is None or accelerator.power is None:
        return share
    return share * accelerator.power_limit.value / accelerator.power.value


def power_limit(accelerator: Accelerator, precision: str) -> float | None:
    """Return the FLOP/s at an accelerator's power limit in long runs; None: unknown.

    fp32 without tensor cores does not reach the limit: its share is fitted on runs.
    """
    joules, watts = JOULES_A_FLOP.get(accelerator.architecture), accelerator.watts
    if precision == "fp32" or joules is None or watts is None:
        return None
    bits = {"fp4": 0.25, "fp8": 0.5, "int8": 0.5, "tf32": 2.0}.get(precision, 1.0)
    return watts.value / (joules * bits)
