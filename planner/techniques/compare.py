"""``compare_techniques()``: one line for every technique of the literature."""

from __future__ import annotations

from typing import Final

from cost_models.plan.plan import Plan
from cost_models.scenario import Scenario
from hardware_profiles.errors import InputError
from hardware_profiles.options import check_value, declared
from hardware_profiles.progress import stages, tracked
from planner.request.clusters import cluster_of
from planner.request.executor_process import is_module
from planner.request.model import model_of
from planner.request.options.arguments import takes
from planner.request.options.training import AdapterOptions, CommonOptions, LayerOptions
from planner.request.requests import TechniquesRequest, values_of
from planner.request.scenario import adapting, build_scenario
from planner.search.gc_pause import fewer_collections
from planner.techniques.answer import TechniquesAnswer
from planner.techniques.grids import KINDS, grid_lines
from planner.techniques.kinds import techniques_of
from planner.techniques.line import TechniqueLine
from planner.techniques.priced import priced_lines
from planner.techniques.stale import (
    ASYNCHRONOUS,
    DOUBLE,
    PIPEDREAM,
    SERVERS,
    server_lines,
    stale_pipelines,
)

SIZES: Final = (4.0, 1.0)  # seconds, relative: plans, formulas


@takes(TechniquesRequest)
@fewer_collections()
def compare_techniques(request: TechniquesRequest) -> TechniquesAnswer:
    """Compare techniques of training for one model on one cluster: memory, traffic, step.

    Techniques that shardplan prices are represented by the best plan of their kind, those that it
    does not price by formulas (``cost_models.techniques``). ``micro_batch_size`` pins that of all.
    """
    if is_module(request.model):
        raise InputError(
            f"{request.model}: compare-techniques needs a model whose layers are known"
        )
    size = request.micro_batch_size
    if size is not None:
        size = check_value(declared(Plan)["micro_batch_size"], size)
    adapter = adapting(**values_of(request, AdapterOptions))
    assumed = build_scenario(
        model_of(request.model),
        cluster_of(request.cluster, request.power),
        micro_batch_size=size or 1,
        adapter=adapter,
        **values_of(request, CommonOptions),
        **values_of(request, LayerOptions),
    )
    scenario = assumed.scenario
    with stages(*SIZES, joint=True) as begin:
        begin("comparing techniques")
        lines = priced_lines(scenario, techniques_of(scenario), size)
        begin("comparing techniques: formulas")
        lines += _compared(scenario, size)
    return TechniquesAnswer(
        scenario, tuple(sorted(lines, key=lambda line: line.order)), assumed.assumptions
    )


def _compared(scenario: Scenario, size: int | None) -> list[TechniqueLine]:
    """Return the lines of techniques that formulas alone describe."""
    workload = scenario.workload
    if workload.adapter != "none" or workload.freeze:
        names = [(name, title) for name, title, _, _ in KINDS]
        names += [("pipedream", PIPEDREAM), ("pipedream_2bw", DOUBLE)]
        names += [("parameter_server", SERVERS), ("asynchronous_sgd", ASYNCHRONOUS)]
        why = "its formulas are of training all weights"
        return [TechniqueLine(*pair, "compares", why_not=why) for pair in names]
    kinds = (grid_lines, stale_pipelines, server_lines)
    return [line for lines_of in tracked(kinds) for line in lines_of(scenario, size)]
