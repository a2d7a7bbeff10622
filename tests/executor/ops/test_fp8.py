"""Matmuls in 8 bits: what one rounds and keeps, and that every plan trains as one process does."""

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from cost_models.legality.executor_limits import untrained_in_fp8
from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile
from executor.ops import fp8
from executor.processes.fork import run_forked
from executor.support import check_supported
from executor.training.trainer import Trainer
from hardware_profiles.errors import InputError
from tests.executor.tiny import CONFIGS, random_batch, tiny

DENSE = [
    family
    for family in CONFIGS
    if untrained_in_fp8(tiny(Plan(), family).model, tiny(Plan(), precision="fp8").workload) is None
]


def value(matrix: fp8.QuantizedMatrix) -> Tensor:
    return matrix.values.float() * matrix.scale


def error(found: Tensor, exact: Tensor) -> float:
    return float(((found.float() - exact).norm() / exact.norm()).detach())


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e30])
def test_the_largest_element_takes_the_largest_number(size: float):
    matrix = torch.randn(16, 32) * size
    for kind, digits in ((fp8.FORWARD_DTYPE, 3), (fp8.BACKWARD_DTYPE, 2)):
        eight = fp8.quantize(matrix, kind)
        assert float(eight.values.float().abs().max()) == torch.finfo(kind).max
        # half of the last digit of the numbers that are not very small
        large = matrix.abs() > matrix.abs().max() * 1e-2
        off = ((value(eight) - matrix) / matrix).abs()[large].max()
        assert float(off) <= 2.0 ** -(digits + 1) * 1.001


def test_zeros_stay_zeros():
    assert value(fp8.quantize(torch.zeros(16, 16), fp8.FORWARD_DTYPE)).abs().max() == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_those_of_the_rounded_tensors(dtype: torch.dtype):
    """And so close to the exact ones as 8 bits let them be; one input for several matrices."""
    torch.manual_seed(0)
    x = torch.randn(2, 16, 32, dtype=dtype, requires_grad=True)
    weights = [torch.randn(n, 32, dtype=dtype, requires_grad=True) for n in (48, 16)]
    biases = [torch.randn(48, dtype=dtype, requires_grad=True), None]
    outputs = fp8.fp8_linears(x, weights, biases)
    gradients = [torch.randn_like(y) for y in outputs]
    found = torch.autograd.grad(outputs, [x, *weights, biases[0]], gradients)

    flat = x.detach().flatten(0, 1)
    eight = [
        value(fp8.quantize(t, fp8.FORWARD_DTYPE)) for t in (flat, *(w.detach() for w in weights))
    ]
    back = [value(fp8.quantize(g.flatten(0, 1), fp8.BACKWARD_DTYPE)) for g in gradients]
    bias = biases[0]
    assert bias is not None
    rounding = 0.01 if dtype == torch.bfloat16 else 1e-5
    assert error(outputs[0].flatten(0, 1), eight[0] @ eight[1].T + bias.float()) < rounding
    assert error(outputs[1].flatten(0, 1), eight[0] @ eight[2].T) < rounding
    assert error(found[0].flatten(0, 1), back[0] @ eight[1] + back[1] @ eight[2]) < rounding
    assert error(found[1], back[0].T @ eight[0]) < rounding
    assert error(found[3], gradients[0].float().sum((0, 1))) < rounding
    exact = gradients[0].float().flatten(0, 1).T @ flat.float()
    assert 1e-3 < error(found[1], exact) < 0.1, "in 8 bits"


def test_eight_bits_of_the_input_are_kept_and_no_weight():
    x, weight = (torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        fp8.fp8_linears(x, [weight], [None])
    own = [t for t in kept if t is not weight]
    assert sum(t.numel() * t.element_size() for t in own) == 16 * 32 + 4


def _losses(rank: int, file: PlanFile, steps: int) -> dict[str, list[float]]:
    trainer = Trainer(file, seed=3, learning_rate=3e-3)
    results = [trainer.step(random_batch(file)) for _ in range(steps)]
    return {"losses": [r.loss for r in results], "norms": [r.gradient_norm for r in results]}


def losses(plan: Plan, steps: int = 3, **options: Any) -> dict[str, list[float]]:
    file = tiny(plan, **{"precision": "fp8", "optimizer": "adamw", "num_layers": 2, **options})
    found: dict[str, list[float]] = run_forked(_losses, plan.world_size, file, steps)[0]
    return found


ONE = Plan(num_microbatches=4)
SHARED = [
    Plan(2, num_microbatches=2, zero_stage=1),
    Plan(2, num_microbatches=2, zero_stage=3, recompute="full"),
    Plan(2, num_microbatches=2, zero_stage=2, recompute="selective_ops"),
    Plan(1, 1, 2, num_microbatches=4),
    Plan(2, 1, 2, num_microbatches=2, zero_stage=1),
]


@cache
def alone() -> dict[str, list[float]]:
    return losses(ONE)


@pytest.mark.sampled(1)
@pytest.mark.distributed
@pytest.mark.parametrize("plan", SHARED, ids=str)
def test_every_plan_gives_what_one_process_gives(plan: Plan):
    """The same micro-batches, so the same scales: only sums come in another order."""
    found = losses(plan)
    assert found["losses"] == pytest.approx(alone()["losses"], rel=1e-4)
    assert found["norms"] == pytest.approx(alone()["norms"], rel=5e-3)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f in ("llama", "gpt2") else pytest.mark.slow) for f in DENSE],
)
def test_families_learn_in_eight_bits_as_in_sixteen(family: str):
    sixteen = losses(ONE, 6, family=family, precision="bf16")["losses"]
    eight = losses(ONE, 6, family=family)["losses"]
    assert eight != sixteen
    assert eight == pytest.approx(sixteen, rel=0.03)
    assert eight[-1] < eight[0]


@pytest.mark.parametrize(
    ("plan", "options", "why"),
    [
        (Plan(1, 2), {}, "tensor_parallel 2, .*fp8 only for whole matrices"),
        (Plan(), {"family": "mixtral"}, "num_experts = 8 with precision fp8"),
        (Plan(), {"lora": 4}, "adapter = lora with precision fp8"),
        (
            Plan(1, 1, 2, pipeline_schedule="zero_bubble", num_microbatches=4),
            {},
            "pipeline_schedule zero_bubble; .*backward passes that are not split",
        ),
        (Plan(), {"family": "t5"}, "no encoder-decoder"),
        (Plan(), {"intermediate_size": 88}, "a matrix with a length of 88 .*multiples of 16"),
        (Plan(1, 1, 1, context_parallel=2), {}, "8 tokens of a micro-batch .*multiples of 16"),
    ],
)
def test_what_eight_bits_cannot_do_is_refused_by_name(plan: Plan, options: Any, why: str):
    with pytest.raises(InputError, match=why):
        check_supported(tiny(plan, precision="fp8", **options))


def test_an_older_gpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    fp8.check_device(device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(InputError, match=r"A100 has compute capability 8.0 \(must be 8.9 or newer"):
        fp8.check_device(device)


def test_dense_families_train_in_fp8():
    assert {"llama", "gpt2", "gemma2", "qwen3", "opt", "phi", "bert"} <= set(DENSE)
    assert math.isfinite(float(fp8.SMALLEST_SCALE))
