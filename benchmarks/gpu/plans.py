"""Plans of one GPU that the executor trains: measured and predicted time and memory."""

from __future__ import annotations

import os
import socket
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.child import ChildError, in_child
from cost_models.memory.allocator import shown_bytes
from cost_models.memory.outside_torch import outside_bytes
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan_file import PlanFile
from cost_models.pricing.estimate import price, reserved_free_bytes, throughput
from cost_models.scenario import Scenario
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import ShardplanError
from planner.assessment.assess import plan_file
from planner.assessment.verdict import budget_bytes
from planner.request.model import resolve_model
from planner.request.scenario import Adapting, build_scenario

TINY: Final = str(Path(__file__).parents[2] / "examples" / "tiny-llama" / "config.json")
WARM_UP: Final = 3
TIMED: Final = 6  # steps at most,
ENOUGH_SECONDS: Final = 3.0  # and at least 3 where they take as long together
KINDS: Final = ("allocated", "reserved", "device")


@dataclass(frozen=True)
class Trained:
    """One plan; ``workload`` and ``plan`` are the fields that differ from the default."""

    model: str
    seq_len: int
    micro_batch: int = 1
    workload: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    compiled: bool = False

    @property
    def words(self) -> str:
        """The plan in short."""
        name = Path(self.model).parent.name if self.model == TINY else self.model
        parts = [f"{name} {self.seq_len}x{self.micro_batch}"]
        for name, value in {**self.workload, **self.plan}.items():
            if isinstance(value, Adapting):
                parts.append(f"{value.kind} {value.rank}")
            else:
                parts.append(f"{name.replace('_', ' ')} {value}")
        return ", ".join(parts + ["compiled"] * self.compiled)


def plans() -> Iterator[Trained]:
    """Yield families, batches, recomputation, adapters, optimizers, precisions, compiled or not."""
    full, selective = {"recompute": "full"}, {"recompute": "selective"}
    lora, qlora = Adapting("lora", 16), Adapting("qlora", 16)
    yield Trained("gpt2", 1024, 8)
    yield Trained("gpt2", 1024, 32)
    yield Trained("gpt2", 1024, 8, compiled=True)
    yield Trained("gpt2", 1024, 8, {"precision": "fp32"})
    yield Trained("gpt2", 1024, 8, {"attention_kernel": "eager"})
    yield Trained("gpt2-medium", 1024, 8)
    yield Trained("gpt2-xl", 1024, 4)
    yield Trained("gpt2-xl", 1024, 8, plan=full)
    yield Trained("gpt2-xl", 1024, 4, {"precision": "fp16"})
    yield Trained("llama-3.2-1b", 2048, 1)
    yield Trained("llama-3.2-1b", 2048, 4)
    yield Trained("llama-3.2-1b", 2048, 4, compiled=True)
    yield Trained("llama-3.2-1b", 8192, 1)
    yield Trained("llama-3.2-1b", 8192, 1, plan=selective)
    yield Trained("llama-3.2-1b", 2048, 8, plan=full)
    yield Trained("llama-3.2-1b", 2048, 4, {"optimizer": "lion"})
    yield Trained("llama-3.2-1b", 2048, 4, {"optimizer": "sgd"})
    yield Trained("llama-3.2-1b", 2048, 4, {"optimizer": "sgd_momentum"})
    yield Trained("llama-3.2-1b", 2048, 2, plan={"num_microbatches": 4})
    yield Trained("llama-3.2-1b", 2048, 4, {"precision": "fp8"})
    yield Trained("llama-3.2-1b", 2048, 4, plan={"offload": "activations"})
    yield Trained("llama-3.2-1b", 2048, 4, plan={"offload": "optimizer"})
    yield Trained("llama-3.2-3b", 2048, 1)
    yield Trained("llama-3.2-3b", 4096, 2, plan=full)
    yield Trained("llama-3-8b", 2048, 2, {"adapter": lora})
    yield Trained("llama-3-8b", 4096, 2, {"adapter": lora}, full)
    yield Trained("llama-3-8b", 2048, 2, {"adapter": qlora})
    yield Trained("llama-3-8b", 4096, 2, {"adapter": qlora}, full)
    yield Trained("mistral-7b", 4096, 1, {"adapter": lora})
    yield Trained("qwen2.5-0.5b", 2048, 4)
    yield Trained("qwen2.5-1.5b", 2048, 2)
    yield Trained("qwen3-0.6b", 4096, 4)
    yield Trained("qwen3-1.7b", 2048, 2, compiled=True)
    yield Trained("gemma-3-1b", 4096, 2)
    yield Trained("pythia-1b", 2048, 4)
    yield Trained("opt-1.3b", 2048, 2)
    yield Trained("granite-3.0-2b", 2048, 1)
    yield Trained("phi-1.5", 2048, 2)
    yield Trained("smollm2-135m", 2048, 8)
    yield Trained("bert-large", 512, 16)
    yield Trained("t5-base", 512, 16)
    yield Trained("olmoe-1b-7b", 2048, 1, {"adapter": Adapting("lora", 16, targets="attention")})


def tiny_plans() -> Iterator[Trained]:
    """Yield plans for a CPU."""
    yield Trained(TINY, 64, 2)
    yield Trained(TINY, 64, 2, {"adapter": Adapting("lora", 4)}, {"recompute": "full"})
    yield Trained("gpt-7", 64)  # no such model: a row that cannot be measured says why


def file_of(trained: Trained, cluster: Cluster) -> tuple[Scenario, PlanFile]:
    """Return the scenario and the contents of plan.json."""
    plan = Plan(micro_batch_size=trained.micro_batch, **trained.plan)
    options = dict(trained.workload)
    if cluster.accelerator.device == "cpu":
        options.setdefault("precision", "fp32")
    scenario = build_scenario(
        resolve_model(trained.model),
        cluster,
        seq_len=trained.seq_len,
        global_batch_size=plan.global_batch_size,
        software="shardplan+compiled-layers" if trained.compiled else None,
        **options,
    ).scenario
    return scenario, plan_file(scenario, plan, "benchmarks.gpu")


def row_of(trained: Trained, cluster: Cluster, timeout: float) -> dict[str, Any]:
    """Return prediction and measurement of one plan; ``failed`` says why one is missing."""
    row: dict[str, Any] = {"plan": trained.words}
    try:
        scenario, file = file_of(trained, cluster)
        row |= predicted(scenario, file)
        device = "cpu" if cluster.accelerator.device == "cpu" else "cuda"
        row |= in_child(measured, file, trained.compiled, device, timeout=timeout)
    except (ShardplanError, ChildError) as error:
        return {**row, "failed": str(error)}
    row["mfu"] = throughput(scenario, file.plan, row["seconds"])[1]
    return row


def predicted(scenario: Scenario, file: PlanFile) -> dict[str, Any]:
    """Return the predicted step and the three kinds of peaks."""
    table = PlanTable.from_plans([file.plan])
    priced = price(scenario, table)
    software, cluster = scenario.software, scenario.cluster
    outside = outside_bytes(software, cluster, table)
    sizes = outside, software, table, budget_bytes(cluster)
    free = reserved_free_bytes(scenario, file.plan, 0)
    shown = {kind: shown_bytes(kind, priced.memory, *sizes, free=free) for kind in KINDS}
    peaks = {f"predicted_{kind}": float(size[0]) for kind, size in shown.items()}
    return {"predicted_seconds": float(priced.step[0]), **peaks}


def measured(file: PlanFile, compiled: bool, device: str) -> dict[str, Any]:
    """Train some steps; return the median seconds and the peaks in bytes."""
    import torch

    from executor.data import MarkovCorpus
    from executor.training.compiled import check_compilable, compile_layers
    from executor.training.trainer import Trainer

    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {**one, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    if compiled:
        check_compilable(file.plan, file.model.family, file.workload.adapter)
    place = torch.device(device, 0 if device == "cuda" else None)
    trainer = Trainer(file, device=place, start=partial(_drawn, place))
    if compiled and (failure := compile_layers(trainer.stages, trainer.device)) is not None:
        raise ChildError(failure)
    corpus = MarkovCorpus(file.model.vocab_size, file.workload.seq_len, seed=0)
    step = partial(_step, trainer, corpus, file.plan.global_batch_size)
    if device == "cuda":
        torch.cuda.empty_cache()  # of the initial values
    for number in range(WARM_UP):
        step(number)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    while len(seconds) < 3 or (len(seconds) < TIMED and sum(seconds) < ENOUGH_SECONDS):
        seconds.append(step(WARM_UP + len(seconds)))
    return {"seconds": statistics.median(seconds), **peaks(device)}


def _drawn(device: Any, layout: Any, pieces: Any) -> Any:
    """Return initial values that the device draws: a CPU takes a minute for an 8B model."""
    import torch

    values = torch.empty([sum(b - a for a, b in ranges) for ranges in pieces], device=device)
    return values.fill_(layout.constant) if layout.std is None else values.normal_(0.0, layout.std)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _step(trainer: Any, corpus: Any, batch: int, number: int) -> float:
    return sum(trainer.step(corpus.batch(number, batch)).seconds.values())


def peaks(device: str) -> dict[str, float]:
    """Return this process's peaks in bytes: live, reserved, and all that the device has in use."""
    import torch

    if device == "cpu":
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": float(torch.cuda.max_memory_allocated()),
        "reserved": float(torch.cuda.max_memory_reserved()),
        "device": float(total - free),  # as nvidia-smi: reserved blocks are never returned
    }
