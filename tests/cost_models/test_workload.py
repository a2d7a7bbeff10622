from __future__ import annotations

from typing import Any

import pytest

from cost_models.workload import COMPUTE_BYTES, MASTER_BYTES, OPTIMIZER_STATES, Workload
from hardware_profiles.errors import InputError
from hardware_profiles.reading import Fields

GOOD: dict[str, Any] = {"seq_len": 128, "global_batch_size": 8}


def read(**changes: Any) -> Workload:
    return Workload.from_fields(Fields(GOOD | changes, "workload"))


def test_json_and_back() -> None:
    workload = Workload(4096, 64, "fp16", "sgd", "eager")
    assert Workload.from_fields(Fields(workload.to_dict(), "x")) == workload
    assert workload.tokens_per_step == 4096 * 64


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
        ({"optimizer": "adam"}, "Did you mean adamw"),
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
    for optimizer in OPTIMIZER_STATES:
        assert read(optimizer=optimizer).optimizer == optimizer
