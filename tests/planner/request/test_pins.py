from typing import Any

import pytest

from hardware_profiles.errors import InputError
from planner.request.pins import check_fixed, parse_fixed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        (" , ,", {}),
        ("tp=2", {"tensor_parallel": 2}),
        (" tp = 2 , pp=4 ", {"tensor_parallel": 2, "pipeline_parallel": 4}),
        ("tensor_parallel=2,tp=2", {"tensor_parallel": 2}),
        ("sp=on", {"sequence_parallel": True}),
        ("sp=FALSE", {"sequence_parallel": False}),
        ("recompute=full", {"recompute": "full"}),
        ("schedule=gpipe,vp=1", {"pipeline_schedule": "gpipe", "virtual_stages": 1}),
        ("mbs=4,microbatches=8,zero=3,dp=2", None),
    ],
)
def test_fix_is_read(text: str, expected: dict[str, Any] | None) -> None:
    read = parse_fixed(text)
    if expected is not None:
        assert read == expected
    else:
        assert read == {
            "micro_batch_size": 4,
            "num_microbatches": 8,
            "zero_stage": 3,
            "data_parallel": 2,
        }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp", "expected name=value"),
        ("tp=", "expected name=value"),
        ("=2", "is not a part of a plan"),
        ("tpp=2", "Did you mean tp"),
        ("seq_len=2", "is not a part of a plan"),
        ("tp=two", "must be a whole number"),
        ("tp=2.5", "must be a whole number"),
        ("tp=0", "tensor_parallel = 0"),
        ("tp=-1", "tensor_parallel = -1"),
        ("tp=" + "9" * 30, "tensor_parallel = 9"),
        ("tp=" + "9" * 5000, "whole number"),
        ("zero=4", "zero_stage = 4"),
        ("sp=maybe", "must be on or off"),
        ("recompute=ful", "Did you mean full"),
        ("schedule=1F1B", "Did you mean 1f1b"),
        ("tp=2,tp=4", "tensor_parallel is given twice, as 2 and as 4"),
        ("tp=2,tensor_parallel=4", "given twice"),
    ],
)
def test_a_bad_fix_is_one_line(text: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_fixed(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_fixed_values_from_python_are_checked_like_a_plan_file() -> None:
    assert check_fixed({"zero_stage": 3}) == {"zero_stage": 3}
    with pytest.raises(InputError, match="zero_stage = 7"):
        check_fixed({"zero_stage": 7})
    with pytest.raises(InputError, match="unknown key"):
        check_fixed({"zero": 3})
