"""Compiled layers give the values of eager ones; without a compiler they run eagerly."""

from typing import Any

import pytest
import torch

from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile
from executor.data.corpus import MarkovCorpus
from executor.processes.fork import run_forked
from executor.training import compiled
from executor.training.compiled import check_compilable, compile_layers
from executor.training.evaluation import evaluate
from executor.training.step_measurement import measured_step
from executor.training.trainer import Trainer
from hardware_profiles.errors import InputError
from tests.executor.tiny import random_batch, tiny

# torch's tracer and compilers warn of their own code
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}")
    for kind in ("DeprecationWarning", "FutureWarning", "UserWarning")
]

ZERO3 = Plan(2, zero_stage=3, num_microbatches=2)
TENSOR = Plan(1, 2, sequence_parallel=True, recompute="full", num_microbatches=2)


def _steps(rank: int, file: PlanFile, backend: str | None) -> dict[str, Any]:
    """Train some steps, one of them watched, and evaluate; ``backend`` None: eagerly."""
    trainer = Trainer(file, seed=1, learning_rate=1e-2)
    graphs = 0
    if backend is not None:
        torch._dynamo.config.suppress_errors = False
        compile_with(backend)
        assert compile_layers(trainer.stages, trainer.device) is None
    losses = []
    for number in range(4):
        batch = random_batch(file, number)
        result = measured_step(trainer, batch)[0] if number == 2 else trainer.step(batch)
        losses += [result.loss, result.gradient_norm]
    corpus = MarkovCorpus(file.model.vocab_size, file.workload.seq_len, 7)
    losses.append(evaluate(trainer, corpus, 1).loss)
    if backend is not None:
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return {"losses": losses, "graphs": graphs}


def compile_with(backend: str) -> None:
    """Have this process compile with a backend of torch."""
    original = torch.compile

    def compile_(function: Any, **options: Any) -> Any:
        return original(function, backend=backend, **options)

    compiled.torch.compile = compile_  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("plan", "backend"),
    [
        pytest.param(ZERO3, "aot_eager", id="zero 3"),
        pytest.param(TENSOR, "aot_eager", id="tensor"),
        pytest.param(ZERO3, "inductor", id="inductor"),
    ],
)
def test_compiled_layers_give_the_values_of_eager_ones(plan: Plan, backend: str):
    file = tiny(plan, "llama", num_layers=2, precision="fp32")
    eager = run_forked(_steps, 2, file, None)[0]
    fast = run_forked(_steps, 2, file, backend, timeout=400)[0]
    assert fast["graphs"] > 0
    assert fast["losses"] == pytest.approx(eager["losses"], rel=1e-5)


def _without_a_compiler(rank: int, file: PlanFile) -> dict[str, Any]:
    trainer = Trainer(file, seed=1)

    def compile_(function: Any, **options: Any) -> Any:
        if rank == 1:
            raise RuntimeError("no g++ here\nand more")
        return function

    compiled.torch.compile = compile_  # type: ignore[attr-defined]
    before = [stage.get_submodule(n).forward for stage in trainer.stages for n in stage.layer_names]
    said = compile_layers(trainer.stages, trainer.device)
    after = [stage.get_submodule(n).forward for stage in trainer.stages for n in stage.layer_names]
    return {"said": said, "same": before == after}


@pytest.mark.distributed
def test_one_rank_without_a_compiler_is_enough_to_run_eagerly():
    for found in run_forked(_without_a_compiler, 2, tiny(Plan(2), num_layers=1)):
        assert found["same"]
        assert found["said"] == (
            "--compile: layers run eagerly, because torch.compile failed: no g++ here"
        )


def test_plans_that_were_not_compared_are_refused():
    with pytest.raises(
        InputError, match="--compile: with context_parallel 2 compiled values are not proven"
    ):
        check_compilable(Plan(context_parallel=2))
    with pytest.raises(InputError, match="adapter qlora"):
        check_compilable(Plan(), adapter="qlora")
