"""Checks of plan, data and machine before a process starts; only the last one needs torch."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cost_models.legality.executor_proofs import unproven
from cost_models.plan_file import PlanFile, read_plan_file
from cost_models.pricing.prediction import predict, scenario_of, still_holds
from cost_models.units import format_bytes
from executor.data import Corpus, DataOptions, open_corpus
from executor.machine.measure import free_memory_bytes
from executor.support import MASKED_FAMILIES, OWN_PROFILE, SPAN_FAMILIES, check_supported
from hardware_profiles.cluster.measurement import MAX_PROCESSES
from hardware_profiles.errors import InputError


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A plan and its data, read and checked."""

    path: Path
    sha256: str
    file: PlanFile
    corpus: Corpus
    evaluation: Corpus | None = None
    notes: tuple[str, ...] = ()  # for the reader of the results

    def identity(self) -> dict[str, Any]:
        """Return the identity of the plan for run.json."""
        return {
            "path": str(self.path),
            "sha256": self.sha256,
            "model": self.file.model.name,
            "cluster": self.file.cluster.name,
            "plan": self.file.plan.to_dict(),
            "workload": self.file.workload.to_dict(),
            "contents": self.file.to_dict(),
        }


def prepare(
    path: Path, data: DataOptions, *, seed: int, evaluation: DataOptions | None = None
) -> PreparedRun:
    """Read and check a plan and its data."""
    file = read_plan_file(path)
    workload = replace(file.workload, document_mask=data.packing == "documents")
    try:
        check_supported(replace(file, workload=workload))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if (unknown := unproven(file.model, workload, file.plan)) is not None:
        raise InputError(f"{path}: the executor is not proven to run this plan: {unknown}")
    file, notes = with_current_prediction(file, documents=data.packing == "documents")
    sizes: dict[str, Any] = {
        "vocab_size": file.model.vocab_size,
        "seq_len": file.workload.seq_len,
        "seed": seed,
        "masked": file.model.family in MASKED_FAMILIES,
        "spans": file.model.family in SPAN_FAMILIES,
        "target_seq_len": file.workload.target_seq_len,
    }
    corpus = open_corpus(data, **sizes)
    held_out = None if evaluation is None else open_corpus(evaluation, **sizes)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    notes += (
        *_untrained_loss(file),
        *corpus.notes,
        *(held_out.notes if held_out is not None else ()),
    )
    return PreparedRun(path, sha256, file, corpus, held_out, notes)


def _untrained_loss(file: PlanFile) -> tuple[str, ...]:
    """Return a note if the config has a router loss weight, which is not trained."""
    weight = file.model.config.get("router_aux_loss_coef")
    if not weight or all(kind.feed_forward.num_experts == 0 for kind in file.model.kinds):
        return ()
    return (
        f"the routers' auxiliary loss (router_aux_loss_coef = {weight:g}) is not trained: "
        "output_router_logits is false, Hugging Face's default",
    )


def with_current_prediction(
    file: PlanFile, *, documents: bool = False
) -> tuple[PlanFile, tuple[str, ...]]:
    """Return the plan with the prediction for this trainer, and a note where the file's differs.

    An edited plan.json still carries its old prediction.
    """
    workload = replace(file.workload, document_mask=documents)
    own = replace(file, software=OWN_PROFILE, workload=workload)
    fresh = predict(scenario_of(own), own.plan, own.layer_ranges)
    if workload != file.workload:
        why = (
            f"has {'no ' * documents}document masks, this run has {'some' if documents else 'none'}"
        )
    elif still_holds(file, fresh):
        return file, ()
    elif file.software != OWN_PROFILE:
        why = f"was priced for {file.software}, and this trainer is {OWN_PROFILE}"
    elif file.prediction:
        why = "is not for this plan (edited, or written by another version)"
    else:
        why = "is missing"
    note = f"the file's prediction {why}: a new one was computed"
    return replace(own, prediction=fresh.to_dict()), (note,)


@dataclass(frozen=True, slots=True)
class TorchrunRank:
    """The position that torchrun assigned to this process."""

    rank: int
    world_size: int
    local_world_size: int
    local_rank: int

    @classmethod
    def from_environment(cls) -> TorchrunRank | None:
        """Return the position from the environment; None outside torchrun."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return None
        values = []
        defaults = {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"], "LOCAL_RANK": os.environ["RANK"]}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK"):
            text = os.environ.get(name) or defaults.get(name, "")
            if not text.isdecimal():
                raise InputError(f"environment: {name} = {text!r} (must be a whole number)")
            values.append(int(text))
        return cls(*values)


def check_world(file: PlanFile, place: TorchrunRank) -> None:
    """Check that torchrun started the number of ranks that the plan needs, on all nodes."""
    needed, started = file.plan.world_size, place.world_size
    if needed != started:
        raise InputError(f"the plan needs {needed} ranks, but {started} were started")
    gpus = count_gpus()
    if 0 < gpus < place.local_world_size:
        raise InputError(
            f"{place.local_world_size} ranks were started on this machine, which has {gpus} GPUs"
        )


def check_machine(file: PlanFile, nodes: int = 1) -> int:
    """Check that this machine, one of several, can run its part of a plan; return its GPUs.

    0 GPUs: it runs on the CPU.
    """
    needed, gpus = file.plan.world_size, count_gpus()
    if needed % nodes:
        raise InputError(f"--nodes = {nodes} does not divide the {needed} ranks of the plan")
    needed //= nodes
    if gpus >= needed:
        return gpus
    if gpus > 0:
        raise InputError(
            f"the plan needs {needed} GPUs, this machine has {gpus}; start it on all machines with "
            "--nodes N --node-rank R --rendezvous HOST:PORT"
            if nodes == 1
            else f"{needed} GPUs are needed, this machine has {gpus}"
        )
    if needed > MAX_PROCESSES:
        raise InputError(
            f"the plan needs {needed} ranks (at most {MAX_PROCESSES} processes on one machine "
            "without GPUs)"
        )
    wanted, free = total_bytes(file) / nodes, free_memory_bytes()
    if wanted > free:
        raise InputError(
            f"the plan's {needed} ranks need about {format_bytes(wanted)} of memory together, "
            f"{format_bytes(free)} are free on this machine; run it on the plan's cluster "
            f"(shardplan launch), or plan a smaller model for this machine, here:{needed}"
        )
    return 0


def count_gpus() -> int:
    """Return the number of GPUs that torch sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu_names() -> list[str]:
    """Return the names and memory of the GPUs that torch sees."""
    import torch

    found = [torch.cuda.get_device_properties(index) for index in range(count_gpus())]
    return [f"{gpu.name} ({format_bytes(gpu.total_memory)})" for gpu in found]


def total_bytes(file: PlanFile) -> float:
    """Return the predicted tensor bytes of all ranks."""
    stages = file.prediction["memory"]["stages"]
    ranks = file.plan.world_size // file.plan.pipeline_parallel
    return ranks * sum(float(stage["allocated_bytes"]) for stage in stages)


def notes(file: PlanFile, gpus: int) -> list[str]:
    """Return notes for the reader of the results."""
    if gpus == 0 and file.cluster.accelerator.device != "cpu":
        return [
            f"no GPU on this machine: the plan for {file.cluster.name} runs on "
            f"{file.plan.world_size} CPU processes, whose times do not apply to that cluster"
        ]
    return []
