"""Mixtures of experts: the single process's gradients, however tokens and experts are spread."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cost_models.plan.plan import Plan
from executor.attention.core import AttentionCore
from executor.model import stage as models
from executor.model.parameter_layout import random_tensor
from executor.ops import grouped_matmul as grouped
from executor.ops.grouped_matmul import grouped_linear
from executor.parallel import data_parallel, expert_parallel
from executor.parallel.expert_parallel import ALL_EXPERTS, run_on_experts
from executor.parallel.tensor_parallel import UNSHARDED
from executor.training import trainer as train
from tests.executor.tiny import assert_equal, tiny, verified

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "qwen3_next")
WHOLE_EXPERTS: dict[str, Any] = {"expert_tensor_parallel": False}
SP: dict[str, Any] = {"sequence_parallel": True}


# --- one rank -------------------------------------------------------------------------------------


def plain_experts(x: Tensor, indices: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
    """Every token through each of its experts, one after another."""
    rows = []
    for token in range(x.size(0)):
        outputs = [
            w * F.linear(x[token], matrices[e])
            for e, w in zip(indices[token].tolist(), weights[token], strict=True)
        ]
        rows.append(torch.stack(outputs).sum(0))
    return torch.stack(rows)


def test_a_mixture_is_what_each_token_gets_from_its_experts():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    matrices = torch.randn(4, 6, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(10, 2, dtype=torch.float64, requires_grad=True)
    # nobody chooses expert 2
    indices = torch.stack([torch.tensor([0, 1, 3])[torch.randperm(3)[:2]] for _ in range(10)])
    found = run_on_experts(
        ALL_EXPERTS, x, indices, weights, 4, lambda r, counts: grouped_linear(r, counts, matrices)
    )
    expected = plain_experts(x.flatten(0, 1), indices, weights, matrices).view_as(x)
    assert torch.allclose(found, expected, atol=1e-14)
    scale = torch.randn_like(found)
    inputs = (x, matrices, weights)
    got = torch.autograd.grad((found * scale).sum(), inputs)
    for a, b in zip(got, torch.autograd.grad((expected * scale).sum(), inputs), strict=True):
        assert torch.allclose(a, b, atol=1e-13)
    assert (got[1][2] == 0).all()  # written, though no token came


@pytest.mark.parametrize("adds_bias", [True, False])
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_matmuls_and_their_gradients(transposed: bool, adds_bias: bool):
    torch.manual_seed(0)
    counts, kind = [3, 0, 5, 1], {"dtype": torch.float64, "requires_grad": True}
    rows, bias = torch.randn(9, 6, **kind), torch.randn(4, 8, **kind)
    weight = torch.randn(4, 6, 8, **kind) if transposed else torch.randn(4, 8, 6, **kind)
    found = grouped_linear(rows, counts, weight, bias, transposed=transposed, adds_bias=adds_bias)
    blocks = [
        block @ (matrix if transposed else matrix.t()) + (b if adds_bias else 0.0 * b)
        for block, matrix, b in zip(rows.split(counts), weight, bias, strict=True)
    ]
    expected = torch.cat(blocks)
    assert torch.allclose(found, expected)
    scale, inputs = torch.randn_like(found), (rows, weight, bias)
    got = torch.autograd.grad((found * scale).sum(), inputs)
    for a, b in zip(got, torch.autograd.grad((expected * scale).sum(), inputs), strict=True):
        assert torch.allclose(a, b)


def test_the_grouped_kernel_gives_what_the_loop_gives(monkeypatch: pytest.MonkeyPatch):
    """torch's kernel runs on GPUs; its CPU version takes the same arguments."""
    torch.manual_seed(0)
    counts = [0, 16, 8, 40]
    rows = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 24, 32, dtype=torch.bfloat16, requires_grad=True)
    scale = torch.randn(64, 24, dtype=torch.bfloat16)
    results = []
    for kernel in (False, True):
        monkeypatch.setattr(grouped, "_has_kernel", lambda *_, use=kernel: use)
        found = grouped.grouped_linear(rows, counts, weight)
        results.append((found, *torch.autograd.grad(found, (rows, weight), scale)))
    for loop, kernel_result in zip(*results, strict=True):
        assert torch.allclose(loop, kernel_result, rtol=2e-2, atol=2e-2)
    assert (results[1][2][0] == 0).all()


def test_sinks_in_the_fused_kernel_are_those_of_the_written_out_attention():
    torch.manual_seed(0)
    shape = {"dtype": torch.float64, "requires_grad": True}
    query, key, value = (torch.randn(2, 7, heads, 8, **shape) for heads in (4, 2, 2))
    sinks = torch.randn(4, **shape)
    options: dict[str, Any] = {"dropout": 0.0, "softmax_in_fp32": False, "recompute": False}
    for window in (None, 3):
        outputs = [
            AttentionCore(axis=UNSHARDED, kernel=k, scaling=8**-0.5, window=window, **options)(
                query, key, value, sinks
            )
            for k in ("flash", "eager")
        ]
        assert torch.allclose(*outputs, atol=1e-14)
        inputs = (query, key, value, sinks)
        grads = [torch.autograd.grad(o.square().sum(), inputs) for o in outputs]
        for a, b in zip(*grads, strict=True):
            assert torch.allclose(a, b, atol=1e-13)


def test_values_may_be_narrower_than_keys():
    torch.manual_seed(0)
    query, key = (torch.randn(2, 7, 4, 12, dtype=torch.float64) for _ in range(2))
    value = torch.randn(2, 7, 4, 8, dtype=torch.float64)
    options: dict[str, Any] = {"window": None, "dropout": 0.0, "softmax_in_fp32": False}
    outputs = [
        AttentionCore(axis=UNSHARDED, kernel=k, scaling=0.3, recompute=False, **options)(
            query, key, value
        )
        for k in ("flash", "eager")
    ]
    assert outputs[0].shape == (2, 7, 32)
    assert torch.allclose(*outputs, atol=1e-14)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", MIXTURES)
def test_one_rank_is_the_module_of_transformers(family: str):
    assert_equal(verified(tiny(Plan(num_microbatches=2), family)))


def test_the_router_of_deepseek_chooses_with_a_bias_that_is_not_trained():
    """The bias of its choice is a buffer: kept, loaded, and changed by no step."""
    file = tiny(Plan(num_microbatches=2), "deepseek_v3", num_layers=2)
    stage = models.Stage(file, 0, UNSHARDED)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert list(stage.buffer_layouts) == [name]
    assert name not in stage.layouts
    loaded = torch.arange(8.0)

    def start(layout: Any, pieces: Any) -> Tensor:
        if layout.name == name:
            return loaded
        return random_tensor(layout, 0, pieces)

    stage.materialise(torch.device("cpu"), start, {})
    assert torch.equal(stage.get_buffer(name), loaded.double())


# --- experts over ranks ---------------------------------------------------------------------------

# beside the matrix, which has every family of mixtures under five layouts
CASES: dict[str, tuple[str, Plan]] = {
    "expert data ranks, zero 3, recomputed": (
        "mixtral",
        Plan(4, zero_stage=3, num_microbatches=2, expert_parallel=2, recompute="full"),
    ),
    "an expert a rank, zero 3": (
        "qwen2_moe",
        Plan(8, zero_stage=3, num_microbatches=1, expert_parallel=8),
    ),
    "fewer experts than ranks": (
        "mixtral",
        Plan(4, zero_stage=3, num_microbatches=2, expert_parallel=2),
    ),
    "replicas of shards": (
        "deepseek_v3",
        Plan(4, zero_stage=2, num_microbatches=2, expert_parallel=2, dp_replicate=2),
    ),
    "cut experts, sequence parallel, recomputed": (
        "deepseek_v3",
        Plan(2, 2, zero_stage=3, expert_parallel=2, num_microbatches=2, recompute="full", **SP),
    ),
    "whole experts shared by tensor ranks": (
        "gpt_oss",
        Plan(1, 2, num_microbatches=2, expert_parallel=2, recompute="full", **WHOLE_EXPERTS),
    ),
    "whole experts, expert data ranks, zero 1": (
        "deepseek_v3",
        Plan(
            2,
            2,
            zero_stage=1,
            num_microbatches=2,
            expert_parallel=2,
            recompute="full",
            **SP,
            **WHOLE_EXPERTS,
        ),
    ),
    "interleaved pipeline": (
        "qwen3_moe",
        Plan(2, 1, 2, 2, "interleaved_1f1b", 3, num_microbatches=4, expert_parallel=2),
    ),
    "weight gradients later, zero 2": (
        "mixtral",
        Plan(4, 1, 2, 1, "zero_bubble", 2, num_microbatches=4, expert_parallel=2),
    ),
    "weight gradients later, whole experts, zero 3": (
        "gpt_oss",
        Plan(2, 2, 2, 2, "zbv", 3, num_microbatches=4, expert_parallel=2, **SP, **WHOLE_EXPERTS),
    ),
    "tokens of a sequence shared, zero 3": (
        "deepseek_v3",
        Plan(2, context_parallel=2, zero_stage=3, num_microbatches=2, expert_parallel=4),
    ),
    "all axes, whole experts": (
        "gpt_oss",
        Plan(
            2,
            2,
            2,
            zero_stage=2,
            num_microbatches=2,
            expert_parallel=4,
            recompute="selective",
            **SP,
            **WHOLE_EXPERTS,
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_parity(name: str):
    family, plan = CASES[name]
    experts = {"num_local_experts": 2, "num_experts_per_tok": 2} if "fewer" in name else {}
    layers = 2 if plan.pipeline_parallel == 1 else max(4, plan.num_stages)
    assert_equal(verified(tiny(plan, family, num_layers=layers, **experts)))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_parity_of_documents_and_of_written_out_attention(family: str):
    plan = Plan(2, 2, zero_stage=1, num_microbatches=2, expert_parallel=2, **SP)
    assert_equal(verified(tiny(plan, family, num_layers=2), documents=True))
    assert_equal(verified(tiny(plan, family, num_layers=2, attention_kernel="eager")))


# --- the comparison sees it when a guard is gone --------------------------------------------------


def without_expert_reduction() -> None:
    """Experts' gradients stay on the rank whose tokens gave them."""
    models.Stage.expert_modules = lambda *_: []
    original = data_parallel.shard_parameters

    def distribute(stage: Any, grid: Any, precision: Any) -> Any:
        experts = {p for n, p in stage.named_parameters() if ".experts." in n}
        replicate = data_parallel.replicate
        data_parallel.replicate = lambda *a, **k: replicate(*a, **(k | {"ignored_params": experts}))
        return original(stage, grid, precision)

    train.shard_parameters = distribute


def without_completion() -> None:
    train.sum_partial_gradients = lambda *_: None


def without_gradients_back() -> None:
    """Gradients of rows are not sent back."""
    exchange = expert_parallel._Exchange

    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, None, torch.zeros(sum(ctx.send_counts), gradient.size(1)).to(gradient)

    exchange.backward = staticmethod(backward)


def with_every_bias() -> None:
    """Each tensor-parallel rank adds the whole bias of the experts it cuts."""
    from executor.model.families import experts

    original = experts.grouped_linear

    def linear(*arguments: Any, **options: Any) -> Tensor:
        return original(*arguments, **(options | {"adds_bias": True}))

    experts.grouped_linear = linear


GUARDS: dict[str, tuple[Any, Plan, str]] = {
    "experts are reduced over those who hold the same": (
        without_expert_reduction,
        Plan(4, expert_parallel=2),
        "mixtral",
    ),
    "routers of cut experts": (without_completion, Plan(1, 2), "mixtral"),
    "routers of whole experts": (without_completion, Plan(1, 2, **WHOLE_EXPERTS), "mixtral"),
    "routers under sequence parallelism": (
        without_completion,
        Plan(1, 2, expert_parallel=2, **SP, **WHOLE_EXPERTS),
        "qwen3_moe",
    ),
    "norms of heads, accumulated": (
        without_completion,
        Plan(1, 2, num_microbatches=2),
        "qwen3_moe",
    ),
    "gradients come back to their tokens": (
        without_gradients_back,
        Plan(2, expert_parallel=2),
        "mixtral",
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.distributed
@pytest.mark.parametrize("name", GUARDS)
def test_a_missing_guard_is_seen(name: str):
    prepare, plan, family = GUARDS[name]
    file = tiny(plan, family, num_layers=2)
    found = verified(file, prepare)
    assert found.gradient_difference > 1e-3
    assert not found.passed


@pytest.mark.slow
@pytest.mark.distributed
def test_a_bias_that_is_added_twice_is_seen():
    # biases start as zeros: only their gradients and the second batch tell
    file = tiny(Plan(1, 2), "gpt_oss", num_layers=2)
    assert verified(file, with_every_bias).gradient_difference > 1e-6


def test_frozen_experts_give_no_gradient_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a gradient that nobody asked for")

    torch.manual_seed(0)
    rows = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 5, 4, dtype=torch.float64)
    counts = [1, 3, 2]
    monkeypatch.setattr(grouped, "_outer", never)
    grouped.grouped_linear(rows, counts, weight).square().sum().backward()
    found, rows.grad = rows.grad, None
    blocks = rows.split(counts)
    whole = torch.cat([block @ matrix.t() for block, matrix in zip(blocks, weight, strict=True)])
    whole.square().sum().backward()
    torch.testing.assert_close(found, rows.grad)
    with pytest.raises(AssertionError, match="nobody asked"):
        grouped.grouped_linear(rows, counts, weight.requires_grad_()).sum().backward()
