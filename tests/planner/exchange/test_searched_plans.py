"""Plans of searches: a trainer's file holds every one, with its layers, and is read back as it."""

import tempfile
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.legality.capabilities import DEFAULTS, capabilities
from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile
from cost_models.scenario import Scenario
from planner.exchange.job import Job
from planner.exchange.names import target_names
from planner.exchange.registry import kind_of, target
from planner.refinement.best_partition import best_staged
from planner.request.limits import searches_of
from planner.search.search import search
from tests.samples import examples, make_scenario

MODELS = ("llama-3-8b", "qwen2.5-0.5b", "mixtral-8x7b")
CLUSTERS = ("8xA100-40GB", "2x8xA100-80GB", "2x6xA100-80GB", "4x8xH100-SXM")
PINS = ({}, {"pipeline_parallel": 2}, {"pipeline_parallel": 4}, {"recompute": "full"})


@st.composite
def scenarios(draw: st.DrawFn, name: str) -> Scenario:
    """Draw a workload that a target runs; exporters refuse gradients of another precision."""
    workload, limits = {}, capabilities(name)
    for part in ("precision", "optimizer"):
        allowed = limits.workload.get(part, [DEFAULTS[part]])
        workload[part] = DEFAULTS[part] if allowed == "any" else draw(st.sampled_from(allowed))
    model, cluster = draw(st.sampled_from(MODELS)), draw(st.sampled_from(CLUSTERS))
    if workload["precision"] == "fp8":  # torchtitan: models of its own alone
        model, cluster = "llama-3-8b", "4x8xH100-SXM"
    return make_scenario(
        model,
        cluster,
        seq_len=draw(st.sampled_from([2048, 4096])),
        global_batch_size=draw(st.sampled_from([24, 64, 96])),
        **workload,
    )


def searched(scenario: Scenario, name: str, pins: dict[str, object]) -> Iterator[PlanFile]:
    """Yield the best plans of a target, and the best with layers of its own."""
    for one in searches_of(scenario, name):
        own = one.scenario
        found = search(own, {**one.pins, **pins}, require=one.require, top=6, with_near=True)
        staged = best_staged(
            own, found.plans, found.near, recomputed=found.recomputed, require=one.require
        )
        pairs = [(own, plan) for plan in found.plans]
        pairs += [] if staged is None else [(staged.scenario(own), staged.plan)]
        for of, plan in pairs:
            ranges = default_layer_ranges(of, plan)
            yield PlanFile(
                of.model, of.cluster, of.workload, plan, ranges, software=of.software.name
            )


def check(name: str, file: PlanFile) -> None:
    limits = capabilities(name)
    assert not limits.problems(file.plan, file.workload, experts=file.model.has_experts)
    one = target(name)
    with tempfile.TemporaryDirectory() as folder:
        texts = one.write(Job(file), "1")
        for path, content in texts.items():
            (Path(folder) / path).write_text(content)
        text = texts[one.file]
        assert kind_of(text, one.file).name == name
        read = one.read(text, one.file, Path(folder))
    assert (read.unknown, read.notes) == ((), ())
    settings, plan = read.settings, file.plan
    again = Plan(**{f.name: settings[f.name] for f in fields(Plan) if f.name in settings})
    ranks = again.tensor_parallel * again.pipeline_parallel * again.context_parallel
    data = file.cluster.num_gpus // ranks
    count = settings["global_batch_size"] // (data * again.micro_batch_size)
    assert replace(again, data_parallel=data, num_microbatches=count) == plan, text
    layers = ",".join(str(last - first) for first, last in file.layer_ranges)
    if "layers" in Job(file).settings:
        assert settings["layers"] == layers, text
    workload = {k: v for k, v in settings.items() if hasattr(file.workload, k)}
    assert replace(file.workload, **workload) == file.workload, text


def draw_and_check(data: st.DataObject, name: str) -> None:
    scenario = data.draw(scenarios(name))
    families = capabilities(name).families
    if not families or scenario.model.family in families:
        for file in searched(scenario, name, dict(data.draw(st.sampled_from(PINS)))):
            check(name, file)


@pytest.mark.parametrize("name", ["megatron", "torchtitan", "deepspeed"])
@settings(max_examples=examples(2), deadline=None)
@given(data=st.data())
def test_searched_plans_are_read_back(name: str, data: st.DataObject) -> None:
    draw_and_check(data, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", target_names())
@settings(max_examples=examples(8), deadline=None)
@given(data=st.data())
def test_many_searched_plans_of_every_target_are_read_back(name: str, data: st.DataObject) -> None:
    draw_and_check(data, name)
