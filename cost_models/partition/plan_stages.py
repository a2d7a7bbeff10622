"""The stages of a plan or of a table of plans: which layers every pipeline rank owns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from cost_models.arrays import among
from cost_models.columnar.dictionary_encoding import map_values
from cost_models.columnar.projections import Index, distinct_rows
from cost_models.partition.recomputed_layers import RecomputedLayers, recomputed_layers
from cost_models.partition.schedules import V_CODES, ranks_of_stages
from cost_models.partition.stage_cuts import cut_layers
from cost_models.partition.stages import (
    PipelineRank,
    contents_of_rank,
    distinct_rank_contents,
    even_split_contents,
)
from cost_models.plan.plan import Plan, PlanTable, split_layers
from cost_models.scenario import Scenario

# columns that determine the stages of a pipeline and the recomputed layers of each stage
STAGES_BY: Final = (
    "pipeline_parallel",
    "virtual_stages",
    "pipeline_schedule",
    "recompute_layers",
    "recompute_every",
)

_contents = lru_cache(maxsize=4096)(distinct_rank_contents)  # tables of a search share most


def stages_of(
    scenario: Scenario, table: PlanTable, layer_ranges: Sequence[tuple[int, int]] | None = None
) -> tuple[Index, list[Sequence[PipelineRank]]]:
    """Return the index of the pipeline contents of each plan, and the list of distinct contents."""
    v_shaped = map_values(lambda codes: among(codes, V_CODES), table.pipeline_schedule)
    group, first = distinct_rows(
        table.pipeline_parallel,
        table.virtual_stages,
        v_shaped,
        # which layers are recomputed: usually constant
        table.recompute_layers,
        table.recompute_every,
    )
    contents: list[Sequence[PipelineRank]] = []
    for row in first.tolist():
        pipeline, virtual = int(table.pipeline_parallel[row]), int(table.virtual_stages[row])
        options: dict[str, Any] = {
            "v_shaped": bool(v_shaped[row]),
            "recomputed": RecomputedLayers(
                int(table.recompute_layers[row]),
                int(table.recompute_every[row]),
                scenario.stage_recompute_layers,
            ),
        }
        stages = layer_ranges or _uneven_stages(scenario, pipeline * virtual)
        if stages is not None:
            contents.append(_contents(scenario.model, tuple(stages), pipeline, **options))
        else:
            contents.append(even_split_contents(scenario.model, pipeline, virtual, **options))
    return group, contents


def pipeline_rank(
    scenario: Scenario, plan: Plan, layer_ranges: Sequence[tuple[int, int]], rank: int
) -> PipelineRank:
    """Return the contents of one pipeline rank of a plan."""
    return contents_of_rank(
        scenario.model,
        layer_ranges,
        ranks_of_stages(plan),
        rank,
        recomputed=recomputed_layers(plan, scenario.stage_recompute_layers),
    )


def default_layer_ranges(scenario: Scenario, plan: Plan) -> tuple[tuple[int, int], ...]:
    """Return the stages that the search prices: pinned ones, or as the trainer cuts a model."""
    uneven = _uneven_stages(scenario, plan.num_stages)
    return uneven or split_layers(scenario.model.num_layers, plan.num_stages)


def _uneven_stages(scenario: Scenario, num_stages: int) -> tuple[tuple[int, int], ...] | None:
    """Return the scenario's pinned stages, or those of a trainer that cuts unevenly."""
    if pinned := scenario.pinned_stages(num_stages):
        return pinned
    cut = scenario.software.pipeline.stages
    if cut == "even" or num_stages == 1 or num_stages > scenario.model.num_layers:
        return None
    return cut_layers(cut, scenario.model, num_stages)
