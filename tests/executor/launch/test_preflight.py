"""What is checked before a process starts: the prediction belongs to the plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile, write_plan_file
from cost_models.pricing.prediction import predict, scenario_of
from executor.config.data_options import DataOptions
from executor.launch.preflight import prepare, total_bytes, with_current_prediction
from hardware_profiles.cluster.parse import parse_cluster
from tests.executor.tiny import tiny


def priced(**changes: Any) -> PlanFile:
    file = replace(tiny(Plan(data_parallel=2)), cluster=parse_cluster("2xA100-80GB"), **changes)
    return replace(
        file, prediction=predict(scenario_of(file), file.plan, file.layer_ranges).to_dict()
    )


def test_a_prediction_that_holds_is_kept() -> None:
    file = priced()
    assert with_current_prediction(file) == (file, ())


def test_an_edited_plan_is_predicted_anew() -> None:
    file = priced()
    edited = replace(file, workload=replace(file.workload, seq_len=4096))
    anew, notes = with_current_prediction(edited)
    assert "not for this plan" in notes[0]
    assert total_bytes(anew) > 2 * total_bytes(file)
    anew, notes = with_current_prediction(replace(file, prediction={"memory": "x"}))
    assert anew == file
    assert len(notes) == 1
    assert "is missing" in with_current_prediction(replace(file, prediction={}))[1][0]


def test_a_plan_priced_for_another_trainer_is_predicted_for_this_one() -> None:
    anew, notes = with_current_prediction(priced(software="megatron"))
    assert "priced for megatron" in notes[0]
    assert anew == priced()


def test_a_loss_of_routers_that_is_not_trained_is_said(tmp_path: Path) -> None:
    for family, said in (("mixtral", 1), ("llama", 0)):
        write_plan_file(path := tmp_path / family, tiny(Plan(), family, router_aux_loss_coef=0.02))
        notes = prepare(path, DataOptions(), seed=0).notes
        assert sum("router_aux_loss_coef = 0.02) is not trained" in n for n in notes) == said
