"""plan.json: the one thing that crosses from the planner to the executor.

The file stands alone: it holds the model's whole config, the cluster's figures, the workload, the
plan with the layers of every stage, the trainer that it was priced for, and what was predicted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from cost_models.model.families import model_spec
from cost_models.model.lora import adapted
from cost_models.model.spec import ModelSpec
from cost_models.model.target_length import require_decoder
from cost_models.partition.recomputed_layers import (
    RecomputedLayers,
    by_stage_error,
    read_recompute_layers_by_stage,
    recomputed_layers,
)
from cost_models.plan.plan import Plan
from cost_models.plan.workload import Workload
from hardware_profiles.cluster.cluster_json import ClusterFields, cluster_from_dict, cluster_to_dict
from hardware_profiles.cluster.irregular_tree import read_rank_order
from hardware_profiles.cluster.schema import PRECISIONS, Cluster
from hardware_profiles.errors import InputError, did_you_mean
from hardware_profiles.fields import (
    Line,
    convert,
    read_json,
    tidied,
    write_text_atomically,
    wrong_value,
)
from hardware_profiles.options import bounded_struct, declared
from hardware_profiles.software.trainer import (
    OWN_FILE,
    names_engines,
    profile_names,
    software_names,
    software_profile,
)

SCHEMA_VERSION: Final = 1
SCHEMA_ID: Final = f"urn:shardplan:plan:{SCHEMA_VERSION}"


class _Version(Struct, frozen=True):
    schema_version: Annotated[int, Meta(ge=0, le=10**9)]


class _Model(Struct, frozen=True, forbid_unknown_fields=True):
    name: Line
    config: dict[str, Any]


class _PlanDocument(_Version, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: _Model
    cluster: dict[str, Any]
    workload: dict[str, Any]
    plan: dict[str, Any]
    layer_ranges: list[Any]
    rank_order: list[Any] | None = None
    stage_recompute_layers: Any = None
    created_by: Line = "unknown"
    software: Line = "shardplan"
    trainer: Line = ""
    prediction: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class PlanFile:
    """The contents of a plan.json."""

    model: ModelSpec
    cluster: Cluster
    workload: Workload
    plan: Plan
    layer_ranges: tuple[tuple[int, int], ...]  # layers [first, last) of each stage, in stage order
    prediction: Mapping[str, Any] = field(default_factory=dict)
    created_by: str = "shardplan"
    software: str = "shardplan"  # the profile that priced it
    trainer: str = ""  # whose plans alone were searched; empty: those of the profile
    # the first layers of each stage that are recomputed; None: as the plan says
    stage_recompute_layers: tuple[int, ...] | None = None

    @property
    def rank_order(self) -> tuple[int, ...] | None:
        """The accelerator, node after node, of each rank of the plan's grid; None: its own number.

        Links are priced in that order, and the executor's processes join in it.
        """
        return self.cluster.rank_order

    @property
    def recomputed(self) -> RecomputedLayers:
        """Which layers are recomputed, if the plan recomputes."""
        return recomputed_layers(self.plan, self.stage_recompute_layers)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        by_stage, order = self.stage_recompute_layers, self.rank_order
        return {
            "schema_version": SCHEMA_VERSION,
            "created_by": self.created_by,
            "model": {"name": self.model.name, "config": dict(self.model.config)},
            "cluster": cluster_to_dict(self.cluster),
            "workload": self.workload.to_dict(),
            "plan": self.plan.to_dict(),
            "layer_ranges": [list(pair) for pair in self.layer_ranges],
            **({} if order is None else {"rank_order": list(order)}),
            **({} if by_stage is None else {"stage_recompute_layers": list(by_stage)}),
            "software": self.software,
            **({"trainer": self.trainer} if self.trainer else {}),
            "prediction": dict(self.prediction),
        }


def write_plan_file(path: Path, contents: PlanFile, *, force: bool = False) -> None:
    """Write a plan.json; an existing file is kept unless ``force``."""
    text = json.dumps(contents.to_dict(), indent=2, allow_nan=False) + "\n"
    write_text_atomically(path, text, force=force)


def plan_schema() -> dict[str, Any]:
    """Return the JSON schema (2020-12) of the files that ``write_plan_file`` writes.

    It is made of the types by which ``read_plan_file`` checks single values; unknown keys are
    refused. Left out: rules between values (the batch, the layers), the text of ``recompute``, the
    keys of a model's config, and the contents of ``prediction``.
    """
    index = Annotated[int, Meta(ge=0, le=10**6)]
    types: dict[str, Any] = {
        "schema_version": Literal[SCHEMA_VERSION],
        "cluster": ClusterFields,
        "workload": bounded_struct(Workload),
        "plan": bounded_struct(Plan),
        "layer_ranges": list[tuple[index, index]],
        "rank_order": list[index],
        "stage_recompute_layers": list[index],
    }
    fields: list[Any] = []
    for one in msgspec.structs.fields(_PlanDocument):
        kind = types.get(one.name, one.type)
        fields.append((one.name, kind) if one.required else (one.name, kind, msgspec.UNSET))
    document = msgspec.defstruct("PlanFile", fields, kw_only=True, forbid_unknown_fields=True)
    found = msgspec.json.schema(document)
    parts = found["$defs"]
    for name in ("peak_flops", "achievable_flops"):
        parts["Accelerator"]["properties"][name]["propertyNames"] = {"enum": list(PRECISIONS)}
    for name, option in declared(Plan).items():
        if option.help:
            parts["Plan"]["properties"][name]["description"] = option.help
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID}
    return {**head, "title": "plan.json of shardplan", **found}


def read_plan_file(path: Path) -> PlanFile:
    """Read and check a plan.json, one that was edited by hand included.

    Values are checked one by one and against each other (batch, layers); whether the plan is legal
    for the model and the cluster is checked by ``cost_models.legality.rules``.
    """
    return plan_file_from_dict(read_json(path, "a plan.json of shardplan plan -o"), str(path))


def plan_file_from_dict(values: Mapping[str, Any], where: str) -> PlanFile:
    """Read and check the contents of a plan.json, wherever they stand."""
    values = {
        key: value if key in ("model", "prediction") else tidied(value)
        for key, value in values.items()
        if value is not None
    }
    if "schema_version" not in values:
        raise InputError(
            f"{where}: schema_version is missing; a plan.json of shardplan plan -o is expected"
        )
    version = convert(values, _Version, where).schema_version
    if version != SCHEMA_VERSION:
        raise InputError(
            f"{where}: schema_version = {version}; this version of shardplan reads {SCHEMA_VERSION}"
        )
    file = convert(values, _PlanDocument, where)
    model = model_spec(file.model.config, name=file.model.name, where=f"{where}: model: config")
    workload = Workload.from_dict(file.workload, f"{where}: workload")
    known = profile_names()
    own = file.software in known or file.software.endswith(OWN_FILE)
    if not own and not names_engines(file.software):
        hint = did_you_mean(file.software, software_names())
        allowed = "one of " + ", ".join(known) + ", or engines" + (f". {hint}" if hint else "")
        raise wrong_value(where, "software", file.software, allowed)
    require_decoder(model, workload, f"{where}: workload: ")
    every = software_profile(file.software).frozen.quantises_every_matrix
    model = adapted(model, workload, quantises_every_matrix=every)
    plan = Plan.from_dict(file.plan, f"{where}: plan")
    if plan.global_batch_size != workload.global_batch_size:
        raise InputError(
            f"{where}: micro_batch_size {plan.micro_batch_size} x num_microbatches "
            f"{plan.num_microbatches} x data_parallel {plan.data_parallel} = "
            f"{plan.global_batch_size}, but workload.global_batch_size = "
            f"{workload.global_batch_size} (must be equal)"
        )
    layer_ranges = _layer_ranges(file.layer_ranges, where, model.num_layers, plan.num_stages)
    smallest = min(last - first for first, last in layer_ranges)
    if plan.recompute_layers > smallest:
        raise InputError(
            f"{where}: recompute_layers = {plan.recompute_layers}, but the smallest stage in "
            f"layer_ranges has {smallest} layers (must be 0, for all, to that)"
        )
    by_stage = None
    if file.stage_recompute_layers is not None:
        by_stage = read_recompute_layers_by_stage(
            file.stage_recompute_layers, f"{where}: stage_recompute_layers"
        )
        problem = by_stage_error(by_stage, plan.num_stages, model.num_layers, layer_ranges)
        if problem is not None:
            raise InputError(f"{where}: stage_{problem}")
    order = read_rank_order(file.rank_order, where, plan.world_size)
    cluster = cluster_from_dict(file.cluster, f"{where}: cluster")
    return PlanFile(
        model=model,
        cluster=replace(cluster, rank_order=order),
        workload=workload,
        plan=plan,
        layer_ranges=layer_ranges,
        prediction=file.prediction,
        created_by=file.created_by,
        software=file.software,
        trainer=file.trainer,
        stage_recompute_layers=by_stage,
    )


def _layer_ranges(
    pairs: list[Any], where: str, num_layers: int, num_stages: int
) -> tuple[tuple[int, int], ...]:
    allowed = f"{num_stages} pairs [first, last) that cover the layers 0 to {num_layers} in order"
    expected = 0
    for stage, pair in enumerate(pairs):
        least = int(0 < stage < len(pairs) - 1)  # the first and the last stage may have none
        whole = isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)
        if not whole or pair[0] != expected or pair[1] < pair[0] + least:
            raise wrong_value(where, "layer_ranges", pairs, allowed)
        expected = pair[1]
    if len(pairs) != num_stages or expected != num_layers:
        raise wrong_value(where, "layer_ranges", pairs, allowed)
    return tuple((pair[0], pair[1]) for pair in pairs)
