"""What a target allows of pinned parts, whatever the other parts are."""

from typing import Any

import pytest

import planner
from hardware_profiles.errors import InputError
from planner.request.limits import require_possible


@pytest.mark.parametrize(
    ("name", "fixed"),
    [
        ("deepspeed", {"context_parallel": 2}),  # with ulysses, not the default
        ("deepspeed", {"dp_replicate": 1, "data_parallel": 4}),
        ("accelerate", {"tensor_parallel": 2, "data_parallel": 2}),  # from ZeRO 2 on
        ("accelerate", {"tensor_parallel": 2, "dp_replicate": 2}),  # where more ranks shard
        ("torchtitan", {"context_parallel": 2}),  # from ZeRO 2 on, with all-gather
    ],
)
def test_pins_are_possible_if_some_plan_has_them(name: str, fixed: dict[str, Any]) -> None:
    require_possible(name, fixed)


@pytest.mark.parametrize(
    ("name", "fixed", "words"),
    [
        ("deepspeed", {"pipeline_parallel": 2}, "pipeline_parallel = 2"),
        ("deepspeed", {"context_parallel": 2, "tensor_parallel": 2}, "AutoTP and Ulysses"),
        (
            "accelerate",
            {"tensor_parallel": 2, "dp_replicate": 2, "data_parallel": 2},
            "replicas alone",
        ),
    ],
)
def test_pins_beyond_every_plan_are_refused(name: str, fixed: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        require_possible(name, fixed)


def test_a_target_with_several_profiles_answers_with_pins_that_some_stage_has() -> None:
    asked: dict[str, Any] = {"to": "accelerate", "seq_len": 512}
    answer: Any = planner.plan(
        "llama-3.2-1b",
        "4xA100-80GB",
        fix={"tensor_parallel": 2, "data_parallel": 2},
        **asked,
    )
    assert answer.assessments[0].plan.zero_stage >= 2


def test_fit_refuses_what_a_trainer_with_several_profiles_cannot_run() -> None:
    """As ``plan`` leaves it out; the parts that are not given are those that it runs."""
    asked: dict[str, Any] = {"software": "deepspeed", "seq_len": 512}
    for parts in ({"pipeline_parallel": 2}, {"dp_replicate": 2}, {"recompute": "selective"}):
        with pytest.raises(InputError, match=r"DeepSpeed .* cannot run this plan"):
            planner.fit("llama-3.2-1b", "4xA100-80GB", **asked, **parts)
    answer: Any = planner.fit("llama-3.2-1b", "4xA100-80GB", context_parallel=2, **asked)
    assert answer.plan.context_parallel_method == "ulysses"
