import copy
from dataclasses import replace
from typing import Any

import pytest

from cost_models.plan.plan import Plan, split_layers
from cost_models.plan_file import PlanFile, read_plan_file, write_plan_file
from cost_models.pricing.prediction import Prediction, predict, scenario_of, still_holds
from tests.samples import make_scenario

PLAN = Plan(data_parallel=2, tensor_parallel=2, pipeline_parallel=2, num_microbatches=2)


def priced_file(software: str = "shardplan") -> PlanFile:
    scenario = make_scenario("llama", seq_len=256, global_batch_size=4, software=software)
    ranges = split_layers(scenario.model.num_layers, 2)
    return PlanFile(
        model=scenario.model,
        cluster=scenario.cluster,
        workload=scenario.workload,
        plan=PLAN,
        layer_ranges=ranges,
        prediction=predict(scenario, PLAN, ranges).to_dict(),
        software=software,
    )


def fresh(file: PlanFile) -> Prediction:
    return predict(scenario_of(file), file.plan, file.layer_ranges)


@pytest.mark.parametrize("software", ["shardplan", "megatron"])
def test_a_file_as_written_still_holds(tmp_path: Any, software: str) -> None:
    write_plan_file(tmp_path / "plan.json", priced_file(software))
    file = read_plan_file(tmp_path / "plan.json")
    assert file.software == software
    assert still_holds(file, fresh(file))


def test_an_edited_file_does_not_hold() -> None:
    file = priced_file()
    longer = replace(file, workload=replace(file.workload, seq_len=512))
    assert not still_holds(longer, fresh(longer))
    sharded = replace(file, plan=replace(PLAN, zero_stage=1))
    assert not still_holds(sharded, fresh(sharded))
    uneven = replace(file, layer_ranges=((0, 1), (1, file.model.num_layers)))
    assert not still_holds(uneven, fresh(uneven))


def test_an_edited_prediction_does_not_hold() -> None:
    file = priced_file()
    for path, value in (
        (("memory",), "x"),
        (("memory", "peak_bytes"), 1.0),
        (("memory", "peak_bytes"), "x"),
        (("time",), None),
        (("communication",), {}),
    ):
        edited = copy.deepcopy(dict(file.prediction))
        inner = edited
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        assert not still_holds(replace(file, prediction=edited), fresh(file))
    assert not still_holds(replace(file, prediction={}), fresh(file))
