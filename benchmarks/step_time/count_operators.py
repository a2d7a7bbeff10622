"""Operators that the executor starts, counted: ``python -m benchmarks.step_time.count_operators``.

Trains small llama and gpt2 models on the CPU and counts what reaches torch's dispatcher in a step,
views included (they start no kernel, but cost the host as much time as a small one). Models of two
and four layers, and one and two micro-batches, tell apart what belongs to a layer, to a micro-batch
and to a step. Sequences that 2 and 4 ranks share count what context parallelism adds.

The second table weighs by the clock what a dispatcher cannot see, FSDP2's Python around every group
of parameters: models so small that the host's work is all there is, with data parallelism and
without, more micro-batches minus fewer (those before the last communicate nothing), in units of one
small operator of the same machine.

``hardware_profiles/software/trainers/shardplan.toml`` holds the numbers of llama.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

from benchmarks.memory_truth.small_models import CONFIGS
from benchmarks.step_time.quiet import undisturbed
from cost_models.model.families import model_spec
from cost_models.plan.plan import CONTEXT_METHODS, Plan, split_layers
from cost_models.plan.workload import Workload
from cost_models.plan_file import PlanFile
from hardware_profiles.cluster.parse import parse_cluster

PHASES = ("forward", "backward", "step")
NARROW = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 32}
STEPS = 12


def case(family: str, layers: int, plan: Plan, seq_len: int = 64, **config: Any) -> PlanFile:
    """A model of so many layers under a plan."""
    key = "n_layer" if family == "gpt2" else "num_hidden_layers"
    return PlanFile(
        model=model_spec({**CONFIGS[family], key: layers, **config}, name=family),
        cluster=parse_cluster("1xH100-SXM"),  # not read: the executor takes the machine as it is
        workload=Workload(seq_len, plan.global_batch_size, precision="fp32"),
        plan=plan,
        layer_ranges=split_layers(layers, plan.num_stages),
    )


def counted(rank: int, file: PlanFile) -> dict[str, int]:
    """Count the operators of the third step on one rank, by phase."""
    import torch

    from executor.counters.collectives_and_flops import OperatorMode
    from executor.data.batch import Batch
    from executor.training.optimizer import clipping_factor
    from executor.training.trainer import Trainer

    found: Counter[str] = Counter()
    outside = "forward"  # of the backward pass

    class Mode(OperatorMode):
        def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            backward = torch._C._current_graph_task_id() != -1
            found["backward" if backward else outside] += 1
            return func(*args, **kwargs)

    trainer = Trainer(file, seed=0)
    tokens = torch.zeros(file.plan.global_batch_size, file.workload.seq_len, dtype=torch.int64)
    batch = Batch.whole(tokens, tokens)
    for _ in range(2):
        trainer.step(batch)
    with Mode():
        loss = trainer.accumulate(batch)
        outside = "step"
        loss, norm, _ = trainer.finish_gradients(loss)
        trainer.optimizer.step(0.0, factor=clipping_factor(norm, 1.0))
        trainer.drop_gradients()
    return dict(found)


def shares(family: str, plan: Plan) -> dict[str, float]:
    """Operators of a layer, of a micro-batch outside the layers, and of a step."""
    from executor.processes.fork import run_forked

    count, ranks = {}, plan.world_size
    for layers, microbatches in itertools.product((2, 4), (1, 2)):
        file = case(family, layers, replace(plan, num_microbatches=microbatches))
        count[layers, microbatches] = run_forked(counted, ranks, file)[0]

    def microbatch(layers: int, phase: str) -> float:
        return count[layers, 2][phase] - count[layers, 1][phase]

    layer = {p: (microbatch(4, p) - microbatch(2, p)) / 2 for p in ("forward", "backward")}
    outside = sum(microbatch(2, p) - 2 * layer[p] for p in layer)
    whole = sum(count[2, 1].values()) - sum(microbatch(2, p) for p in layer)
    return {
        "layer_forward": layer["forward"],
        "layer_backward": layer["backward"],
        "microbatch": outside,
        "step": whole,
    }


def host_seconds(rank: int, file: PlanFile) -> float:
    """Return the seconds of a step, of which the host's work is all there is."""
    import torch

    from executor.data.batch import Batch
    from executor.training.trainer import Trainer

    trainer = Trainer(file, seed=0)
    tokens = torch.zeros(file.plan.global_batch_size, file.workload.seq_len, dtype=torch.int64)
    batch = Batch.whole(tokens, tokens)
    return min(sum(trainer.step(batch).seconds.values()) for _ in range(STEPS))


def operator_seconds(rank: int) -> float:
    """Return the seconds of one small operator, as the machine's measurement does."""
    from executor.machine.probes import operator_rates

    return 1.0 / max(operator_rates("cpu"))


def clocked() -> dict[str, float]:
    """A layer's pass, and FSDP2's part of it, in units of one small operator."""
    from executor.processes.fork import run_forked

    found = {}
    for data, layers in itertools.product((1, 2), (2, 6)):
        seconds = []
        for count in (2, 6):
            file = case(
                "llama", layers, Plan(data_parallel=data, num_microbatches=count), 4, **NARROW
            )
            seconds.append(run_forked(host_seconds, data, file)[0])
        found[data, layers] = (seconds[1] - seconds[0]) / 4
    one = run_forked(operator_seconds, 2)[0]
    layer = {data: (found[data, 6] - found[data, 2]) / 4 / one for data in (1, 2)}
    return {"layer, forward and backward": layer[1], "group, each pass": (layer[2] - layer[1]) / 2}


def main() -> None:
    import executor.training.trainer  # noqa: F401  imported once here, forked with every rank

    for family, recompute in itertools.product(("llama", "gpt2"), ("none", "full")):
        row = shares(family, Plan(recompute=recompute))  # type: ignore[arg-type]
        print(f"{family:<6} recompute {recompute:<5}", *(f"{k} {v:.0f}" for k, v in row.items()))
    for method, ranks in itertools.product(CONTEXT_METHODS, (2, 4)):
        row = shares("llama", Plan(context_parallel=ranks, context_parallel_method=method))
        print(f"llama  {method} over {ranks:<5}", *(f"{k} {v:.0f}" for k, v in row.items()))
    weighed, others = undisturbed(clocked)
    print(f"by the clock (others used {others:.0%} of the cores):")
    for name, value in weighed.items():
        print(f"    {name}: {value:.0f} small operators")


if __name__ == "__main__":
    main()
