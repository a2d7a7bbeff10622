"""Options from another trainer's file: ``--from ds_config.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, TypeVar

from cost_models.legality.capabilities import capabilities
from cost_models.model.families import model_spec
from cost_models.plan.plan import Plan
from cost_models.units import format_count
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import InputError
from hardware_profiles.message import on_one_line
from hardware_profiles.options import declared
from planner.request.clusters import cluster_of
from planner.request.model import model_of
from planner.request.options.choices import ClusterLike
from planner.request.requests import FitRequest, PlanRequest

if TYPE_CHECKING:
    from planner.exchange.target import ConfigReading

Request = TypeVar("Request", FitRequest, PlanRequest)
NAME_IT: Final = ": name the model"  # end of a note for those who did not
QUANTISED: Final = ("qlora", "quantisation")
MOST_KEYS: Final = 8  # that a note names
NEARLY: Final = 0.01  # by which biases and norms that a file does not state change a model
ALIKE: Final = 0.9  # of difflib: the key of another version is less alike than a slip of the pen


def with_config(request: Request, cluster: Cluster) -> tuple[Request, ConfigReading | None]:
    """Return a request with the options of its file, which those that are given override.

    A search takes the workload alone; a plan is complete but for the parts that the trainer sets
    elsewhere.
    """
    if request.source is None:
        return request, None
    from planner.exchange.registry import read_config  # heavy: where it is used

    reading = read_config(request.source)
    found: dict[str, Any] = dict(reading.settings)
    data = _data_parallel({**found, **_given(request)}, cluster.num_gpus)
    micro, count = found.get("micro_batch_size"), found.get("num_microbatches")
    if isinstance(request, FitRequest):
        if data is not None:
            found.setdefault("data_parallel", data)
        if micro and count and "global_batch_size" in found:
            del found["num_microbatches"]  # it follows
    elif "global_batch_size" not in found and micro and count and data:
        found["global_batch_size"] = micro * count * data
    if request.qlora is not None:
        found.pop("lora", None)
    if request.lora is not None:
        for name in QUANTISED:
            found.pop(name, None)
    if isinstance(request, PlanRequest):
        found.pop("software", None)  # follows from the target, stage by stage
    elif request.software is None:
        stage = found.get("zero_stage")
        limits = capabilities(reading.target)
        adapters = bool({"lora", "qlora"} & {*found, *_given(request)})
        if stage is None:
            found["software"] = limits.software
        elif "software" not in found or (stage == 0 and adapters):
            found["software"] = limits.software_for(stage, adapters=adapters)
    if isinstance(request, FitRequest) and _alone(found, data):
        found["zero_stage"] = 0  # trainers take any stage for one rank, and shard nothing
    names = {one.name for one in fields(request)}
    given = _given(request)
    taken = {name: value for name, value in found.items() if name in names and name not in given}
    return replace(request, **taken), reading


def notes_of(
    request: FitRequest | PlanRequest, cluster: Cluster, reading: ConfigReading
) -> tuple[str, ...]:
    """Return what a user should know about a file that was read."""
    limits = capabilities(reading.target)
    notes = [f"{request.source}: read as a file of {limits.title} {limits.version}"]
    if reading.unknown:
        shown = ", ".join(_with_meant(reading.target, reading.unknown[:MOST_KEYS]))
        more = len(reading.unknown) - MOST_KEYS
        notes.append(
            f"{request.source}: keys that are not known, so not priced: {shown}"
            + (f" and {more} more" if more > 0 else "")
        )
    notes += [f"{request.source}: {note}" for note in reading.notes if not note.endswith(NAME_IT)]
    stage = reading.settings.get("zero_stage")
    alone = isinstance(request, FitRequest) and request.data_parallel == 1
    if stage and alone and getattr(request, "zero_stage", None) == 0:
        notes.append(f"{request.source}: ZeRO {stage} shards nothing over one data-parallel rank")
    if reading.processes not in (None, cluster.num_gpus):
        priced = f"{cluster.num_gpus} accelerators"
        notes.append(f"{request.source}: starts {reading.processes} processes; priced: {priced}")
    if reading.model is not None and _short(reading.model) != _short(str(request.model)):
        notes.append(f"{request.source}: names the model {reading.model}; priced: {request.model}")
    notes += _other_layers(request, reading)
    return tuple(map(on_one_line, notes))


def _other_layers(request: FitRequest | PlanRequest, reading: ConfigReading) -> Iterator[str]:
    """Yield a note where the file describes other layers than those of the model that is priced."""
    if reading.config is None:
        return
    try:
        described = model_spec({"vocab_size": 1, **reading.config}, name=reading.target)
        priced = model_of(request.model)
    except InputError:
        return
    theirs, ours = (
        spec.num_parameters - sum(w.numel for w in spec.outer) for spec in (described, priced)
    )
    if abs(theirs - ours) > NEARLY * ours:
        yield (
            f"{request.source}: its layers have {format_count(theirs)} parameters; "
            f"priced: {priced.name}, whose layers have {format_count(ours)}"
        )


def _short(model: str) -> str:
    """Return the name of a model without its organisation."""
    return model.rstrip("/").rpartition("/")[2].lower()


def _with_meant(target_name: str, unknown: Sequence[str]) -> Iterator[str]:
    """Yield unknown keys, those that look misspelt with the key that they resemble."""
    from planner.exchange.registry import target

    known = [key.path for key in target(target_name).keys]
    for key in unknown:
        close = get_close_matches(key, known, n=1, cutoff=ALIKE)
        yield f"{key} (is {close[0]} meant?)" if close else key


def notes_of_file(request: PlanRequest, cluster: ClusterLike) -> tuple[str, ...]:
    """Return what a user should know about the file of a search; nothing without a file."""
    found = cluster_of(cluster)
    taken, reading = with_config(request, found)
    return () if reading is None else notes_of(taken, found, reading)


def _alone(settings: Mapping[str, Any], data: int | None) -> bool:
    """Whether a file shards over a single data- and context-parallel rank, and offloads nothing."""
    if data != 1 or not settings.get("zero_stage"):
        return False
    plan = Plan(offload=settings.get("offload") or "none")
    return (settings.get("context_parallel") or 1) == 1 and not plan.offloads_optimizer


def _given(request: FitRequest | PlanRequest) -> dict[str, Any]:
    kind: type = type(request)
    return {
        name: getattr(request, name)
        for name in declared(kind)
        if getattr(request, name) is not None and name not in ("model", "cluster")
    }


def _data_parallel(settings: Mapping[str, Any], num_gpus: int) -> int | None:
    """Return the data-parallel ranks that other degrees leave; None where they do not divide."""
    ranks = 1
    for name in ("tensor_parallel", "pipeline_parallel", "context_parallel"):
        ranks *= settings.get(name) or 1
    return None if num_gpus % ranks else num_gpus // ranks
