"""The cost of our training loop over a bare one: ``python -m benchmarks.step_time.overhead``.

Trains the same small Llama in one run with

    ours        the loop of ``shardplan run``: batches read ahead, events, metrics.jsonl
    bare        the same stages, data parallelism and optimizer, and nothing around them
    torch       the Hugging Face module, DistributedDataParallel, clipping and fused AdamW, by hand
    accelerate  the same through accelerate.Accelerator (where it is installed)
    trainer     the same through transformers.Trainer (one process; where accelerate is installed)

in turn, a few steps of each at a time, so that a machine that is busier for a while is busier for
all; and in several launches, because where memory lies differs from one to the next by more than
what is compared. Reported are, of rank 0 on 1 and on 2 CPU processes (gloo), the median of single
steps and what a loop takes of the time of another in the same round: the median of the rounds, and
where it lies at 95 % (bootstrap); where that spans 1, no difference was seen. Ours must stay below
1.02 of bare. On a shared machine the numbers count only while others are idle
(benchmarks/step_time/quiet.py).

    --launches N  how often the processes start anew (default 4)
    --rounds N    how often every loop gets its turn in a launch (default 6)
    --steps N     steps of a turn (default 4)
    --processes   1,2
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.stats import bootstrap

from benchmarks.step_time.quiet import QUIET, undisturbed
from cost_models.model.families import model_spec
from cost_models.plan.plan import Plan, split_layers
from cost_models.plan.workload import Workload
from cost_models.plan_file import PlanFile
from hardware_profiles.cluster.parse import parse_cluster

CONFIG = {
    "model_type": "llama",
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
SEQ_LEN, SEQUENCES, RATE, MAX_NORM = 256, 4, 1e-3, 1.0
LIMIT = 0.02  # of a step
Seconds = npt.NDArray[np.float64]  # a step's, (rounds,)
Turn = Callable[[int], list[float]]  # trains so many steps, returns the seconds of each


def plan_file(processes: int) -> PlanFile:
    """The plan that all loops carry out: replicas, one micro-batch."""
    plan = Plan(processes, micro_batch_size=SEQUENCES // processes)
    return PlanFile(
        model=model_spec(CONFIG, name="llama"),
        cluster=parse_cluster("8xA100-80GB"),
        workload=Workload(SEQ_LEN, SEQUENCES, precision="fp32"),
        plan=plan,
        layer_ranges=split_layers(CONFIG["num_hidden_layers"], 1),  # type: ignore[arg-type]
    )


def ours(file: PlanFile, folder: Path) -> Iterator[float]:
    """The loop as ``shardplan run`` drives it, step by step."""
    import torch.distributed as dist

    from executor.data.corpus import MarkovCorpus
    from executor.data.prefetch import prefetched
    from executor.records.recorder import Recorder
    from executor.training.loop import PLAIN, SAMPLED, TrainingLoop
    from executor.training.step_measurement import environment
    from executor.training.trainer import Trainer

    trainer = Trainer(file, learning_rate=RATE, max_grad_norm=MAX_NORM)
    corpus = MarkovCorpus(file.model.vocab_size, SEQ_LEN, 0)
    prepared: Any = SimpleNamespace(file=file, corpus=corpus, evaluation=None, identity=dict)
    recorder = Recorder(prepared, {}, [], folder, lambda record: None)
    loop = TrainingLoop(trainer, corpus, steps=10**6, emit=recorder, sample_every=10)
    if dist.get_rank() == 0:
        here = environment(trainer.device)
        recorder({"kind": "start", "first_step": 0, "environment": here})
    with prefetched(corpus, SEQUENCES, trainer.rows, range(10**6)) as batches:
        while True:
            began = time.perf_counter()
            kind = PLAIN if trainer.steps_done % loop.sample_every else SAMPLED
            loop._step(batches, kind, timed=True)
            yield time.perf_counter() - began


def bare(file: PlanFile, folder: Path) -> Iterator[float]:
    """The same computation with nothing around it."""
    import torch
    import torch.distributed as dist

    from executor.training.optimizer import clipping_factor, local_square_sum
    from executor.training.trainer import Trainer

    trainer = Trainer(file, learning_rate=RATE)
    batches = made_batches(file)
    while True:
        began = time.perf_counter()
        loss = trainer.accumulate(next(batches))
        totals = torch.stack([loss, local_square_sum(trainer.shards, trainer.device)])
        dist.all_reduce(totals)
        factor = clipping_factor(totals[1].sqrt(), MAX_NORM)
        trainer.optimizer.step(RATE, factor=factor)
        trainer.drop_gradients()
        totals[0].item()
        yield time.perf_counter() - began


def by_hand(file: PlanFile, folder: Path, *, accelerated: bool = False) -> Iterator[float]:
    """A training loop as one writes it with torch, or with accelerate."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from executor.verify.reference import reference_model

    model: Any = reference_model(file, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    accelerator: Any = None
    if accelerated:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
    elif dist.get_world_size() > 1:
        model = DistributedDataParallel(model)
    batches = made_batches(file)
    share = SEQUENCES // dist.get_world_size()
    first = dist.get_rank() * share
    while True:
        began = time.perf_counter()
        own = next(batches).rows(first, first + share)
        logits = model(input_ids=own.inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), own.labels.flatten())
        if accelerator is None:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        else:
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        yield time.perf_counter() - began


def accelerate(file: PlanFile, folder: Path) -> Iterator[float]:
    """The loop by hand, through accelerate."""
    return by_hand(file, folder, accelerated=True)


def trainer_turn(file: PlanFile, folder: Path) -> Turn:
    """Return what trains so many steps with transformers.Trainer; two more are not timed."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from executor.verify.reference import reference_model

    model: Any = reference_model(file, 0)
    batches = made_batches(file)

    class Clock(TrainerCallback):  # type: ignore[misc]
        marks: list[float]

        def on_step_end(self, *arguments: Any, **values: Any) -> None:
            self.marks.append(time.perf_counter())

    class Rows:
        """As many rows as are asked for."""

        def __len__(self) -> int:
            return 10**6

        def __getitem__(self, index: int) -> dict[str, Any]:
            batch = next(batches)
            return {"input_ids": batch.inputs[0], "labels": batch.labels[0]}

    def turn(steps: int) -> list[float]:
        clock = Clock()
        clock.marks = []
        arguments = TrainingArguments(
            output_dir=str(folder / "trainer"),
            max_steps=steps + 2,
            per_device_train_batch_size=SEQUENCES,
            learning_rate=RATE,
            max_grad_norm=MAX_NORM,
            optim="adamw_torch_fused",
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
        )
        Trainer(model=model, args=arguments, train_dataset=Rows(), callbacks=[clock]).train()
        return [b - a for a, b in zip(clock.marks[1:-1], clock.marks[2:], strict=True)]

    return turn


def made_batches(file: PlanFile) -> Iterator[Any]:
    """Batches that cost nothing: the same few, again and again."""
    from executor.data.corpus import MarkovCorpus

    corpus = MarkovCorpus(file.model.vocab_size, SEQ_LEN, 0)
    kept = [corpus.batch(step, SEQUENCES) for step in range(8)]
    while True:
        yield from kept


def stepwise(steps: Iterator[float]) -> Turn:
    """Return turns of a loop that is driven step by step."""
    return lambda count: [next(steps) for _ in range(count)]


def measured(rank: int, processes: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Give every loop its turns; return the seconds of all its steps."""
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "ACCELERATE_USE_CPU": "1"}
    file = plan_file(processes)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        turns = {
            "ours": stepwise(ours(file, folder)),
            "bare": stepwise(bare(file, folder)),
            "torch": stepwise(by_hand(file, folder)),
        }
        if importlib.util.find_spec("accelerate") is not None:
            turns["accelerate"] = stepwise(accelerate(file, folder))
            if processes == 1:
                turns["trainer"] = trainer_turn(file, folder)
        for turn in turns.values():
            turn(3)  # caches, states of the optimizer, buckets
        seconds: dict[str, list[float]] = {name: [] for name in turns}
        for number in range(rounds):
            order = list(turns) if number % 2 == 0 else list(reversed(turns))
            for loop in order:
                seconds[loop] += turns[loop](steps)
    return seconds


def table(processes: int, launches: int, rounds: int, steps: int) -> pd.DataFrame:
    """One row a loop, from an undisturbed run if there is one."""
    import executor.training.evaluation  # noqa: F401  imported once here, forked with every rank
    from executor.processes.fork import run_forked

    def run() -> dict[str, list[float]]:
        seconds: dict[str, list[float]] = {}
        for _ in range(launches):
            ranks = run_forked(measured, processes, processes, rounds, steps, timeout=3600.0)
            for loop, values in ranks[0].items():
                seconds.setdefault(loop, []).extend(values)
        return seconds

    seconds, disturbance = undisturbed(run, attempts=2)
    turns = {loop: np.reshape(values, (-1, steps)).mean(1) for loop, values in seconds.items()}
    return pd.DataFrame(
        [
            {
                "processes": processes,
                "loop": loop,
                "median_ms": round(1e3 * statistics.median(seconds[loop]), 1),
                **relative_to(turns[loop], turns["bare"], "bare"),
                **relative_to(turns[loop], turns.get("accelerate"), "accelerate"),
                "disturbed": disturbance > QUIET,
            }
            for loop in turns
        ]
    )


def relative_to(own: Seconds, others: Seconds | None, name: str) -> dict[str, float | str]:
    """Return what a loop takes of another's time in the same round, and its bounds at 95 %."""
    if others is None:
        return {}
    ratios = own / others
    low = high = 1.0
    if np.ptp(ratios) > 0.0:
        low, high = bootstrap((ratios,), np.median, method="percentile", rng=0).confidence_interval
    return {f"to_{name}": round(float(np.median(ratios)), 3), f"{name}_95": f"{low:.3f}-{high:.3f}"}


def main() -> None:
    """Print the table, and whether the loop keeps its promise."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--launches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--processes", default="1,2")
    options = parser.parse_args()
    found = pd.concat(
        table(int(n), options.launches, options.rounds, options.steps)
        for n in options.processes.split(",")
    )
    print(found.to_string(index=False))
    worst = found[found.loop == "ours"].to_bare.max() - 1.0
    print(f"\nour loop costs {worst:+.1%} of a step (at most {LIMIT:.0%})")
    if found.disturbed.any():
        print("others used the machine meanwhile: take the numbers as a rough guide")


if __name__ == "__main__":
    main()
