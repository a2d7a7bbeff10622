"""Grids of tensor parallelism: counted on block algorithms, compared with published tables."""

from itertools import product

import numpy as np
import pytest

from cost_models.techniques.tensor_grids import (
    GridCost,
    cannon_messages,
    depth_gradients,
    solomonik_messages,
    tensor_1d,
    tensor_2d,
    tensor_2p5d,
    tensor_3d,
    tesseract_messages,
    tree_elements,
)

UNIT = (1.0, 1.0, 1.0)


class Counted:
    """Blocks on ranks; counts the elements that each rank receives."""

    def __init__(self) -> None:
        self.received: dict[tuple[int, ...], int] = {}

    def fetch(self, rank: tuple[int, ...], owner: tuple[int, ...], block: np.ndarray) -> np.ndarray:
        if rank != owner:
            self.received[rank] = self.received.get(rank, 0) + block.size
        return block

    def add(self, rank: tuple[int, ...], elements: int) -> None:
        self.received[rank] = self.received.get(rank, 0) + elements


def blocks(matrix: np.ndarray, rows: int, columns: int) -> dict[tuple[int, int], np.ndarray]:
    return {
        (i, j): part
        for i, band in enumerate(np.split(matrix, rows))
        for j, part in enumerate(np.split(band, columns, axis=1))
    }


def summa(q: int, d: int, x: np.ndarray, a: np.ndarray, dy: np.ndarray) -> tuple[Counted, float]:
    """Forward and backward pass on d squares of q x q ranks; returns counts and the error."""
    counted, error = Counted(), 0.0
    sum_a = 0.0
    for layer, (part, out) in enumerate(zip(np.split(x, d), np.split(dy, d), strict=True)):
        inputs, weights, grads = blocks(part, q, q), blocks(a, q, q), blocks(out, q, q)
        y, dx, da = {}, {}, {}
        for i, j in product(range(q), repeat=2):
            rank = (layer, i, j)
            y[i, j] = sum(
                counted.fetch(rank, (layer, i, k), inputs[i, k])
                @ counted.fetch(rank, (layer, k, j), weights[k, j])
                for k in range(q)
            )
        for i, j in product(range(q), repeat=2):
            # partial products from a broadcast A and X are summed at their owners along a ring:
            # each rank receives one partial sum for every block but its own last addition
            dx[i, j] = sum(grads[i, k] @ weights[j, k].T for k in range(q))
            da[i, j] = sum(inputs[k, i].T @ grads[k, j] for k in range(q))
            rank = (layer, i, j)
            counted.add(rank, (q - 1) * weights[i, j].size)  # A along the column, for dX
            counted.add(rank, (q - 1) * dx[i, j].size)  # ring sums of dX along the row
            counted.add(rank, (q - 1) * inputs[i, j].size)  # X along the row, for dA
            counted.add(rank, (q - 1) * da[i, j].size)  # ring sums of dA along the column
        error = max(
            error,
            np.abs(np.block([[y[i, j] for j in range(q)] for i in range(q)]) - part @ a).max(),
        )
        error = max(
            error,
            np.abs(np.block([[dx[i, j] for j in range(q)] for i in range(q)]) - out @ a.T).max(),
        )
        sum_a = sum_a + np.block([[da[i, j] for j in range(q)] for i in range(q)])
    return counted, max(error, float(np.abs(sum_a - x.T @ dy).max()))


@pytest.mark.parametrize(("q", "d"), [(2, 1), (3, 1), (2, 2), (3, 2), (2, 3)])
def test_squares_receive_what_the_block_algorithm_moves(q: int, d: int) -> None:
    rng = np.random.default_rng(0)
    x, a = rng.normal(size=(12 * d, 6)), rng.normal(size=(6, 18))
    counted, error = summa(q, d, x, a, rng.normal(size=(12 * d, 18)))
    cost = tensor_2p5d(x.size, a.size, 12 * d * 18, q, d)
    assert error < 1e-10
    assert len(counted.received) == d * q * q
    assert set(counted.received.values()) == {round(float(cost.received))}


@pytest.mark.parametrize("q", [2, 3])
def test_cubes_receive_what_gathers_and_scatters_move(q: int) -> None:
    rng = np.random.default_rng(0)
    x, a = rng.normal(size=(18 * q, 9 * q**2)), rng.normal(size=(9 * q**2, 9 * q**2))
    counted, total = Counted(), np.zeros((18 * q, 9 * q**2))
    xs, weights = blocks(x, q, q), blocks(a, q, q)  # X_il and A_lj, each gathered of q parts
    for i, j, layer in product(range(q), repeat=3):
        rank = (i, j, layer)
        counted.add(rank, (q - 1) * xs[i, layer].size // q)
        counted.add(rank, (q - 1) * weights[layer, j].size // q)
        part = xs[i, layer] @ weights[layer, j]
        rows, columns = np.array(part.shape)
        total[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] += part
        counted.add(rank, (q - 1) * part.size // q)  # scattered sums of Y
        counted.add(rank, (q - 1) * part.size // q)  # gathered gradient of Y
        counted.add(rank, (q - 1) * xs[i, layer].size // q)  # scattered sums of dX
        counted.add(rank, (q - 1) * weights[layer, j].size // q)  # and of dA
    cost = tensor_3d(x.size, a.size, total.size, q)
    assert np.abs(total - x @ a).max() < 1e-9
    assert set(counted.received.values()) == {round(float(cost.received))}


@pytest.mark.parametrize("q", [2, 4, 8])
def test_the_table_of_colossal_ai(q: int) -> None:
    """Columns Memory (parameters), Memory (activations), Communication (bandwidth, latency)."""
    ranks, d = q * q, q
    line, square = tensor_1d(*UNIT, ranks), tensor_2d(*UNIT, q)
    box, cube = tensor_2p5d(*UNIT, q, d), tensor_3d(*UNIT, q)
    half = [cost.activations / 2.0 for cost in (line, square, box, cube)]
    assert [c.weights for c in (line, square, box, cube)] == [
        1 / ranks,
        1 / q**2,
        1 / q**2,
        1 / q**3,
    ]
    assert half[1:] == [1 / q**2, 1 / (d * q**2), 1 / q**3]
    assert half[0] >= 0.5  # O(1): the input is whole
    assert line.received == pytest.approx(2 * (ranks - 1) / ranks)
    assert q * square.received == pytest.approx(6 * (q - 1) / q)
    assert q * box.received == pytest.approx(3 * (q - 1) * (d + 1) / (d * q))
    assert cube.received == pytest.approx(6 * (q - 1) / q**3)
    assert [c.messages for c in (line, square, box, cube)] == [2 * (ranks - 1)] + [6 * (q - 1)] * 3


def test_the_shapes_that_colossal_ai_prints() -> None:
    """A matrix of 256 x 1024 and 16 inputs: 256 x 512, 128 x 512, 128 x 512 and 128 x 256."""
    x, a, y = 16 * 256, 256 * 1024, 16 * 1024
    assert tensor_1d(x, a, y, 2).weights == 256 * 512
    assert tensor_2d(x, a, y, 2).weights == 128 * 512
    assert tensor_2d(x, a, y, 2).activations == 8 * 128 + 8 * 512
    assert tensor_2p5d(x, a, y, 2, 2).weights == 128 * 512
    assert tensor_2p5d(x, a, y, 2, 2).activations == 4 * 128 + 4 * 512
    assert tensor_3d(x, a, y, 2).weights == 128 * 256
    assert tensor_3d(x, a, y, 2).activations == 4 * 128 + 4 * 512


def test_a_layer_of_gpt_on_a_square_with_trees() -> None:
    """log2(p)/(2 sqrt(p)) (7 b s h + 12 h^2) of Xu et al., forward."""
    b, s, h, q = 8, 512, 2048, 8
    tokens = b * s
    matrices = [(h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)]
    found = sum(float(tree_elements(tokens * k, k * n, q)) for k, n in matrices)
    p = q * q
    assert found == pytest.approx(np.log2(p) / (2 * np.sqrt(p)) * (7 * tokens * h + 12 * h * h))


def test_a_layer_of_gpt_on_a_line() -> None:
    """Two all-reduces forward and two backward of b s h: 8 (p - 1)/p b s h."""
    tokens, h, p = 1024, 512, 8
    matrices = [(h, 3 * h, True), (h, h, False), (h, 4 * h, True), (4 * h, h, False)]
    layer = sum(
        (tensor_1d(tokens * k, k * n, tokens * n, p, column=cut) for k, n, cut in matrices),
        start=GridCost(0.0, 0.0, 0.0, 0.0),
    )
    assert layer.received == pytest.approx(8 * (p - 1) / p * tokens * h)
    assert layer.weights == 12 * h * h / p


def test_tesseract_sends_least_on_64_ranks() -> None:
    """31.5 and 3.75 times as much of Cannon's and of the 2.5D algorithm (Wang et al.)."""
    assert cannon_messages(64) / tesseract_messages(64) == pytest.approx(31.5)
    assert solomonik_messages(64) / tesseract_messages(64) == pytest.approx(3.75)


def test_columns_broadcast() -> None:
    cost = tensor_2p5d(np.array([4.0, 8.0]), 16.0, 8.0, np.array([2, 4]), np.array([2, 4]))
    one = tensor_2p5d(8.0, 16.0, 8.0, 4, 4)
    assert cost.received[1] == one.received
    assert cost.seconds(2.0, 1.0, 0.0)[1] == 2.0 * one.received
    assert depth_gradients(np.array([4.0, 16.0]), 2, np.array([1, 2])).tolist() == [0.0, 4.0]
    assert tensor_1d(
        np.ones(2), 1.0, 2.0, 2, column=np.array([True, False])
    ).activations.tolist() == [2.0, 2.5]
