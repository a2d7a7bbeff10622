"""Scenarios of one request: clusters, parts of them and precisions with one workload."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, get_args

from msgspec import Struct, structs

from cost_models.compute.training_run import (
    best_batch_tokens,
    compute_optimal_tokens,
    training_flops,
)
from cost_models.model.parameters import active_parameters
from cost_models.model.spec import ModelSpec
from cost_models.plan.workload import Precision
from cost_models.units import format_count
from hardware_profiles.cluster.schema import MAX_GPUS, Cluster
from hardware_profiles.errors import InputError
from hardware_profiles.options import read_count
from planner.request.clusters import parts_of
from planner.request.model import ModelLike
from planner.request.scenario import (
    MAX_BATCH,
    AssumedScenario,
    build_scenario,
    check_choice,
    check_count,
    default_seq_len,
)

MOST_MODELS: Final = 64
MOST_AUTOMATIC: Final = 8  # clusters up to which parts of them are tried by default
OF_LARGEST: Final = "default: one micro-batch for each accelerator of the largest cluster"
BEST_BATCH: Final = (
    "default for comparisons: about {tokens} tokens, the best batch for {flops:.2g} FLOP "
    "(arXiv:2401.02954), the same on every cluster"
)


def models_of(model: ModelLike, find: str | None) -> list[ModelLike]:
    """Return the named models: several, separated by commas, only for ``largest-model``."""
    if not isinstance(model, str) or "," not in model:
        return [model]
    names = [name.strip() for name in model.split(",")]
    if find != "largest-model":
        raise InputError(f"{model[:60]}: several models are only for --find largest-model")
    if not all(names) or len(names) > MOST_MODELS:
        raise InputError(f"{model[:60]}: must be 1 to {MOST_MODELS} models, separated by commas")
    return list(dict.fromkeys(names))


class DefaultBatch(NamedTuple):
    """A batch that all cases have by default, in sequences, and why."""

    size: int
    why: str


class WorkloadRequest(Struct, frozen=True):
    """Model and workload of every case: the arguments of ``build_scenario`` without the cluster."""

    model: ModelSpec
    options: Mapping[str, Any]
    batch: int | None  # if given
    run_tokens: float | None = None  # of the whole run, if given

    def scenario(
        self, cluster: Cluster, default: DefaultBatch | None = None, **changes: Any
    ) -> AssumedScenario:
        """Return the scenario of one case; ``default``: batch of all cases, if none is given."""
        size = self.batch or (None if default is None else default.size)
        options = {**self.options, **changes, "global_batch_size": size}
        assumed = build_scenario(options.pop("model", self.model), cluster, **options)
        if self.batch is None and default is not None:
            note = f"global_batch_size {default.size} ({default.why})"
            assumed = structs.replace(assumed, assumptions=(*assumed.assumptions, note))
        return assumed

    def common_batch(self, clusters: Sequence[Cluster]) -> DefaultBatch:
        """Return the default batch with which clusters are compared.

        One micro-batch for each accelerator would favour few fast accelerators: nothing amortises
        the communication of a step. It is the best batch for the FLOP of the run (without --tokens
        of a compute-optimal one), in whole sequences for every accelerator of every cluster where
        that is possible. Adapters are trained with batches of any size, so one micro-batch each.
        """
        sizes = [cluster.num_gpus for cluster in clusters]
        if self.options.get("adapter") is not None:
            return DefaultBatch(max(sizes), OF_LARGEST)
        parameters = active_parameters(self.model)
        run_tokens = self.run_tokens or float(compute_optimal_tokens(parameters))
        flops = float(training_flops(parameters, run_tokens))
        tokens = float(best_batch_tokens(flops))
        best = tokens / (self.options.get("seq_len") or default_seq_len(self.model))
        every = math.lcm(*sizes)
        unit = every if every <= best else max(sizes)
        size = unit << max(0, round(math.log2(best / unit)))
        why = BEST_BATCH.format(tokens=format_count(tokens), flops=flops)
        return DefaultBatch(size, why)


def read_precisions(text: str | None) -> list[str | None]:
    """Read ``bf16,fp8``; None: the default of the accelerator.

    >>> read_precisions("bf16, fp8")
    ['bf16', 'fp8']
    """
    if text is None:
        return [None]
    words = list(dict.fromkeys(word.strip() for word in text.split(",")))
    return [check_choice("precision", word, get_args(Precision)) for word in words]


def read_batches(given: int | str | None) -> list[int]:
    """Read a global batch, or a range: its first size, doubled as often as it has room, its last.

    >>> read_batches("512..3000"), read_batches(16), read_batches(None)
    ([512, 1024, 2048, 3000], [16], [])
    """
    if given is None:
        return []
    words = str(given).split("..")
    try:
        ends = [check_count("global_batch_size", read_count(word), MAX_BATCH) for word in words]
    except ValueError:
        ends = []
    if not 1 <= len(ends) <= 2 or ends[0] > ends[-1]:
        raise InputError(
            f"global_batch_size = {str(given)[:40]!r} (must be a whole number from 1 to "
            f"{MAX_BATCH:,}, or two of them, the smaller first: 512..2048)"
        )
    low, high = ends[0], ends[-1]
    return sorted({low << times for times in range((high // low).bit_length())} | {high})


def read_at_most(number: int | None) -> int | None:
    """Return a checked limit of accelerators."""
    return None if number is None else check_count("gpus_at_most", number, MAX_GPUS)


def sizes_of(clusters: Sequence[Cluster], at_most: int | None, *, fewer: bool) -> list[Cluster]:
    """Return the clusters to search: as given, or with smaller parts of them."""
    if at_most is None and not (fewer and len(clusters) <= MOST_AUTOMATIC):
        return list(clusters)
    parts = [part for cluster in clusters for part in parts_of(cluster, at_most)]
    if not parts:
        raise InputError(f"gpus_at_most = {at_most}: every cluster has more")
    return list(
        {
            (part.accelerator.name, part.num_nodes, part.gpus_per_node): part
            for part in reversed(parts)
        }.values()
    )[::-1]


def scenarios_of(
    job: WorkloadRequest,
    clusters: Sequence[Cluster],
    precisions: Sequence[str | None],
    *,
    batches: Sequence[int] = (),
    whole_run: bool = False,
) -> list[AssumedScenario]:
    """Return a scenario for each cluster and precision, with one batch for several clusters.

    ``batches``: those that are compared, if any are given; ``whole_run``: tokens or a limit of the
    whole run are given, so one cluster has the common batch, too.
    """
    if batches:
        return [
            structs.replace(job, batch=batch).scenario(cluster, precision=precision)
            for batch in batches
            for cluster in clusters
            for precision in precisions
        ]
    batch = job.common_batch(clusters) if len(clusters) > 1 or whole_run else None
    return [
        job.scenario(cluster, batch, precision=precision)
        for cluster in clusters
        for precision in precisions
    ]
