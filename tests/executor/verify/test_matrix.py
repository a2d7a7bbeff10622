"""What is said to be supported is what the matrix of proofs covers."""

from dataclasses import replace
from typing import Any

import pytest

from cost_models.legality.executor_proofs import supported, unproven
from cost_models.plan.plan import CONTEXT_METHODS, SCHEDULES, Plan
from executor.support import FAMILIES
from executor.verify import prove
from executor.verify.__main__ import main
from executor.verify.matrix import VerificationCase, cases
from executor.verify.parity import Verification
from executor.verify.tiny_models import tiny

GOOD = Verification(
    loss_difference=0.0,
    norm_difference=0.0,
    gradient_difference=1e-15,
    worst_gradient="a.weight",
    weight_difference=0.0,
    worst_weight="",
    traffic=[],
    flops={"predicted": 10.0, "counted": 10.0},
    memory=[{"rank": 0, "predicted_bytes": 100.0, "counted_bytes": 101.0}],
)


@pytest.mark.slow
def test_the_file_is_what_the_cases_of_today_prove() -> None:
    """Stale: python -m executor.verify --matrix --write."""
    assert supported()["cases"] == sorted(case.name for case in cases())
    assert len(cases()) >= 150


def test_every_family_and_every_option_is_among_the_cases() -> None:
    proven = supported()
    assert sorted(proven["families"]) == sorted(FAMILIES)
    assert proven["pipeline_schedule"] == sorted(SCHEDULES)
    assert proven["context_parallel_method"] == sorted(CONTEXT_METHODS)
    assert proven["zero_stage"] == [0, 1, 2, 3]
    for axes in proven["families"].values():
        assert "data_parallel" in axes


@pytest.mark.parametrize(
    ("family", "plan", "said"),
    [
        ("llama", Plan(2, 2, 2, dp_replicate=2, context_parallel=2), None),
        ("mixtral", Plan(2, expert_parallel=2), None),
        ("llama", Plan(expert_parallel=2), "expert_parallel = 2 with model_type llama"),
    ],
)
def test_what_is_not_proven_is_named(family: str, plan: Plan, said: str | None) -> None:
    file = tiny(plan, family)
    found = unproven(file.model, file.workload, plan)
    assert (found is None) if said is None else (found is not None and said in found)


def test_an_unknown_family_is_named() -> None:
    file = tiny(Plan())
    other = replace(file.model, family="bloom")
    assert "model_type bloom (it trains" in str(unproven(other, file.workload, Plan()))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"gradient_difference": 1e-8}, "gradient 1.0e-08 a.weight"),
        ({"loss_difference": float("nan")}, "loss nan"),
        ({"flops": {"predicted": 10.0, "counted": 11.0}}, "FLOP 11, predicted 10"),
        (
            {"memory": [{"rank": 0, "predicted_bytes": 300.0, "counted_bytes": 100.0}]},
            "memory +200 %",
        ),
    ],
)
def test_the_matrix_sees_what_is_wrong(changes: dict[str, Any], said: str | None) -> None:
    worst = prove.LargestDifferences()
    found = worst.take(VerificationCase("a case", Plan()), replace(GOOD, **changes))
    assert (found is None) if said is None else (found is not None and said in found)
    assert "a case" in str(worst)


@pytest.mark.slow
def test_a_part_and_a_name_choose_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--matrix", "--part", "4/3"]) == 2
    assert main(["--matrix", "--only", "nothing like it"]) == 2
    assert main(["--matrix", "--write", "--only", "llama"]) == 2
    assert "remove --part and --only" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.distributed
def test_a_case_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--matrix", "--only", "llama lora"]) == 2
    assert main(["--matrix", "--only", "llama one process lora"]) == 0
    assert "1 of 1 cases passed" in capsys.readouterr().out
