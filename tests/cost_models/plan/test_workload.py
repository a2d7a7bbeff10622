from typing import Any, get_args

import pytest

from cost_models.memory.optimizer_states import OPTIMIZER_TRAITS
from cost_models.plan.workload import COMPUTE_BYTES, MASTER_BYTES, Optimizer, Workload
from hardware_profiles.errors import InputError

GOOD: dict[str, Any] = {"seq_len": 128, "global_batch_size": 8}


def read(**changes: Any) -> Workload:
    return Workload.from_dict(GOOD | changes, "workload")


def test_json_and_back() -> None:
    workload = Workload(
        4096,
        64,
        "fp16",
        "muon",
        "eager",
        master_weights=False,
        optimizer_state_precision="fp32",
        gradient_precision="bf16",
    )
    assert Workload.from_dict(workload.to_dict(), "x") == workload
    assert workload.tokens_per_step == 4096 * 64


def test_bitsandbytes_keeps_32_bit_states_of_16_bit_weights() -> None:
    sixteen = {"precision": "bf16", "master_weights": False}
    assert read(**sixteen).state_bytes == 2.0
    assert read(**sixteen, optimizer="paged_adamw").state_bytes == 4.0


def test_left_out_values_are_the_documented_defaults() -> None:
    assert read() == Workload(128, 8, "bf16", "adamw", "flash")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seq_len": 0}, "seq_len = 0"),
        ({"seq_len": -1}, "seq_len = -1"),
        ({"seq_len": None}, "seq_len is missing"),
        ({"seq_len": 10**9}, "100,000,000"),
        ({"global_batch_size": 1.5}, "global_batch_size = 1.5"),
        ({"global_batch_size": float("inf")}, "global_batch_size = Infinity"),
        ({"precision": "bf61"}, "Did you mean bf16"),
        ({"optimizer": "adamv"}, "Did you mean adam"),
        ({"optimizer_state_precision": "fp16"}, "must be one of auto, fp32, bf16"),
        ({"gradient_precision": 16}, "gradient_precision = 16"),
        ({"master_weights": "no"}, "master_weights"),
        ({"quantisation": "int8"}, "of qlora's frozen matrices (adapter is none)"),
        ({"quantisation": "int3"}, "must be one of nf4, nf4_double, int8, int4, int2"),
        (
            {"master_weights": False, "precision": "fp32"},
            "must be true; false needs bf16, fp16, fp8",
        ),
        ({"optimizer": "adamw_8bit", "optimizer_state_precision": "fp32"}, "are 8-bit"),
        ({"precision": "fp64", "gradient_precision": "bf16"}, "everything in fp64"),
        ({"attention_kernel": 3}, "a string"),
        ({"sequence": 3}, "unknown key 'sequence'"),
    ],
)
def test_bad_values_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match="workload: ") as caught:
        read(**changes)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_precision_and_optimizer_has_its_sizes() -> None:
    assert set(COMPUTE_BYTES) == set(MASTER_BYTES)
    for precision in COMPUTE_BYTES:
        assert read(precision=precision).precision == precision
        assert MASTER_BYTES[precision] >= COMPUTE_BYTES[precision]
    assert set(OPTIMIZER_TRAITS) == set(get_args(Optimizer))
    for optimizer in OPTIMIZER_TRAITS:
        assert read(optimizer=optimizer).optimizer == optimizer


def test_precisions_of_what_is_kept() -> None:
    usual, pure = read(), read(master_weights=False)
    assert (usual.compute_bytes, usual.master_bytes, usual.state_bytes) == (2, 4, 4)
    assert usual.gradient_bytes(in_master_precision=True) == 4
    assert usual.gradient_bytes(in_master_precision=False) == 2
    assert usual.reduction_bytes == 4
    assert (pure.master_bytes, pure.state_bytes, pure.reduction_bytes) == (2, 2, 2)
    assert pure.gradient_bytes(in_master_precision=True) == 2
    said = read(optimizer_state_precision="bf16", gradient_precision="bf16")
    assert (said.master_bytes, said.state_bytes, said.reduction_bytes) == (4, 2, 2)
    assert said.gradient_bytes(in_master_precision=True) == 2
    kept = read(master_weights=False, optimizer_state_precision="fp32", gradient_precision="fp32")
    assert (kept.master_bytes, kept.state_bytes, kept.reduction_bytes) == (2, 4, 4)
