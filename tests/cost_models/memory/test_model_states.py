import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.memory.ledger import total
from cost_models.memory.model_states import (
    accumulated_gradients,
    optimizer_shards,
    reduced_gradients,
    weight_rows,
)
from cost_models.memory.optimizer_states import OPTIMIZER_TRAITS
from cost_models.plan.workload import COMPUTE_BYTES, MASTER_BYTES, Optimizer
from tests.samples import zero_states

UNIFORM = sorted(name for name, rule in OPTIMIZER_TRAITS.items() if rule.is_uniform)


@pytest.mark.parametrize(("zero_stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_figure_1_of_the_zero_paper(zero_stage: int, gigabytes: float) -> None:
    """arXiv:1910.02054, fig. 1: 7.5 B parameters on 64 ranks, K = 12."""
    states = zero_states(7.5e9, 64, zero_stage)
    assert round(float(states) / 1e9, 1) == gigabytes


@pytest.mark.parametrize(
    ("parameters", "ranks", "expected"),
    # arXiv:1910.02054, table 1: GB of P_os, P_os+g, P_os+g+p
    [
        (7.5e9, 4, (52.5, 41.3, 30.0)),
        (7.5e9, 1024, (30.1, 15.1, 0.12)),
        (128e9, 16, (608, 368, 128)),
        (1e12, 256, (4046, 2062, 62.5)),
    ],
)
def test_table_1_of_the_zero_paper(
    parameters: float, ranks: int, expected: tuple[float, ...]
) -> None:
    totals = zero_states(parameters, ranks, np.array([1, 2, 3])) / 1e9
    np.testing.assert_allclose(totals, expected, rtol=0.025)


@given(st.floats(1, 1e13))
def test_one_rank_holds_16_bytes_a_parameter(parameters: float) -> None:
    """arXiv:1910.02054, sec. 3.1: 16 Psi, whatever the stage."""
    totals = zero_states(parameters, 1, np.arange(4))
    np.testing.assert_allclose(totals, 16 * parameters, rtol=1e-12)


def our_states(
    parameters: float, ranks: int, zero_stage: int, precision: str, name: Optimizer
) -> float:
    """Weights, optimizer and reduced gradients with fp32 gradients, as the executor holds them."""
    compute, master = COMPUTE_BYTES[precision], MASTER_BYTES[precision]
    states = master * OPTIMIZER_TRAITS[name].states * parameters
    return float(
        total(weight_rows(parameters, ranks, zero_stage, compute, master))
        + states / optimizer_shards(ranks, zero_stage)
        + reduced_gradients(parameters, ranks, zero_stage, master).size
    )


@pytest.mark.parametrize(
    ("precision", "optimizer", "zero_stage", "bytes_a_parameter"),
    [
        # whole: weights 2, master 4, two states 8, fp32 gradient 4
        ("bf16", "adamw", 0, 2 + 12 + 4),
        ("fp32", "adamw", 0, 4 + 8 + 4),
        ("fp64", "adamw", 0, 8 + 16 + 8),
        ("fp32", "sgd", 0, 4 + 0 + 4),
        ("bf16", "sgd", 0, 2 + 4 + 4),
        ("fp32", "sgd_momentum", 0, 4 + 4 + 4),
        ("bf16", "lion", 0, 2 + 4 + 4 + 4),
        # ZeRO-3 on d ranks: fp32 shard, two states, gradient, each over d = 8
        ("bf16", "adamw", 3, (4 + 8 + 4) / 8),
        ("fp32", "adamw", 3, (4 + 8 + 4) / 8),
        # ZeRO-1, 2: whole weights beside the shards of master, states, reduced gradient
        ("bf16", "adamw", 1, 2 + (4 + 8 + 4) / 8),
        ("bf16", "adamw", 2, 2 + (4 + 8 + 4) / 8),
        ("fp32", "adamw", 1, 4 + (4 + 8 + 4) / 8),
    ],
)
def test_states_of_the_executor(
    precision: str, optimizer: Optimizer, zero_stage: int, bytes_a_parameter: float
) -> None:
    total = our_states(1e9, 8, zero_stage, precision, optimizer)
    assert total == pytest.approx(bytes_a_parameter * 1e9)


def test_accumulated_gradients() -> None:
    def gradients(zero_stage: int, *, accumulates: bool = True, defers: bool = False) -> float:
        return float(
            accumulated_gradients(
                1e9, 8, zero_stage, 4.0, accumulates=accumulates, defers_reduction=defers
            ).size
        )

    assert gradients(3, accumulates=False) == 0
    assert [gradients(zero) for zero in range(4)] == [4e9, 4e9, 5e8, 5e8]
    # under a pipeline torch reduces at the last micro-batch: whole gradients whatever the stage
    assert [gradients(zero, defers=True) for zero in range(4)] == [4e9] * 4


@given(
    parameters=st.floats(1, 1e13),
    ranks=st.integers(1, 10**6),
    zero_stage=st.integers(0, 3),
    precision=st.sampled_from(sorted(COMPUTE_BYTES)),
    optimizer=st.sampled_from(UNIFORM),
)
def test_more_ranks_never_hold_more(
    parameters: float, ranks: int, zero_stage: int, precision: str, optimizer: Optimizer
) -> None:
    few = our_states(parameters, ranks, zero_stage, precision, optimizer)
    more = our_states(parameters, ranks + 1, zero_stage, precision, optimizer)
    assert 0 < more <= few
