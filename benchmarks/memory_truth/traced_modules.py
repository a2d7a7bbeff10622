"""Traced modules against real training steps: ``python -m benchmarks.memory_truth.traced_modules``.

Small modules of several kinds (a ResNet and a ViT of transformers, an LSTM, MLPs) are priced from
their trace on fake tensors and then trained on this machine's CPU (gloo) by
``executor.trace.module_trainer.ModuleTrainer``; the peak of live tensors on every rank is compared.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cost_models.plan.plan import Plan


class Block(nn.Module):
    """Two linear layers and a sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the new hidden state."""
        return x + self.down(nn.functional.gelu(self.up(x)))


class Mlp(nn.Module):
    """Blocks of equal linear layers between an embedding and a head: mostly states."""

    def __init__(self, width: int = 256, layers: int = 6, vocabulary: int = 500) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss."""
        h = self.embedding(x)
        for layer in self.layers:
            h = layer(h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Lstm(nn.Module):
    """A recurrent net without blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 48)
        self.rnn = nn.LSTM(48, 96, 2, batch_first=True)
        self.head = nn.Linear(96, 300)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss."""
        h, _ = self.rnn(self.embedding(x))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def mlp() -> nn.Module:
    """Return an MLP whose states are most of its memory."""
    return Mlp()


def lstm() -> nn.Module:
    """Return an LSTM."""
    return Lstm()


def resnet() -> nn.Module:
    """Return a small ResNet: four stages of bottlenecks, batch norms."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 3, 2], num_labels=100
    )
    return ResNetForImageClassification(config)


def vit() -> nn.Module:
    """Return a small vision transformer."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=512,
        image_size=64,
        patch_size=8,
        num_labels=100,
    )
    return ViTForImageClassification(config)


_TOKENS = ["x=int64[B,16]", "y=int64[B,16]"]
INPUTS = {
    "mlp": _TOKENS,
    "lstm": _TOKENS,
    "resnet": ["pixel_values=float32[B,3,64,64]", "labels=int64[B]"],
    "vit": ["pixel_values=float32[B,3,64,64]", "labels=int64[B]"],
}


def plans() -> Iterator[Plan]:
    """The plans of one and two ranks that are compared."""
    for recompute, count in itertools.product(("none", "full"), (1, 3)):
        yield Plan(micro_batch_size=4, num_microbatches=count, recompute=recompute)  # type: ignore[arg-type]
    for zero, count in itertools.product(range(4), (1, 3)):
        yield Plan(2, zero_stage=zero, micro_batch_size=4, num_microbatches=count)
    yield Plan(2, zero_stage=3, micro_batch_size=4, recompute="full")


def traced(name: str, precision: str) -> dict[str, Any]:
    """Trace one of the modules here, as the planner has it traced."""
    from executor.trace.trace import trace

    return trace(f"module:{__name__}:{name}", precision=precision, input_shapes=INPUTS[name])  # type: ignore[arg-type]


def trained(rank: int, name: str, plan: Plan, precision: str, steps: int = 3) -> dict[str, Any]:
    """Train a few steps on one rank; return what the tracker saw in the last one."""
    from executor.counters.live_tensors import MemoryTracker
    from executor.trace.module_inputs import parse_input_shape
    from executor.trace.module_trainer import ModuleTrainer

    trainer = ModuleTrainer(globals()[name], plan, precision=precision)  # type: ignore[arg-type]
    rows = plan.global_batch_size
    batch = {shape.name: shape.tensor(rows) for shape in map(parse_input_shape, INPUTS[name])}
    torch.backends.mkldnn.enabled = name != "lstm"  # its fused kernel's workspace is not traced
    for _ in range(steps - 1):
        trainer.step(batch)
    parameters = [*trainer.module.parameters(), *trainer.module.buffers()]
    with MemoryTracker(parameters, [trainer.optimizer]) as tracker:
        trainer.step(batch)
    found = tracker.result().to_dict()
    # on a CPU the whole batch is there, not a micro-batch of it
    held = sum(t.nbytes for t in batch.values()) * (1 - plan.micro_batch_size / rows)
    return {**found, "peak_bytes": found["peak_bytes"] - held}


def predicted(document: dict[str, Any], plan: Plan) -> tuple[float, dict[str, float], str]:
    """Peak, parts and moment of one plan by the formulas."""
    from msgspec.structs import asdict

    from cost_models.plan.plan import PlanTable
    from cost_models.plan.workload import Workload
    from cost_models.traced.memory import traced_memory
    from cost_models.traced.module import traced_module
    from hardware_profiles.software.trainer import software_profile

    module = traced_module(document)
    table = PlanTable.from_plans([plan])
    workload = Workload(1, plan.global_batch_size, precision=module.precision)  # type: ignore[arg-type]
    parts, moment = traced_memory(module, workload, software_profile("shardplan"), table)
    values = {name: float(value[0]) for name, value in asdict(parts).items()}
    place = int(moment[0])
    segments = module.passes[plan.recompute].segments
    where = "optimizer" if place < 0 else f"{segments[place].phase} {segments[place].block}"
    return sum(values.values()), values, where


def rows_of(names: list[str], precisions: list[str]) -> Iterator[dict[str, Any]]:
    """One row a module, precision and plan: the fullest rank and the formula."""
    import executor.trace.module_trainer  # noqa: F401  imported once here, forked with every rank
    from executor.processes.fork import run_forked

    for name, precision in itertools.product(names, precisions):
        document = traced(name, precision)
        for plan in plans():
            if plan.recompute not in document["passes"]:
                continue
            ranks = run_forked(trained, plan.world_size, name, plan, precision, timeout=300.0)
            fullest = max(ranks, key=lambda memory: memory["peak_bytes"])
            peak, parts, where = predicted(document, plan)
            yield {
                "module": name,
                "precision": precision,
                "plan": f"dp{plan.data_parallel} z{plan.zero_stage} {plan.recompute} "
                f"m{plan.num_microbatches}",
                "predicted": peak,
                "traced": fullest["peak_bytes"],
                "error_percent": 100.0 * (peak / fullest["peak_bytes"] - 1.0),
                "moment": where,
                "phase": fullest["phase"],
                "parts": parts,
                "traced_parts": fullest["parts"],
            }


def main() -> None:
    import argparse

    import pandas as pd

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", action="store_true", help="show the parts too")
    parser.add_argument("--modules", default=",".join(INPUTS))
    parser.add_argument("--precisions", default="fp32,bf16")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = []
    for row in rows_of(arguments.modules.split(","), arguments.precisions.split(",")):
        print(
            f"{row['module']:<7} {row['precision']} {row['plan']:<15} "
            f"{row['predicted'] / 2**20:7.2f} {row['traced'] / 2**20:7.2f} MiB "
            f"{row['error_percent']:+6.1f} %  {row['moment']} / {row['phase']}",
            flush=True,
        )
        if arguments.parts:
            for side in ("parts", "traced_parts"):
                print(
                    f"    {side}: { {k: round(v / 2**20, 2) for k, v in row[side].items() if v} }"
                )
        found.append(row)
    error = pd.DataFrame(found).error_percent
    print(
        f"{len(found)} cases: median absolute error {error.abs().median():.2f} %, 90th percentile "
        f"{error.abs().quantile(0.9):.1f} %, largest {error.abs().max():.1f} %, bias "
        f"{error.mean():+.2f} %"
    )


if __name__ == "__main__":
    main()
