"""selective_ops: what is kept is not computed again, and what is computed again is the same."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.memory_truth.rows import rows_of
from benchmarks.memory_truth.small_models import small
from cost_models.plan.plan import Plan
from executor.compat import KEPT_OPERATORS
from executor.counters.collectives_and_flops import OperatorMode
from executor.model.families import decoder_layer as families_layer
from executor.ops.recompute import (
    block_result,
    checkpointed_selectively,
    compute_once,
    result_unread,
)
from executor.parallel import tensor_parallel
from executor.parallel.tensor_parallel import UNSHARDED, rank_random_state
from executor.support import check_supported
from executor.training.compiled import check_compilable
from hardware_profiles.errors import InputError
from tests.executor.tiny import assert_equal, tiny, verified

OPS: dict[str, Any] = {"recompute": "selective_ops", "num_microbatches": 2}


class Count(OperatorMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.names.append(func._opname)
        return func(*args, **kwargs)


def test_matmuls_and_attention_run_once_and_the_rest_twice():
    torch.manual_seed(0)
    weight = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        heads = F.linear(x.tanh(), weight).view(2, 4, 2, 4).transpose(1, 2)
        seen = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return F.linear(seen.transpose(1, 2).flatten(2), weight).exp()

    gradients, counts = [], []
    for run in (block, lambda x: checkpointed_selectively(block, x, random=False)):
        x = torch.ones(2, 4, 8, dtype=torch.float64).cumsum(1).requires_grad_()
        with Count() as count:
            run(x).sum().backward()
        gradients.append((x.grad, weight.grad))
        weight.grad = None
        counts.append(count.names)
    for kept, again in zip(*gradients, strict=True):
        torch.testing.assert_close(kept, again, rtol=0.0, atol=0.0)
    plain, twice = counts
    for name in ("mm", "_scaled_dot_product_flash_attention_for_cpu"):
        assert plain.count(name) == twice.count(name) > 0
    assert twice.count("tanh") == 2 * plain.count("tanh") == 2


def test_a_function_of_ours_runs_once():
    calls = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return compute_once(lambda: calls.append(1) or 2.0 * x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return 2.0 * gradient

    x = torch.ones(3, requires_grad=True)
    checkpointed_selectively(
        lambda x: Double.apply(x.exp()).exp(), x, random=False
    ).sum().backward()
    e = torch.e
    torch.testing.assert_close(x.grad, torch.full((3,), 2 * e * torch.tensor(2 * e).exp().item()))
    assert calls == [1]
    assert compute_once(lambda: 7) == 7  # outside of such a layer


def test_what_nothing_reads_leaves_its_shape_and_is_nan_if_read_after_all():
    weight = torch.eye(4, requires_grad=True)

    def block(x: torch.Tensor, nothing_reads_it: bool) -> torch.Tensor:
        with result_unread(nothing_reads_it), block_result():
            y = F.linear(x.exp(), weight)
        return y.exp()  # reads it

    for nothing_reads_it in (False, True):
        x = torch.zeros(2, 4, requires_grad=True)
        checkpointed_selectively(block, x, nothing_reads_it, random=False).sum().backward()
        assert bool(torch.isnan(x.grad).any()) is nothing_reads_it


def test_a_kept_result_that_changes_is_an_error():
    weight = torch.eye(4, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.exp(), weight).add_(1.0).exp()

    y = checkpointed_selectively(block, torch.zeros(2, 4, requires_grad=True), random=False)
    with pytest.raises(RuntimeError, match="modified in place after it was saved"):
        y.sum().backward()


def test_a_layer_that_does_something_else_the_second_time_is_an_error():
    weight, runs = torch.eye(4, requires_grad=True), []

    def block(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        bias = None if len(runs) == 1 else torch.zeros(4)
        return F.linear(F.linear(x.exp(), weight, bias).exp(), weight).exp()

    y = checkpointed_selectively(block, torch.zeros(2, 4, requires_grad=True), random=False)
    with pytest.raises(RuntimeError, match="took another path"):
        y.sum().backward()


def test_what_attention_draws_leaves_no_trace():
    """It is not run again: dropout behind it must find the random state that it found before."""
    after = []
    for inside in (0, 5):
        torch.manual_seed(3)
        with rank_random_state(UNSHARDED, isolated=True):
            torch.rand(inside)
        after.append(torch.rand(4))
    torch.testing.assert_close(*after, rtol=0.0, atol=0.0)
    torch.manual_seed(3)
    with rank_random_state(UNSHARDED):
        torch.rand(5)
    assert not torch.equal(torch.rand(4), after[0])


def test_every_kept_operator_is_one_of_torch():
    names = {operator._opname for operator in KEPT_OPERATORS}
    assert {"mm", "addmm", "_scaled_dot_product_flash_attention"} <= names
    assert not names & {"bmm", "baddbmm"}  # scores of eager attention


def test_what_it_does_not_go_with_is_refused_by_name():
    with pytest.raises(InputError, match="--compile: with recompute selective_ops"):
        check_compilable(Plan(**OPS))
    with pytest.raises(
        InputError, match="selective_ops is not supported for encoder-decoder models"
    ):
        check_supported(tiny(Plan(**OPS), "t5"))
    with pytest.raises(InputError, match="selective_ops with offload activations"):
        check_supported(tiny(Plan(offload="activations", **OPS)))


@pytest.mark.sampled(1)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("gpt2", Plan(1, 2, sequence_parallel=True, **OPS)),
        ("olmo2", Plan(1, 2, **OPS)),
    ],
)
def test_parity(family: str, plan: Plan):
    assert_equal(verified(tiny(plan, family)))


SLOW: dict[str, tuple[Plan, dict[str, Any]]] = {
    "split backward, every other layer": (
        Plan(
            1, 2, 2, 1, "zero_bubble", sequence_parallel=True,
            recompute_layers=1, recompute_every=2, **OPS,
        ),
        {"family": "phi", "tied": True},
    ),
    "experts that travel": (
        Plan(2, 2, expert_parallel=2, zero_stage=1, **OPS),
        {"family": "qwen2_moe"},
    ),
    "context by ulysses": (
        Plan(context_parallel=2, context_parallel_method="ulysses", **OPS),
        {"family": "qwen3"},
    ),
    "a base in 4 bits": (Plan(1, 2, **OPS), {"qlora": 4}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", SLOW)
def test_parity_where_there_is_more_to_keep(name: str):
    plan, options = SLOW[name]
    assert_equal(verified(tiny(plan, **options)))


def repeat_collectives() -> None:
    """Switch off that sums over ranks are kept."""
    tensor_parallel.compute_once = lambda compute, **_: compute()  # type: ignore[assignment]


def read_nothing() -> None:
    """Switch off that a norm behind a block reads its result."""
    families_layer._is_normed = lambda block: False  # type: ignore[assignment]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("broken", [repeat_collectives, read_nothing])
def test_without_its_guards_the_gradient_is_seen_to_be_wrong(broken: Any):
    found = verified(tiny(Plan(1, 2, **OPS), "olmo2", num_layers=2), broken)
    assert not found.passed
    assert not found.gradient_difference <= 1e-9


MEMORY = Plan(recompute="selective_ops", micro_batch_size=4, num_microbatches=2)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "precision", "plan"),
    [
        ("llama", "bf16", replace(MEMORY, tensor_parallel=2, sequence_parallel=True)),
        ("gpt2", "fp32", MEMORY),
        ("qwen3", "bf16", replace(MEMORY, pipeline_parallel=2, pipeline_schedule="gpipe")),
    ],
)
def test_the_peak_is_predicted(family: str, precision: str, plan: Plan):
    rows = list(rows_of(small(family, precision, plan, layers=4)))
    assert abs(rows[0]["error_percent"]) < 1.0, rows
