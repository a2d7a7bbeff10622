"""Traces of live modules: the executor's tracer, in the process of the training script.

A module cannot travel to the process in which ``planner.request.executor_process`` traces
factories: its class may stand in the script that runs. So the tracer is imported, in one function;
the import contract in ``pyproject.toml`` names this exception.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final, cast, get_args

from cost_models.plan.plan import Plan
from cost_models.plan.workload import Optimizer, Precision, Workload
from cost_models.traced.memory import OPTIMIZER_COPIES
from cost_models.traced.module import TracedModule, traced_module
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import software_profile
from planner.live.description import LiveModel
from planner.traced.answers import TracedFitAnswer
from planner.traced.scenario import TracedScenario, assess_traced, refuse_structure, why_illegal

AS_ADAMW: Final = "priced with the states of AdamW"


def fit_live(
    live: LiveModel, cluster: Cluster, fixed: dict[str, Any], *, every_size: bool = False
) -> TracedFitAnswer:
    """Assess a live module of unknown layers with the plan of its run.

    ``every_size``: trace what other micro-batches and recomputation need too (for ways out).
    """
    if live.batch is None or not live.batch.arguments:
        raise InputError(
            f"{live.name}: its layers are not known, so it is traced with a batch: inputs=BATCH "
            "(arguments by name, or a tuple of tensors)"
        )
    refuse_structure(fixed, live.name)
    notes = list(live.notes)
    precision, device = _precision(live, notes), cluster.accelerator.device
    module = _trace(live, precision, "cpu" if device == "cpu" else "cuda", every_size=every_size)
    module = replace(module, notes=(*module.notes, *notes))
    ranks, micro = cluster.num_gpus, live.batch.rows
    times = fixed.get("num_microbatches") or 1
    plan = Plan(
        data_parallel=ranks,
        dp_replicate=live.sharding.dp_replicate,
        zero_stage=fixed.get("zero_stage") or 0,
        recompute="full" if live.recomputes else "none",
        micro_batch_size=micro,
        num_microbatches=times,
    )
    workload = Workload(
        1,
        plan.global_batch_size,
        precision=precision,
        optimizer=_optimizer(live, notes),
        master_weights=not (precision == "bf16" and module.weight_bytes == 2.0),
    )
    kernel = live.options.get("optimizer_kernel") or ("for-loop" if device == "cpu" else "foreach")
    software = software_profile(f"torch-trainer+adamw-{kernel}")
    scenario = TracedScenario(module, cluster, software, workload)
    if (why := why_illegal(scenario, plan)) is not None:
        raise InputError(why)
    return TracedFitAnswer(
        scenario=scenario,
        plan=plan,
        assessment=assess_traced(scenario, [plan])[0],
        assumptions=(*module.notes, *cluster.notes, *notes),
    )


def _trace(live: LiveModel, precision: Precision, device: str, *, every_size: bool) -> TracedModule:
    """Trace a module on fake tensors in this process."""
    from executor.trace.live_module import trace_live

    assert live.batch is not None
    run = partial(trace_live, live.module, live.batch.arguments, rows=live.batch.rows)
    document = run(
        precision=precision, device=device, recomputes=live.recomputes, every_size=every_size
    )
    return traced_module(document)


def _precision(live: LiveModel, notes: list[str]) -> Precision:
    """Return a precision that is traced: fp16 has the bytes of bf16."""
    precision = live.options["precision"]
    if precision == "fp16":
        notes.append("fp16 traced as bf16: the same bytes, without the loss scale")
        return "bf16"
    return cast(Precision, precision)


def _optimizer(live: LiveModel, notes: list[str]) -> Optimizer:
    """Return an optimizer of traced modules; another one is priced as AdamW."""
    assert live.optimizer in get_args(Optimizer)
    if live.optimizer in OPTIMIZER_COPIES:
        return cast(Optimizer, live.optimizer)
    notes.append(f"{live.optimizer} {AS_ADAMW}")
    return "adamw"
