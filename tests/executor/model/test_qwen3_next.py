"""Linear attention of Qwen3-Next in the executor; layouts of ranks are in the matrix."""

import math
from dataclasses import replace

import pytest

from cost_models.plan.plan import Plan
from cost_models.plan.recompute import WORDS
from executor.model.parameter_layout import parameter_layouts, random_tensor
from executor.parallel.tensor_parallel import UNSHARDED
from executor.support import check_supported
from executor.training.compiled import check_compilable
from hardware_profiles.errors import InputError
from tests.executor.tiny import assert_equal, tiny, verified

DENSE = {"num_layers": 2, "num_experts": 0, "mlp_only_layers": []}


@pytest.mark.distributed
@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", WORDS[:4])
def test_values_and_flops_of_two_ranks_are_those_of_one(recompute: str) -> None:
    plan = Plan(tensor_parallel=2, sequence_parallel=True, recompute=recompute)  # type: ignore[arg-type]
    found = verified(tiny(plan, "qwen3_next", **DENSE), memory=True)  # type: ignore[arg-type]
    assert_equal(found)
    for row in found.memory:
        assert row["predicted_bytes"] == pytest.approx(row["counted_bytes"], rel=0.05)


@pytest.mark.distributed
@pytest.mark.slow
def test_adapters_of_linear_attention() -> None:
    plan = Plan(tensor_parallel=2, recompute="full")
    assert_equal(verified(tiny(plan, "qwen3_next", lora=4, **DENSE)))  # type: ignore[arg-type]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"linear_num_key_heads": 8, "linear_conv_kernel_dim": 2},
        {"full_attention_interval": 1, "attention_bias": True},
        {"full_attention_interval": 4, "num_layers": 3},  # linear attention alone
    ],
)
def test_other_options(options: dict[str, int]) -> None:
    assert_equal(verified(tiny(Plan(tensor_parallel=2), "qwen3_next", **(DENSE | options))))  # type: ignore[arg-type]


def test_initial_values_let_some_heads_remember() -> None:
    file = tiny(Plan(), "qwen3_next", linear_num_value_heads=64)
    layouts = parameter_layouts(file.model, UNSHARDED)

    def values(name: str) -> list[float]:
        layout = layouts[f"model.layers.0.{name}"]
        found: list[float] = random_tensor(layout, 1, layout.ranges(UNSHARDED)).flatten().tolist()
        return found

    rates = [math.exp(value) for value in values("linear_attn.A_log")]
    assert 0.01 <= min(rates) < 1.0
    assert 15.0 < max(rates) <= 16.0
    assert set(values("linear_attn.dt_bias")) == set(values("linear_attn.norm.weight")) == {1.0}
    assert len(set(values("linear_attn.conv1d.weight"))) > 1
    assert set(values("input_layernorm.weight")) == {0.0}


def test_neither_documents_nor_compiled_layers() -> None:
    file = tiny(Plan(), "qwen3_next")
    with pytest.raises(InputError, match="packing documents with linear attention"):
        check_supported(replace(file, workload=replace(file.workload, document_mask=True)))
    with pytest.raises(InputError, match="--compile: for qwen3_next"):
        check_compilable(Plan(), "qwen3_next")
