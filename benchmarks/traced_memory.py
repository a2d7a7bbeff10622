"""Predicted memory beside traced memory: ``python -m benchmarks.traced_memory [--quick]``.

Trains small real models with the executor on this machine's CPU (gloo) under many plans, watches
one step with a storage tracker, and compares the peak of live tensors on every rank with the
formula for its pipeline stage. No constant was fitted on these cases.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator
from typing import Any

import pandas as pd

from cost_models.estimate import Setting
from cost_models.families import model_spec
from cost_models.plan import Plan
from cost_models.plan_file import PlanFile
from cost_models.workload import Workload
from hardware_profiles.software import software_profile
from hardware_profiles.spec import parse_cluster
from planner.document import plan_file

WIDE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **WIDE},
    "qwen3": {"model_type": "qwen3", **WIDE, "head_dim": 32, "tie_word_embeddings": True},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 256,
        "n_layer": 8,
        "n_head": 8,
        "n_positions": 1024,
        "vocab_size": 4096,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}


def plans() -> Iterator[Plan]:
    """The plans of up to four ranks that are traced."""
    for recompute in ("none", "selective", "full"):
        yield Plan(recompute=recompute, micro_batch_size=4, num_microbatches=1)  # type: ignore[arg-type]
        yield Plan(recompute=recompute, micro_batch_size=2, num_microbatches=2)  # type: ignore[arg-type]
    for zero, count in itertools.product(range(4), (1, 4)):
        yield Plan(data_parallel=2, zero_stage=zero, num_microbatches=count, micro_batch_size=2)
    for sequence in (False, True):
        yield Plan(tensor_parallel=2, sequence_parallel=sequence, micro_batch_size=4)
        yield Plan(
            data_parallel=2,
            tensor_parallel=2,
            zero_stage=3,
            sequence_parallel=sequence,
            micro_batch_size=2,
            num_microbatches=2,
        )
    pipeline = {"pipeline_parallel": 4, "num_microbatches": 8, "micro_batch_size": 1}
    yield Plan(**pipeline, pipeline_schedule="gpipe")  # type: ignore[arg-type]
    yield Plan(**pipeline, pipeline_schedule="1f1b")  # type: ignore[arg-type]
    yield Plan(**pipeline, pipeline_schedule="interleaved_1f1b", virtual_stages=2)  # type: ignore[arg-type]
    yield Plan(**pipeline, pipeline_schedule="interleaved_zero_bubble", virtual_stages=2)  # type: ignore[arg-type]
    for recompute in ("none", "full"):
        yield Plan(**pipeline, pipeline_schedule="zero_bubble", recompute=recompute)  # type: ignore[arg-type]
        for schedule in ("zbv", "dualpipev"):
            yield Plan(
                **pipeline,
                pipeline_schedule=schedule,
                virtual_stages=2,
                recompute=recompute,  # type: ignore[arg-type]
            )
    yield Plan(
        data_parallel=2,
        pipeline_parallel=2,
        pipeline_schedule="zero_bubble",
        zero_stage=2,
        micro_batch_size=2,
        num_microbatches=4,
    )
    yield Plan(
        data_parallel=2,
        pipeline_parallel=2,
        zero_stage=1,
        recompute="full",
        micro_batch_size=2,
        num_microbatches=4,
    )


def case(
    family: str, precision: str, plan: Plan, seq_len: int = 256, *, documents: bool = False
) -> PlanFile:
    """A plan file for one traced case; the cluster's figures do not matter for live tensors."""
    setting = Setting(
        model=model_spec(CONFIGS[family], name=family),
        cluster=parse_cluster("8xA100-SXM-80GB"),
        workload=Workload(
            seq_len,
            plan.global_batch_size,
            precision=precision,  # type: ignore[arg-type]
            document_mask=documents,
        ),
        software=software_profile("shardplan"),
    )
    return plan_file(setting, plan, "benchmarks.traced_memory")


def traced(rank: int, file: PlanFile, steps: int = 3) -> dict[str, Any]:
    """Train a few steps on one rank and return what the tracker saw in the last one."""
    from executor.step_measurement import measured_step
    from executor.train import Trainer
    from executor.verify import random_batch

    trainer = Trainer(file, seed=0)
    watched: dict[str, Any] = {}
    for step in range(steps):
        batch = random_batch(file, step, documents=file.workload.document_mask)
        if step == steps - 1:
            _, watched = measured_step(trainer, batch)
        else:
            trainer.step(batch)
    return watched


def compare(file: PlanFile) -> Iterator[dict[str, Any]]:
    """One row a pipeline stage: its fullest rank against the formula."""
    import executor.train  # noqa: F401  imported once here, forked with every rank
    from executor.forked import run_forked

    ranks = run_forked(traced, file.plan.world_size, file, timeout=300.0)
    for stage in file.prediction["memory"]["stages"]:
        mine = [rank["memory"] for rank in ranks if rank["stage"] == stage["stage"]]
        fullest = max(mine, key=lambda memory: memory["peak_bytes"])
        yield {
            "stage": stage["stage"],
            "predicted": stage["allocated_bytes"],
            "traced": fullest["peak_bytes"],
            "error_percent": 100.0 * (stage["allocated_bytes"] / fullest["peak_bytes"] - 1.0),
            "moment": stage["moment"],
            "phase": fullest["phase"],
            "parts": stage["parts"],
            "traced_parts": fullest["parts"],
        }


def words(plan: Plan) -> str:
    """A plan in short."""
    return (
        f"dp{plan.data_parallel} tp{plan.tensor_parallel}{'+sp' if plan.sequence_parallel else ''} "
        f"pp{plan.pipeline_parallel}x{plan.virtual_stages} {plan.pipeline_schedule} "
        f"z{plan.zero_stage} {plan.recompute} b{plan.micro_batch_size} m{plan.num_microbatches}"
    )


def rows_of(families: list[str], precisions: list[str], every: int) -> Iterator[dict[str, Any]]:
    """The rows of all cases, or of every n-th case."""
    cases = list(itertools.product(families, precisions, plans()))[::every]
    for family, precision, plan in cases:
        for row in compare(case(family, precision, plan)):
            yield {"family": family, "precision": precision, "plan": words(plan), **row}


def show(row: dict[str, Any], *, parts: bool) -> None:
    """Print one row."""
    print(
        f"{row['family']:<6} {row['precision']} {row['plan']:<52} stage {row['stage']} "
        f"{row['predicted'] / 2**20:8.1f} {row['traced'] / 2**20:8.1f} MiB "
        f"{row['error_percent']:+6.1f} %  {row['moment']}/{row['phase']}",
        flush=True,
    )
    if parts:
        for side in ("parts", "traced_parts"):
            shown = {k: round(v / 2**20, 1) for k, v in row[side].items() if v}
            print(f"       {side}: {shown}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="every seventh case only")
    parser.add_argument("--parts", action="store_true", help="show the parts too")
    parser.add_argument("--families", default=",".join(CONFIGS))
    parser.add_argument("--precisions", default="bf16,fp32")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = []
    families, precisions = arguments.families.split(","), arguments.precisions.split(",")
    for row in rows_of(families, precisions, 7 if arguments.quick else 1):
        show(row, parts=arguments.parts)
        found.append(row)
    rows = pd.DataFrame(found)
    error = rows.error_percent.abs()
    print(
        f"{len(rows)} stages of {rows.plan.nunique()} plans: median absolute error "
        f"{error.median():.1f} %, 90th percentile {error.quantile(0.9):.1f} %, largest "
        f"{error.max():.1f} %, bias {rows.error_percent.mean():+.1f} %"
    )


if __name__ == "__main__":
    main()
