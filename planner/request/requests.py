"""Requests as given: what ``fit``, ``plan`` and others take, each option declared once.

The Python functions take these fields as arguments and the command line as options; None means
that an option was left out and takes its documented default. The fields of a plan are declared by
:class:`~cost_models.plan.plan.Plan`, groups of options in ``options``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from cost_models.plan.plan import TRAINING, Plan
from cost_models.plan.workload import Batch
from cost_models.serving.number_formats import KV_PRECISIONS, WEIGHT_PRECISIONS
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.fields import names_in
from hardware_profiles.options import Option, declared, optional
from planner.request.model import ModelLike
from planner.request.options import proposals
from planner.request.options.choices import ClusterLike
from planner.request.options.search import SEARCH, SearchOptions, SurveyOptions, WholeRunOptions
from planner.request.options.training import (
    BATCH_NAMES,
    AdapterOptions,
    CommonOptions,
    ConfigOptions,
    LayerOptions,
    MachineOptions,
    ModuleOptions,
    layers_in,
)

INFERENCE: Final = "serving"
_MICRO_BATCH: Final = declared(Plan)["micro_batch_size"].option
serving = partial(Option, group=INFERENCE)

if TYPE_CHECKING:

    @dataclass(frozen=True)
    class PlanOptions(Plan):
        """The fields of a plan, each of which may be left out, in their longer notations too."""

        recompute_layers: int | str | Sequence[int] = 0  # type: ignore[assignment]
else:
    PlanOptions = optional(Plan, "PlanOptions", "The fields of a plan; None: left out.")


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Subject:
    """The model and the cluster."""

    CHECKS_ITSELF: ClassVar = True  # values are checked by the functions, not by the command line

    model: Annotated[
        ModelLike,
        Option(
            "MODEL",
            as_text=True,
            complete=proposals.models,
            help="preset, config.json, folder, hub id, size such as 7b, or "
            "module:package.path:factory",
            elsewhere=("model", "model_name", "model_name_or_path"),
        ),
    ]
    cluster: Annotated[
        ClusterLike,
        Option(
            "CLUSTER",
            as_text=True,
            complete=proposals.clusters,
            help="8xA100-80GB, 16x8xH100-SXM, FILE.toml, here:8",
            elsewhere=names_in("""
                accelerator cluster devices gpu gpus hardware nnodes nodes nproc_per_node num_gpus
                num_nodes
            """),
            replaceable=True,
        ),
    ]


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ServingOptions:
    """Options of inference alone."""

    concurrency: Annotated[
        int | None,
        serving(
            help="sequences at once",
            elsewhere=("max_num_seqs", "num_requests"),
            default="one sequence for each replica",
            why="the answer gives the largest number",
        ),
    ] = None
    context_len: Annotated[
        int | None,
        serving(
            help="tokens of a sequence, prompt and answer",
            elsewhere=("max_model_len",),
            default="`--seq-len`, else the model's longest; 4096 where it has none",
            why="as vLLM's `--max-model-len`",
        ),
    ] = None
    prompt_len: Annotated[
        int | None,
        serving(
            help="tokens of a prompt (default: half of the context)",
            default="half of the context; all of it for an encoder",
            why="the rest of the context is the answer; times alone depend on it",
        ),
    ] = None
    prefill_chunk: Annotated[
        int | None,
        serving(
            help="tokens of prompts computed in one step",
            default="8192 tokens of all prompts in one step",
            why="as vLLM's `--max-num-batched-tokens` on large GPUs; the context length: one whole "
            "prompt",
        ),
    ] = None
    kv_precision: Annotated[
        str | None,
        serving(
            metavar="NAME",
            values=KV_PRECISIONS,
            help="precision of the cache: {values}",
            default="as `--precision`",
            why="vLLM's `--kv-cache-dtype auto`",
        ),
    ] = None
    weight_precision: Annotated[
        str | None,
        serving(
            metavar="NAME",
            values=WEIGHT_PRECISIONS,
            help="format of the weights: {values}",
            default="the format in which the weights are published (`quantization_config`: fp8, "
            "mxfp4, gptq, awq), else `--precision`",
            why="what an engine loads",
        ),
    ] = None
    cuda_graphs: Annotated[
        bool | None,
        serving(
            "--cuda-graphs/--no-cuda-graphs",
            help="steps started as one graph, or eagerly",
            default="on",
            why="as vLLM; `--no-cuda-graphs` is its `--enforce-eager`",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class FitRequest(
    ConfigOptions,
    ServingOptions,
    WholeRunOptions,
    ModuleOptions,
    AdapterOptions,
    PlanOptions,
    LayerOptions,
    CommonOptions,
    MachineOptions,
    Subject,
):
    """Whether a plan of a model fits a cluster."""

    inference: Annotated[
        bool, serving("--inference", common=True, help="serve it, instead of training")
    ] = False


@dataclass(frozen=True, repr=False, eq=False)
class PlanRequest(
    SurveyOptions,
    WholeRunOptions,
    SearchOptions,
    ConfigOptions,
    ModuleOptions,
    AdapterOptions,
    LayerOptions,
    CommonOptions,
    MachineOptions,
    Subject,
):
    """The best plan of a model on one cluster or several."""

    cluster: Annotated[  # type: ignore[assignment]
        str | Path | Cluster | Sequence[str | Path | Cluster],
        Option(
            "CLUSTER[,…]",
            as_text=True,
            complete=proposals.clusters,
            help="8xA100-80GB, 16x8xH100-SXM, FILE.toml, here:8; several with commas, "
            "1..4x8xH100-SXM",
        ),
    ]
    layers: Annotated[str | Sequence[int] | None, layers_in(SEARCH)] = field(
        default=None, kw_only=True
    )
    global_batch_size: Annotated[
        Batch | str | None,
        Option(
            metavar="N[..N]",
            as_text=True,
            common=True,
            help="sequences of one optimizer step; 512..2048: the most tokens/s of 512, 1024 and "
            "2048",
            elsewhere=BATCH_NAMES,
            group=TRAINING,
        ),
    ] = field(default=None, kw_only=True)  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class StatedRun(
    ConfigOptions, AdapterOptions, PlanOptions, LayerOptions, CommonOptions, MachineOptions
):
    """A run as it was started, of a model on a cluster."""

    CHECKS_ITSELF: ClassVar = True

    model: Annotated[
        str | None,
        Option("--model", metavar="MODEL", common=True, help="price fixes: the model of the run"),
    ] = None
    cluster: Annotated[
        str | None, Option("--cluster", metavar="CLUSTER", common=True, help="and its cluster")
    ] = None


@dataclass(frozen=True, repr=False, eq=False)
class TechniquesRequest(AdapterOptions, LayerOptions, CommonOptions, MachineOptions, Subject):
    """Techniques of training compared for one model on one cluster."""

    micro_batch_size: Annotated[int | None, _MICRO_BATCH] = field(default=None, kw_only=True)


def values_of(request: object, group: type) -> dict[str, Any]:
    """Return the values of a request that a group of options declares, by name."""
    return {name: getattr(request, name) for name in declared(group)}


def plan_fields(request: FitRequest) -> dict[str, Any]:
    """Return the fields of a plan that a request gives."""
    return {name: value for name, value in values_of(request, Plan).items() if value is not None}
