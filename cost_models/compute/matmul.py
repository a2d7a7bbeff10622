"""Seconds of one matmul (m, k) x (k, n): tiles in waves over the multiprocessors, or a roofline.

Symbols   m rows   k summed dimension   n columns   B matmuls of this shape in one kernel
          R FLOP/s of the best large matmul   U multiprocessors   beta memory bandwidth [bytes/s]
          c bytes of an element   (u, w) rows and columns of a tile   p parts of a split k
Units     seconds; every function broadcasts over plan columns.

A GPU cuts the result into tiles, one for a multiprocessor at a time; a wave is one tile on each of
them. Partly filled tiles at the edge, and a partly filled last wave, take as long as full ones
(NVIDIA, Matrix Multiplication Background User's Guide, sec. 2.3 and 3). Rows in memory that do not
start at multiples of 16 bytes are slow (sec. 2.2: ``misalignment``).

Leaves out: the L2 cache, and clocks that vary with the operands' values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np

from cost_models.arrays import FEW, Real
from cost_models.columnar.columns import on_distinct_rows
from cost_models.compute.rates import Rates

# (rows, columns) of the usual tiles of 16-bit matmuls (the guide's table in sec. 2.3)
TILES: Final = (
    (256.0, 128.0),
    (128.0, 256.0),
    (128.0, 128.0),
    (128.0, 64.0),
    (64.0, 128.0),
    (64.0, 64.0),
)
FEW_ROWS: Final = 512  # for which all tiles are tried at once
SPLITS: Final = (1.0, 2.0, 4.0)  # parts of the summed dimension, summed afterwards
# Fitted together on 183 bf16 matmuls of an A100-PCIe (MooreThreads/SimuMax@4dcaae5:
# configs/system/a100_pcie.json): ``python -m benchmarks.step_time.fit_matmul``.
FULL_WAVE_SHARE = 0.963  # of R, that a full wave of the largest tiles and a long k reach
TILE_SETUP = 153.0  # filling the pipeline and writing the tile, in elements of k in 16 bits
OPERAND_TRAFFIC = 42.0  # the smaller a tile, the more often its operands are read: elements
# Slowdown of a 16-bit matmul by rows in memory of an odd number of elements, and of an even one
# that is no multiple of 8: its kernels load 1 or 2 elements at a time. Source: 8192 x 14336 x V on
# an A100 makes 255 TFLOP/s for V a multiple of 16, 138 for other even V, 75 for odd V
# (EleutherAI/cookbook@27dff48: sizing/results/transformer_data/vocab_v_sweep.out); batched scores
# of heads of 334 to 350 elements 0.63 of their aligned neighbours (h_sweep.out); odd vocabularies
# triple a head's time (Netflix Technology Blog, Scaling LLM post-training at Netflix, February
# 2026), 2.9 on vTrain's A100. Not on GeForce cards, whose tensor cores do a quarter of an A100's
# work a clock: odd matrices of an RTX 4090 lose what their waves of tiles explain (pytorch/pytorch
# issue 181718). Newer architectures multiply such rows with Ampere's instructions (Hopper's TMA
# needs strides of 16 bytes: CUDA C++ Programming Guide, asynchronous data copies), half the work a
# clock there, and twice on cards of GA10x and Ada (``rates.WIDE_TENSOR_FLOP_A_CLOCK``): an H200
# makes 109, 128 and 97 TFLOP/s for an odd vocabulary, summed dimension and number of columns, 680
# to 700 aligned (hardware_profiles/cluster/measured/H200-SXM-141GB-*).
# Leaves out: 0.9 where rows are a multiple of 8, not of 16.
ODD_SLOWDOWN: Final = 3.0
EVEN_SLOWDOWN: Final = 1.8
ALIGNED: Final = 8.0  # elements of 16 bits in 16 bytes


def matmul_seconds(
    rows: Real,
    summed: Real,
    columns: Real,
    compute_bytes: float,
    rate: Rates,
    *,
    batch: Real = 1.0,
    in_memory: Sequence[Real] = (),
    batched: bool = False,
) -> Real:
    """Seconds of one matmul, or of a batch of equal ones in one kernel.

        tiles     a · min over tiles and splits of
                  waves · 2 u w (k/p + setup) / (R/U e) + partial sums
                  waves = ceil(B ceil(m/u) ceil(n/w) p / U)
                  setup in elements of k, more in faster precisions: it takes the same time
                  e = share / (1 + o (1/u + 1/w)), 1 at the largest tile before the share;
                  operands take the same time to read too, so that o grows with the rate;
                  half where pairs of multiprocessors share one
                  a ``misalignment`` of the operands' rows, whose lengths are ``in_memory``;
                  at least the library's figure for a batch
        memory    c B (m k + k n + m n) / beta

    and the longer of the two. Where the number of multiprocessors is unknown, and on a CPU, 2 B m
    k n / R stands for the tiles, with k and n in whole systolic arrays (``in_arrays``). Source:
    tiles and waves: NVIDIA, Matrix Multiplication Background User's Guide, sec. 3; the longer of
    the two: Williams, Waterman, Patterson, Roofline (CACM 52, 2009).

    >>> float(matmul_seconds(1024.0, 1024.0, 1024.0, 2.0, Rates(1e12, 1e12, 0.0, False)))
    0.002147483648
    """
    traffic = (0.5 if rate.shares_operands else 1.0) * OPERAND_TRAFFIC * rate.setup
    achieved = rate.matmul, rate.memory, rate.setup, traffic, rate.units, rate.array
    slower = misalignment(in_memory, compute_bytes, rate)
    if batched:
        slower = np.where(slower > 1.0, np.maximum(slower, rate.misaligned_batches), slower)
    return _matmul_seconds(rows, summed, columns, compute_bytes, batch, slower, *achieved)


def misalignment(lengths: Sequence[Real], compute_bytes: float, rate: Rates) -> Real:
    """Slowdown of a GPU's 16-bit matmul by the lengths of its operands' rows in memory: a factor.

    A length that ranks do not divide evenly is taken to be padded.

    >>> gpu = Rates(1e12, 1e12, 0.0, False, units=108.0)
    >>> misalignment([np.array([50257.0, 50258.0, 50264.0, 6282.125]), 4096.0], 2.0, gpu).tolist()
    [3.0, 1.8, 1.0, 1.0]
    """
    slower: Real = np.asarray(1.0)
    aligned = rate.pads_matmuls or rate.halves_tensor_cores
    if compute_bytes != 2.0 or not rate.units or aligned:
        return slower
    for length in lengths:
        if type(length) is np.ndarray and length.size <= FEW and length.dtype == np.float64:
            slower = np.maximum(slower, _kept_slowdown(length.shape, length.tobytes()))
        else:
            slower = np.maximum(slower, _slowdown(length))
    return np.where(slower > 1.0, np.maximum(1.0, rate.over_ampere * slower), 1.0)


def in_arrays(length: Real, array: float) -> Real:
    """Return a dimension of the operand in a systolic array: padded to whole arrays.

        A ceil(d / A)        A rows, and columns, of an array; d without one

    Source: jax-ml/scaling-book, tpus.md, Key Takeaways. Leaves out: single matrices of few tokens,
    which may lie in the array themselves.

    >>> [float(in_arrays(d, 256.0)) for d in (64.0, 128.0, 256.0, 300.0)], in_arrays(64.0, 0.0)
    ([256.0, 256.0, 256.0, 512.0], 64.0)
    """
    return array * np.ceil(length / array) if array else length


@lru_cache(maxsize=4096)  # layers, and questions about one model, repeat their lengths
def _kept_slowdown(shape: tuple[int, ...], lengths: bytes) -> Real:
    return _slowdown(np.frombuffer(lengths).reshape(shape))


def _slowdown(length: Real) -> Real:
    """Return the slowdown of rows of a length."""
    odd, even = np.mod(length, 2.0) == 1.0, np.mod(length, 2.0) == 0.0
    unaligned = even & (np.mod(length, ALIGNED) != 0.0)
    return np.where(odd, ODD_SLOWDOWN, np.where(unaligned, EVEN_SLOWDOWN, 1.0))


@on_distinct_rows
def _matmul_seconds(
    rows: Real,
    summed: Real,
    columns: Real,
    compute_bytes: float,
    batch: Real,
    slower: Real,
    matmul: Real,
    memory: Real,
    setup: Real,
    traffic: Real,
    units: float,
    array: float,
) -> Real:
    """Return ``matmul_seconds``.

    ``slower``: by rows in memory; ``traffic``: of operands, in elements; the others: of the rates.
    """
    m, k, n = (np.multiply(1.0, size) for size in (rows, summed, columns))
    moved: Real = compute_bytes * batch * (m * k + k * n + m * n) / memory
    if not units:
        filled = in_arrays(k, array) * in_arrays(n, array)
        roofline: Real = np.maximum(2.0 * batch * m * filled / matmul, moved)
        return roofline
    given = (m, k, n, batch, slower, matmul, memory, setup, traffic)
    sizes = np.broadcast(*given)
    if sizes.ndim > 1 or not 0 < sizes.size <= FEW:
        return _tiled_seconds(units, *given, moved)
    columns_of = (np.asarray(one, dtype=float).tobytes() for one in (*given, moved))
    return np.reshape(_kept_seconds(units, *columns_of), sizes.shape)


@lru_cache(maxsize=16384)  # layers, and questions about one model, repeat their matrices
def _kept_seconds(units: float, *columns: bytes) -> Real:
    """Return ``_tiled_seconds`` of the same arguments as bytes."""
    return _tiled_seconds(units, *map(np.frombuffer, columns))


def _tiled_seconds(
    units: float,
    m: Real,
    k: Real,
    n: Real,
    batch: Real,
    slower: Real,
    matmul: Real,
    memory: Real,
    setup: Real,
    traffic: Real,
    moved: Real,
) -> Real:
    """Return the longer of the seconds of tiles and of ``moved`` bytes."""
    sizes = np.broadcast(m, k, n, batch, slower, matmul, memory, setup, traffic)
    few, shape = sizes.size <= FEW_ROWS, (1,) * sizes.ndim
    largest = 1.0 + traffic * (1.0 / TILES[0][0] + 1.0 / TILES[0][1])
    parts = np.reshape(SPLITS, (-1, *shape))
    # in fp32, where there are several: written, read
    partial_sums = np.where(parts > 1.0, 8.0, 0.0) * parts * batch * m * n / memory
    fastest: Real = np.asarray(np.inf)
    for some in (TILES,) if few else tuple((tile,) for tile in TILES):
        # one axis for tiles, one for splits, then those of the sizes
        high, wide = (np.reshape([tile[side] for tile in some], (-1, 1, *shape)) for side in (0, 1))
        efficiency = FULL_WAVE_SHARE * largest / (1.0 + traffic * (1.0 / high + 1.0 / wide))
        per_element = 2.0 * high * wide * units / (efficiency * matmul)
        tiles = batch * np.ceil(m / high) * np.ceil(n / wide)
        waves = np.ceil(tiles * parts / units)
        seconds = waves * (k / parts + TILE_SETUP * setup) * per_element + partial_sums
        fastest = np.minimum(fastest, np.min(seconds, axis=(0, 1)))
    longer: Real = np.where(m * k * n > 0.0, np.maximum(slower * fastest, moved), 0.0)
    return longer
