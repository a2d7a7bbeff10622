import dataclasses
from typing import Any

import pytest

from cost_models.model.lora import adapted
from cost_models.partition.tensor_sharding import shard_dim
from cost_models.plan.workload import Workload
from hardware_profiles.errors import InputError
from tests.samples import llama, sample_model


def lora(rank: int = 4, **options: Any) -> Workload:
    return Workload(256, 4, adapter="lora", adapter_rank=rank, adapter_alpha=8.0, **options)


def test_without_an_adapter_nothing_changes() -> None:
    model = llama()
    assert adapted(model, Workload(256, 4)) is model
    assert llama().num_trainable_parameters == llama().num_parameters


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "qwen3"])
def test_only_adapters_are_trained(name: str) -> None:
    """r (in + out) for every matrix of a layer that is not an expert's."""
    model = sample_model(name)
    expected = sum(
        4 * sum(w.shape)
        for kind in model.pattern
        for w in model.kinds[kind].weights
        if w.role == "linear" and w.part in ("attention", "mlp", "shared_experts")
    )
    found = adapted(model, lora())
    assert found.num_trainable_parameters == expected > 0
    assert found.num_parameters == model.num_parameters + expected


def test_cuts_follow_the_matrix() -> None:
    (kind,) = adapted(llama(), lora()).kinds
    by_name = {w.name: w for w in kind.weights}
    column = by_name["self_attn.q_proj.lora_B.weight"]
    assert shard_dim(column) == 0
    assert by_name["self_attn.q_proj.lora_A.weight"].gradient_is_partial_sum
    assert shard_dim(by_name["mlp.down_proj.lora_A.weight"]) == 1
    assert by_name["mlp.down_proj.lora_B.weight"].gradient_is_partial_sum
    assert not column.gradient_is_partial_sum


def test_targets_and_four_bits() -> None:
    few = adapted(llama(), lora(adapter_targets="attention"))
    assert not any("mlp" in w.name for w in few.kinds[0].weights if w.is_adapter)
    workload = dataclasses.replace(lora(), adapter="qlora")
    (kind,) = adapted(llama(), workload).kinds
    quantised = {w.name for w in kind.weights if w.quantised}
    assert "mlp.down_proj.weight" in quantised
    assert all(w.frozen for w in kind.weights if not w.is_adapter)
    assert not any("norm" in name for name in quantised)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"adapter": "dora"}, "one of none, lora, qlora"),
        ({"adapter_rank": 4}, "adapter_rank"),
        ({"adapter": "lora", "adapter_rank": 0}, "adapter_rank = 0"),
        ({"adapter": "lora", "adapter_rank": 8, "adapter_alpha": -1}, "adapter_alpha"),
    ],
)
def test_bad_adapters_are_named(values: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Workload.from_dict({"seq_len": 8, "global_batch_size": 1, **values}, "file")


def test_alpha_is_twice_the_rank_where_nobody_says() -> None:
    values = {"seq_len": 8, "global_batch_size": 1, "adapter": "lora", "adapter_rank": 8}
    assert Workload.from_dict(values, "file").adapter_alpha == 16.0
