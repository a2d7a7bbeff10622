"""Modules and operators that are computed again one by one: values, memory, refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.memory_truth import small_models
from benchmarks.memory_truth.rows import rows_of
from cost_models.legality.executor_limits import untrained_recompute
from cost_models.plan.plan import Plan
from executor.ops.discarded_results import Discarded
from executor.ops.recompute import checkpointed_selectively, matmuls
from executor.support import check_supported
from hardware_profiles.errors import InputError
from tests.executor.tiny import tiny


def test_a_freed_result_is_computed_again_once_for_all_its_readers():
    torch.manual_seed(0)
    weights = [torch.randn(8, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    runs: list[int] = []

    def norm(x: torch.Tensor) -> tuple[torch.Tensor]:
        runs.append(1)
        return (x.tanh() * weights[0].sum(),)

    def readers(y: torch.Tensor) -> torch.Tensor:
        return (F.linear(y, weights[1]) * F.linear(y[:, :8], weights[2])).sum()

    expected = torch.autograd.grad(readers(*norm(x)), [x, *weights])
    runs.clear()
    again = Discarded(norm, x, random=False)
    with again.readers() as (y,):
        loss = readers(y)
    del y
    found = torch.autograd.grad(loss, [x, *weights])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)
    assert len(runs) == 2  # forward, and once more for three readers and its own backward pass


def test_a_frozen_module_whose_input_needs_no_gradient_keeps_its_result():
    weight = torch.ones(4, 4, requires_grad=True)
    with Discarded(lambda x: (x.exp(),), torch.zeros(2, 4), random=False).readers() as (y,):
        F.linear(y, weight).sum().backward()
    torch.testing.assert_close(weight.grad, torch.full((4, 4), 2.0))


def test_only_marked_matmuls_run_again():
    kept, again = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    again.runs_again = True
    counted: list[str] = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            counted.append(func._opname)
            return func(*args, **(kwargs or {}))

    def block(x: torch.Tensor) -> torch.Tensor:
        with matmuls([kept, again]):
            return again(kept(x.exp()).exp()).exp()

    for every_second, expected in ((False, 2 + 4), (True, 3 + 4)):
        counted.clear()
        with Count():
            x = torch.ones(2, 4, requires_grad=True)
            checkpointed_selectively(
                block, x, random=False, every_second=every_second
            ).sum().backward()
        assert counted.count("mm") == expected


@pytest.mark.parametrize("setting", ["ops:every-2nd-mm", "modules:mlp"])
def test_encoder_decoders_refuse_them_plainly(setting: Any):
    check_supported(tiny(Plan(recompute=setting)))
    with pytest.raises(InputError, match="whose decoder layers have cross-attention"):
        check_supported(tiny(Plan(recompute=setting), "t5"))


def test_what_other_options_exclude_is_named():
    workload = tiny(Plan()).workload
    eight = replace(workload, precision="fp8")
    assert "with precision fp8" in str(untrained_recompute(eight, Plan(recompute="modules:mlp")))
    freed = Plan(recompute="modules:layernorm+mlp", offload="activations")
    assert "layernorm" in str(untrained_recompute(workload, freed))
    assert untrained_recompute(workload, replace(freed, recompute="modules:mlp")) is None


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "setting"),
    [
        ("llama", "ops:every-2nd-mm"),
        ("llama", "modules:core_attn+layernorm+mlp"),
        ("phi3", "modules:layernorm+mlp"),
    ],
)
def test_the_peak_is_predicted(family: str, setting: Any, monkeypatch: pytest.MonkeyPatch):
    """With few words: the peak is in a layer's backward pass, not at the loss."""
    config = {"model_type": family, **small_models.WIDE, "vocab_size": 64, "num_hidden_layers": 3}
    config |= {"pad_token_id": 0} if family == "phi3" else {}
    monkeypatch.setitem(small_models.CONFIGS, family, config)
    plan = Plan(recompute=setting, micro_batch_size=8)
    (row,) = rows_of(small_models.small(family, "bf16", plan))
    assert row["moment"] == "backward"
    assert abs(row["error_percent"]) < 1.0, row
