"""Tensor parallelism of one matrix Y = X A on lines, squares, boxes and cubes of ranks.

Symbols   x elements of the input X   a elements of the matrix A   y elements of the output Y
          p ranks   q ranks along a side of the grid   d layers of the grid (depth)
Units     elements, of a rank; messages follow one another. Every function broadcasts.

              ranks    weights    activations     received, forward and backward     messages
    1D        p        a / p      x + y / p       2 (p - 1)/p x                      2 (p - 1)
    2D        q^2      a / q^2    (x + y)/q^2     3 (q - 1)/q^2 (x + a)              6 (q - 1)
    2.5D      d q^2    a / q^2    (x + y)/(d q^2) 3 (q - 1)/q^2 (x / d + a)          6 (q - 1)
    3D        q^3      a / q^3    (x + y)/q^3     2 (q - 1)/q^3 (x + a + y)          6 (q - 1)

Source: shares of memory and computation, messages, and the bandwidth of 1D and 3D: the tables
"Efficiency" of Colossal-AI's documentation (hpcaitech/ColossalAI, features: 1D, 2D, 2.5D and 3D
tensor parallelism), which describe Shoeybi et al. (arXiv:1909.08053), Xu et al. (arXiv:2104.05343),
Wang et al. (arXiv:2105.14500) and Bian et al. (arXiv:2105.14450). Its bandwidth of 2D and 2.5D is q
times the elements received here: a block that travels q - 1 hops one after another occupies the
ring q - 1 times. The tests count the elements of the block algorithms. Leaves out: overlap, biases
and norms, copies that a pass gathers.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from cost_models.arrays import Count, Flag, Real


class GridCost(Struct, frozen=True):
    """What a rank keeps, receives and waits for, of one matrix in a forward and backward pass."""

    weights: Real  # elements of the matrix
    activations: Real  # elements of input and output
    received: Real  # elements
    messages: Real  # one after another

    def __add__(self, other: GridCost) -> GridCost:
        """Add two matrices."""
        return GridCost(
            self.weights + other.weights,
            self.activations + other.activations,
            self.received + other.received,
            self.messages + other.messages,
        )

    def seconds(self, element_bytes: Real, bandwidth: Real, latency: Real) -> Real:
        """Seconds on a ring with nothing hidden: received · bytes / bandwidth + messages · latency.

        Units: bytes of an element, bytes/s one way, seconds a message.
        """
        moved = np.multiply(1.0, self.received) * element_bytes / bandwidth
        return moved + np.multiply(1.0, self.messages) * latency


def tensor_1d(x: Real, a: Real, y: Real, ranks: Count, *, column: Flag = True) -> GridCost:
    """Megatron's cut along one side of the matrix, on a line of p ranks.

        column   A cut along its outputs: X whole, Y / p; all-reduce of X's gradient, backward
        row      A cut along its inputs: X / p, Y whole; all-reduce of Y, forward

    Source: Shoeybi et al. (arXiv:1909.08053), sec. 3. Sequence parallelism moves as much and keeps
    1 / p of the whole tensor (``cost_models.communication.tensor_parallel``).

    >>> float(tensor_1d(1.0, 1.0, 1.0, 4).received)
    1.5
    """
    p = np.multiply(1.0, ranks)
    whole, cut = np.where(column, x, y), np.where(column, y, x)
    return GridCost(a / p, whole + cut / p, 2.0 * (p - 1.0) / p * whole, 2.0 * (p - 1.0))


def tensor_2d(x: Real, a: Real, y: Real, side: Count) -> GridCost:
    """SUMMA on a square of q x q ranks (Optimus): every rank keeps a block of X, A and Y.

        forward    Y = X A      blocks of X along rows, of A along columns
        backward   dX = dY A'   blocks of A along columns, sums of dX along rows
                   dA = X' dY   blocks of X along rows, sums of dA along columns

    Each of the six receives (q - 1)/q^2 of a tensor. Source: Xu et al. (arXiv:2104.05343);
    van de Geijn and Watts, SUMMA (1997).

    >>> cost = tensor_2d(1.0, 1.0, 1.0, 2)
    >>> float(cost.weights), float(cost.received)
    (0.25, 1.5)
    """
    return tensor_2p5d(x, a, y, side, 1)


def tensor_2p5d(x: Real, a: Real, y: Real, side: Count, depth: Count) -> GridCost:
    """Tesseract: d squares of q x q ranks, each with its share of the rows of X and a whole A.

    SUMMA on every square. Leaves out the sum of dA over the d squares, once a step
    (``depth_gradients``). Source: Wang et al. (arXiv:2105.14500).

    >>> float(tensor_2p5d(1.0, 1.0, 1.0, 2, 2).received)
    1.125
    """
    q, d = np.multiply(1.0, side), np.multiply(1.0, depth)
    square = q * q
    return GridCost(
        a / square, (x + y) / (d * square), 3.0 * (q - 1.0) / square * (x / d + a), 6.0 * (q - 1.0)
    )


def depth_gradients(a: Real, side: Count, depth: Count) -> Real:
    """Elements that a rank receives for the sum of dA over Tesseract's d squares, once a step.

        2 (d - 1)/d a / q^2        ring all-reduce

    >>> float(depth_gradients(16.0, 2, 2))
    4.0
    """
    q, d = np.multiply(1.0, side), np.multiply(1.0, depth)
    found: Real = 2.0 * (d - 1.0) / d * a / (q * q)
    return found


def tensor_3d(x: Real, a: Real, y: Real, side: Count) -> GridCost:
    """A cube of q x q x q ranks: X, A and Y are cut q^3 times, gathered along one side each.

        forward    gather X and A, scatter the sum Y
        backward   gather dY, scatter the sums dX and dA (the gathered X and A are kept)

    Each of the six receives (q - 1)/q^3 of a tensor. Source: Bian et al. (arXiv:2105.14450).

    >>> float(tensor_3d(1.0, 1.0, 1.0, 2).received)
    0.75
    """
    q = np.multiply(1.0, side)
    cube = q * q * q
    return GridCost(a / cube, (x + y) / cube, 2.0 * (q - 1.0) / cube * (x + a + y), 6.0 * (q - 1.0))


def tree_elements(x: Real, a: Real, side: Count) -> Real:
    """Elements that broadcasts by trees move for Y = X A on a square: log2(q)/q (x + a).

    q broadcasts of a block of 1/q^2, each in log2(q) hops. For a transformer layer of GPT (12 h^2
    weights, inputs of 7 b s h) this is log2(p)/(2 sqrt(p)) (7 b s h + 12 h^2) forward. Source: Xu
    et al. (arXiv:2104.05343).

    >>> float(tree_elements(1.0, 1.0, 4))
    1.0
    """
    q = np.multiply(1.0, side)
    return np.log2(q) / q * (x + a)


def cannon_messages(ranks: Count) -> Real:
    """Blocks that all ranks send for one product by Cannon's algorithm: 2 p^(3/2) - 2 p^(1/2).

    Source: as compared by Wang et al., Tesseract (arXiv:2105.14500).

    >>> float(cannon_messages(64)) / float(tesseract_messages(64))
    31.5
    """
    p = np.multiply(1.0, ranks)
    return 2.0 * p**1.5 - 2.0 * p**0.5


def solomonik_messages(ranks: Count) -> Real:
    """Blocks that all ranks send for one product by Solomonik's 2.5D algorithm: 2 p - 2 p^(1/3).

    Depth equal to the side. Source: as :func:`cannon_messages`.

    >>> float(solomonik_messages(64) / tesseract_messages(64)).__round__(9)
    3.75
    """
    p = np.multiply(1.0, ranks)
    return 2.0 * p - 2.0 * np.cbrt(p)


def tesseract_messages(ranks: Count) -> Real:
    """Blocks that all ranks send for one product by Tesseract, depth equal to the side: 2 p^(2/3).

    Source: as :func:`cannon_messages`.

    >>> float(tesseract_messages(64))
    32.0
    """
    side: Real = np.cbrt(np.multiply(1.0, ranks))
    return 2.0 * side * side
