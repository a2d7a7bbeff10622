"""Predicted and measured step time on this machine.

    python -m benchmarks.step_time.here

Trains two small models with the executor on this machine's CPU (gloo) under plans of one to four
processes. The prediction is what ``shardplan plan MODEL here:N`` says: it knows the model, the plan
and a measurement of the machine with N processes at work (matmuls, copies, small operators,
collectives, messages), taken again before the plans of N processes are run. No constant was fitted
on these plans.

On a shared machine a run counts only while others use few of the cores
(benchmarks/step_time/quiet.py).

    --processes 2,4   only plans of so many processes
    --repeats N       measure and run everything so often; a plan's error is the median one
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.memory_truth.small_models import words
from benchmarks.step_time.quiet import QUIET, undisturbed
from cost_models.model.families import model_spec
from cost_models.model.spec import ModelSpec
from cost_models.plan.plan import Plan
from cost_models.plan.workload import Workload
from cost_models.plan_file import PlanFile
from cost_models.scenario import Scenario
from hardware_profiles.cluster.local_machine import cpu_cluster
from hardware_profiles.software.trainer import software_profile
from planner.assessment.assess import plan_file

TINY = Path(__file__).parents[2] / "examples" / "tiny-llama" / "config.json"
WIDE = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 256,
    "n_layer": 4,
    "n_head": 8,
    "n_positions": 512,
    "vocab_size": 1024,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
SEQ_LEN = {"tiny": 128, "wide": 256, "gpt2": 128}
WARM_UP, TIMED = 2, 7  # steps


def models() -> dict[str, ModelSpec]:
    """The trained models by name."""
    configs = {"tiny": json.loads(TINY.read_text(encoding="utf-8")), "wide": WIDE, "gpt2": GPT2}
    return {name: model_spec(config, name=name) for name, config in configs.items()}


def plans() -> Iterator[tuple[str, Plan]]:
    """Model and plan of every run."""

    def plan(data: int, tensor: int, pipeline: int, micro: int, count: int, **rest: Any) -> Plan:
        return Plan(
            data_parallel=data,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            micro_batch_size=micro,
            num_microbatches=count,
            **rest,
        )

    yield "tiny", plan(1, 1, 1, 4, 4)
    yield "tiny", plan(1, 1, 1, 16, 1, recompute="full")
    yield "gpt2", plan(1, 1, 1, 4, 2)
    yield "wide", plan(1, 1, 1, 2, 2)
    yield "tiny", plan(2, 1, 1, 4, 2)
    yield "tiny", plan(2, 1, 1, 2, 4, zero_stage=3)
    yield "tiny", plan(1, 2, 1, 8, 2, sequence_parallel=True)
    yield "tiny", plan(1, 1, 2, 4, 4)
    yield "gpt2", plan(1, 2, 1, 4, 2)
    yield "wide", plan(2, 1, 1, 2, 1, zero_stage=1)
    yield "wide", plan(1, 2, 1, 2, 2)
    yield "wide", plan(1, 1, 2, 1, 4, recompute="full")
    yield "gpt2", plan(1, 1, 2, 2, 4, pipeline_schedule="gpipe")
    yield "tiny", plan(1, 1, 3, 2, 6)
    yield "wide", plan(3, 1, 1, 1, 2, zero_stage=2)
    yield "tiny", plan(2, 2, 1, 4, 2, zero_stage=1, sequence_parallel=True)
    yield ("tiny", plan(1, 2, 2, 4, 4, virtual_stages=2, pipeline_schedule="interleaved_1f1b"))
    yield "tiny", plan(4, 1, 1, 4, 1, zero_stage=2)
    yield "wide", plan(1, 1, 4, 1, 4)
    yield "wide", plan(2, 1, 2, 1, 2, zero_stage=1, recompute="selective")
    yield "wide", plan(1, 4, 1, 2, 2, sequence_parallel=True)
    yield "gpt2", plan(2, 1, 2, 2, 4, zero_stage=1)


def timed(rank: int, file: PlanFile) -> list[dict[str, float]]:
    """Train on one rank; return the seconds of the steps after the warm-up."""
    from executor.data import MarkovCorpus
    from executor.training.trainer import Trainer

    trainer = Trainer(file, seed=0)
    corpus = MarkovCorpus(file.model.vocab_size, file.workload.seq_len, seed=0)
    batch = file.plan.global_batch_size
    seconds = [trainer.step(corpus.batch(step, batch)).seconds for step in range(WARM_UP + TIMED)]
    return seconds[WARM_UP:]


def run(scenario: Scenario, plan: Plan, threads: int) -> dict[str, Any]:
    """Predict and measure one plan."""
    from executor.processes.fork import run_forked

    file = plan_file(scenario, plan, "benchmarks.step_time.here")
    time = file.prediction["time"]
    ranks, others = undisturbed(
        lambda: run_forked(timed, plan.world_size, file, timeout=300.0, threads=threads)
    )
    steps = ranks[0]
    measured = {part: statistics.median(step[part] for step in steps) for part in steps[0]}
    return {
        "predicted": time["step_seconds"],
        "measured": statistics.median(sum(step.values()) for step in steps),
        "parts": {name: value for name, value in time["parts"].items() if value},
        "measured_parts": measured,
        "others": others,
    }


def rows_of(counts: list[int], *, parts: bool) -> Iterator[dict[str, Any]]:
    """Measure the machine, then run the plans of that many processes, for each number of them."""
    import executor.training.trainer  # noqa: F401  imported once here, forked with every rank
    from executor.machine.measure import measure_machine, threads_per_process

    known, wanted = models(), list(plans())
    for processes in counts:
        measurement, others = undisturbed(partial(measure_machine, processes))
        if parts:
            print(f"{processes} processes: {measurement.to_dict()}")
        if others > QUIET:
            print(f"{processes} processes: left out, others used {others:.0%} of the cores")
            continue
        cluster = cpu_cluster(measurement)
        for name, plan in wanted:
            if plan.world_size != processes:
                continue
            workload = Workload(SEQ_LEN[name], plan.global_batch_size, precision="fp32")
            scenario = Scenario(known[name], cluster, workload, software_profile("shardplan"))
            row = run(scenario, plan, threads_per_process(processes))
            row = {"model": name, "plan": words(plan), "processes": processes, **row}
            row["error_percent"] = 100.0 * (row["predicted"] / row["measured"] - 1.0)
            show(row, parts=parts)
            yield row


def show(row: dict[str, Any], *, parts: bool) -> None:
    """Print one row."""
    print(
        f"{row['processes']} {row['model']:<5} {row['plan']:<52} {1e3 * row['predicted']:7.1f} "
        f"{1e3 * row['measured']:7.1f} ms {row['error_percent']:+6.1f} %"
        + (f"  (others used {row['others']:.0%})" if row["others"] > QUIET else ""),
        flush=True,
    )
    if parts:
        for side in ("parts", "measured_parts"):
            print(f"        {side}: { {k: round(1e3 * v, 1) for k, v in row[side].items()} }")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", default="1,2,3,4")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--parts", action="store_true", help="show the parts too")
    arguments = parser.parse_args()
    print(f"{'':<59}predicted measured    error")
    counts = [int(count) for count in arguments.processes.split(",")]
    found = [
        row for _ in range(arguments.repeats) for row in rows_of(counts, parts=arguments.parts)
    ]
    quiet = [row for row in found if row["others"] <= QUIET]
    errors = pd.DataFrame(quiet).groupby(["model", "plan"]).error_percent.median()
    print(
        f"{len(errors)} plans, {len(quiet)} of {len(found)} runs undisturbed: median absolute "
        f"error {errors.abs().median():.0f} %, 90th percentile {errors.abs().quantile(0.9):.0f} %, "
        f"largest {errors.abs().max():.0f} %, bias {errors.mean():+.0f} %"
    )


if __name__ == "__main__":
    main()
