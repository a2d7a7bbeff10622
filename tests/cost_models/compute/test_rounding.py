"""Seconds and bytes of weights that quantisation-aware training rounds."""

from typing import Any

import pytest

from cost_models.memory.peak import timelines
from cost_models.model.families import model_spec
from cost_models.model.lora import adapted
from cost_models.model.presets import load_preset
from cost_models.partition.frozen_weights import rounded_elements
from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.workload import Workload
from cost_models.pricing.estimate import price
from cost_models.scenario import Scenario
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.software.trainer import software_profile

ROUNDED = "torchtune+int8-int4-rounding"


def scenario(software: str, adapter: str = "none") -> Scenario:
    workload = Workload(2048, 1, adapter=adapter, adapter_rank=8 if adapter == "lora" else 0)  # type: ignore[arg-type]
    model = adapted(model_spec(load_preset("llama-3.1-8b").config, name="llama"), workload)
    return Scenario(model, parse_cluster("1xA100-80GB"), workload, software_profile(software))


def seconds(software: str) -> tuple[float, float]:
    plan = PlanTable.from_plans([Plan(recompute="full")])
    case = scenario(software)
    return float(price(case, plan).step[0]), case.cluster.accelerator.memory_bandwidth.value


def test_weights_are_rounded_twice_forward_and_once_backward() -> None:
    before, bandwidth = seconds("torchtune")
    after, _ = seconds(ROUNDED)
    kind = scenario(ROUNDED).model.kinds[0]
    elements = 32 * rounded_elements(kind, 1)
    assert elements == 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    inputs = 32 * 2048 * (6 * 4096 + 14336)
    moved = (2 * 56.0 + 62.0) * (elements + inputs)
    assert moved / bandwidth < after - before < 1.6 * moved / bandwidth


def bytes_more(part: str, recompute: Any, adapter: str = "none") -> float:
    """Bytes that rounding adds to the largest sum of one part of memory, an element of a layer."""
    plan, found = Plan(recompute=recompute), []
    for name in ("torchtune", ROUNDED):
        case = scenario(name, adapter)
        lines = timelines(case, plan, default_layer_ranges(case, plan))[0]
        found.append(max(getattr(parts, part) for parts in lines))
    return (found[1] - found[0]) / float(rounded_elements(scenario(ROUNDED).model.kinds[0], 1))


@pytest.mark.parametrize(("adapter", "bytes_each"), [("none", 6.0), ("lora", 2.0)])
def test_autograd_keeps_rounded_matrices(adapter: str, bytes_each: float) -> None:
    found = bytes_more("buffers", "none", adapter)
    assert found == pytest.approx(31 * bytes_each, rel=0.12)


def test_layers_that_are_computed_again_keep_one_rounded_layer() -> None:
    assert 6.0 < bytes_more("buffers", "full") < 11.0


def test_attention_that_is_computed_again_leaves_rounded_inputs() -> None:
    """Only whole layers are without them: their matrices run again."""
    every = bytes_more("activations", "none")
    assert every > 0
    assert bytes_more("activations", "selective") == pytest.approx(every, rel=0.05)
