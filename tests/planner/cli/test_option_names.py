import pytest

from cost_models.plan.plan import Plan
from hardware_profiles.options import declared
from planner.cli.option_names import in_options

FIELDS = declared(Plan)


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("tensor_parallel 3 x pipeline_parallel 1 = 3", "--tp 3 x --pp 1 = 3"),
        ("plan: zero_stage = 4 (must be", "--zero 4 (must be"),
        ("sequence_parallel = off: needs", "--no-sp: needs"),
        ("recompute = full:3/2 (must be", "--recompute full:3/2 (must be"),
        ("only plain recompute here, --fix offload=none", None),
        ("p.json: zero_stage = 4 (must be", None),
        ("--fix: 'zero_stage' is not known", None),
    ],
)
def test_fields_are_named_as_they_are_typed(text: str, typed: str | None) -> None:
    assert in_options(text, FIELDS.values(), {}) == (typed or text)


def test_pinned_fields_have_their_abbreviations() -> None:
    text = "tensor_parallel = 3; --fix tensor_parallel=2 instead of tensor_parallel==3"
    assert in_options(text, (), FIELDS) == "tp=3; --fix tp=2 instead of tensor_parallel==3"
