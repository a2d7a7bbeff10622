"""Rules of matmuls in fp8 and fp4, for trainers that do not scale cut matrices."""

from __future__ import annotations

from typing import Any, Final

from cost_models.arrays import among
from cost_models.legality.rule import Rule, any_of
from cost_models.partition.schedules import SPLIT_CODES
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.workload import QUANTISED
from cost_models.scenario import Scenario

MULTIPLE: Final = 16  # of both lengths of a matrix, and of the tokens of a micro-batch


def _in_fp8(scenario: Scenario) -> bool:
    """Whether matmuls are in few bits, under a trainer that supports them for whole matrices."""
    return scenario.workload.precision in QUANTISED and scenario.software.fp8.whole_matrices


def _tokens(scenario: Scenario, plans: Plan | PlanTable) -> list[Any]:
    """Return the tokens of a micro-batch, of inputs and of targets."""
    workload = scenario.workload
    return [
        plans.micro_batch_size * length // plans.context_parallel
        for length in (workload.seq_len, workload.target_tokens)
    ]


def _odd_length(scenario: Scenario) -> int | None:
    """Return a length of a layer's matrix that the kernels do not support."""
    lengths = {
        length
        for kind in scenario.model.kinds
        for weight in kind.weights
        if weight.role == "linear" and weight.part != "router" and not weight.is_adapter
        for length in weight.shape
    }
    return min((length for length in lengths if length % MULTIPLE), default=None)


def _words(scenario: Scenario, plan: Plan) -> str:
    bits = scenario.workload.precision
    return (
        f"precision {bits}: tensor_parallel {plan.tensor_parallel}, pipeline_schedule "
        f"{plan.pipeline_schedule}; this trainer supports {bits} only for whole matrices and for "
        "backward passes that are not split (tensor_parallel must be 1, and no zero-bubble "
        "schedule; --software megatron prices Transformer Engine, which supports both)"
    )


FP8_RULES: tuple[Rule, ...] = (
    Rule(
        "fp8",
        # "and": columns are evaluated only where matmuls are in fp8
        lambda s, t: (
            _in_fp8(s) and ((t.tensor_parallel > 1) | among(t.pipeline_schedule, SPLIT_CODES))
        ),
        _words,
    ),
    Rule(
        "fp8_lengths",
        lambda s, t: (
            _in_fp8(s)
            and any_of((_odd_length(s) is not None, *(n % MULTIPLE != 0 for n in _tokens(s, t))))
        ),
        lambda s, p: (
            f"precision {s.workload.precision}: "
            + " and ".join(str(count) for count in dict.fromkeys(_tokens(s, p)))
            + " tokens of a micro-batch"
            + ("" if _odd_length(s) is None else f" and a matrix with a length of {_odd_length(s)}")
            + f" (fp8 kernels need multiples of {MULTIPLE})"
        ),
    ),
)
