"""``explain --why-not`` answers as ``plan --fix`` does for the trainer of the plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cost_models.legality.capabilities import capabilities
from cost_models.plan_file import read_plan_file, write_plan_file
from hardware_profiles.errors import InputError
from planner.answer.plan_answer import PlanAnswer
from planner.api.plan import plan
from planner.explanation.explain import explain
from planner.explanation.why_not import WhyNot
from tests.samples import make_scenario, with_memory


def planned(fix: str | None = None, **options: Any) -> PlanAnswer:
    sizes = {"global_batch_size": 64, "seq_len": 2048, **options}
    answer = plan("qwen2.5-0.5b", "8xA100-80GB", fix=fix, **sizes)
    assert isinstance(answer, PlanAnswer)
    return answer


def why_not(tmp_path: Path, asked: str, **options: Any) -> WhyNot:
    path = tmp_path / "plan.json"
    write_plan_file(path, planned(**options).plan_file())
    (found,) = explain(path, why_not=asked, sensitivity=False).why_not
    return found


@pytest.mark.parametrize(
    ("software", "asked"),
    [
        ("llama-factory", "zero_stage=1"),
        ("accelerate", "zero_stage=0"),
        ("accelerate", "micro_batch_size=2"),
        ("deepspeed", "zero_stage=2"),
        ("deepspeed", "zero_stage=3"),
        ("deepspeed", "micro_batch_size=2"),
        ("deepspeed", "tensor_parallel=2"),
        ("lightning", "recompute=full"),
    ],
)
def test_zero_stages_of_a_trainer_have_their_own_prices(
    tmp_path: Path, software: str, asked: str
) -> None:
    found, fixed = why_not(tmp_path, asked, software=software), planned(asked, software=software)
    seconds = fixed.ranked[0].step.seconds if fixed.tie is None else fixed.tie.seconds
    assert found.assessment is not None
    assert found.assessment.time.step_seconds == pytest.approx(seconds, rel=1e-12)
    assert found.plan == fixed.fastest


def test_what_a_trainer_cannot_run_is_the_reason(tmp_path: Path) -> None:
    found = why_not(tmp_path, "tensor_parallel=2", software="llama-factory")
    assert (found.kind, found.every, found.rules[0][0]) == ("illegal", True, "trainer")
    reason = "tensor_parallel = 2 (it runs 1)"
    assert reason in found.rules[0][1]
    with pytest.raises(InputError) as error:
        planned("tensor_parallel=2", software="llama-factory")
    assert reason in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        {"software": "deepspeed", "optimizer_kernel": "foreach"},  # an engine of every profile
        {"software": "megatron", "to": "deepspeed"},  # the profile of every stage
        {"to": "torchtitan"},  # which has one
    ],
)
def test_the_profile_that_was_given_prices_other_stages(
    tmp_path: Path, options: dict[str, str]
) -> None:
    found, fixed = why_not(tmp_path, "zero=0", **options), planned("zero=0", **options)
    seconds = fixed.ranked[0].step.seconds if fixed.tie is None else fixed.tie.seconds
    assert found.assessment is not None
    assert found.assessment.time.step_seconds == pytest.approx(seconds, rel=1e-12)


def test_only_the_name_of_a_trainer_with_limits_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    file = planned(software="Accelerate").plan_file()
    write_plan_file(path, file)
    assert read_plan_file(path) == file
    assert file.trainer == "accelerate"
    assert "trainer" not in planned().plan_file().to_dict()
    misspelt = replace(file, trainer="acelerate")
    write_plan_file(path, misspelt, force=True)
    for plan_json, where in ((misspelt, "trainer"), (path, f"{path}: trainer")):
        with pytest.raises(InputError, match=f"^{where} 'acelerate' is unknown"):
            explain(plan_json, why_not="zero=0", sensitivity=False)


def test_the_best_plan_is_one_that_the_trainer_runs() -> None:
    """Without limits a number of recomputed layers is faster, which DeepSpeed does not take."""
    found = explain(planned(software="deepspeed"), sensitivity=False)
    assert found.best is not None
    assert capabilities("deepspeed").problems_of_plan(found.best) == []
    assert found.is_best


def test_a_plan_that_fits_is_better_than_tight_ones_with_its_parts() -> None:
    """``plan`` allows offload where nothing fits without, and then finds these stages."""
    cluster = with_memory(make_scenario("llama", "5xL40S"), 6 * 2**30).cluster
    sizes = {"software": "megatron-core", "global_batch_size": 15, "seq_len": 1024}
    answer = plan("qwen2.5-0.5b", cluster, **sizes)
    assert isinstance(answer, PlanAnswer)
    assert answer.ranked[0].staged is not None
    (found,) = explain(answer, why_not="virtual_stages=1", sensitivity=False).why_not
    assert (found.kind, found.plan) == ("same", answer.best)
    (other,) = explain(answer, why_not="zero_stage=1", sensitivity=False).why_not
    assert other.kind == "tight"
