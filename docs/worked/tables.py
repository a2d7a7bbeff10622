"""Tables of plans of the book of formulas: for every trainer, what the parts of prices add up to.

Whole jobs are few; a table has plans at random, each priced on small models, where a byte more or
less shows in the sum. No number of the page is typed by hand.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, get_args

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict
from worked.jobs import TINY_MODELS

from cost_models.compute.hardware_flops import hardware_flops_per_step
from cost_models.legality.capabilities import capabilities_of
from cost_models.legality.rules import legality_codes
from cost_models.model.families import model_spec
from cost_models.model.lora import adapted
from cost_models.plan.plan import CONTEXT_METHODS, OFFLOADS, SCHEDULES, Plan, PlanTable
from cost_models.plan.recompute import OF_MEGATRON
from cost_models.plan.workload import Optimizer, Workload
from cost_models.pricing.estimate import price
from cost_models.scenario import Scenario
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.software.trainer import profile_names, software_profile

GPUS: Final = 8
BATCH: Final = 24
PLANS: Final = 24  # of a table, at most
DRAWN: Final = 400
TRIES: Final = 2000  # of settings
CLUSTERS: Final = ("8xA100-80GB", "8xH100-SXM", "2x4xMI300X", "8xRTX-4090", "2x4xV100-SXM2-32GB")
# those with the widest choice of plans
AGAIN: Final = (*8 * ("shardplan",), *3 * ("megatron-core", "torchtitan", "torch-trainer", "nemo"))

HEAD: Final = f"""# Tables of plans

What prices add up to over {PLANS} legal plans drawn at random, of small models under each trainer:
bytes of the fullest accelerators and of hosts, seconds and FLOP of steps.
`python docs/make_formulas.py --write` computes them, so the change of a formula shows here, part by
part, whose prices it changed.
"""


def page() -> str:
    """Return the page."""
    lines = [HEAD]
    for number, trainer in enumerate((*profile_names(), *AGAIN)):
        if trainer == "peft":  # of one accelerator
            continue
        scenario, plans = job(random.Random(number), trainer)
        table = PlanTable.from_plans(plans)
        model, workload = scenario.model, scenario.workload
        said = [model.name, scenario.cluster.name, workload.precision, workload.optimizer]
        said += [workload.attention_kernel, workload.adapter, f"{len(table)} plans"]
        lines += [f"## {trainer}, {', '.join(said)}", "", "```text"]
        lines += [f"{name:20} {values}" for name, values in sums(scenario, table)]
        lines += ["```", ""]
    return "\n".join(lines).rstrip() + "\n"


def job(draw: random.Random, trainer: str) -> tuple[Scenario, list[Plan]]:
    """Return a job of a trainer with settings drawn at random, and legal plans of it."""
    software = software_profile(trainer)
    limits = capabilities_of(software)
    for _ in range(TRIES):
        adapter = draw.choice(("none", "none", "none", "lora", "qlora"))
        workload = Workload(
            seq_len=16 * draw.randint(2, 5),
            global_batch_size=BATCH,
            precision=draw.choice(("bf16", "bf16", "fp16", "fp32", "fp8")),
            optimizer=draw.choice(("adamw", *get_args(Optimizer))),
            gradient_precision=draw.choice(("auto", "auto", "fp32", "bf16")),
            master_weights=draw.random() < 0.9,
            attention_kernel=draw.choice(("flash", "eager")),
            document_mask=draw.random() < 0.25,
            adapter=adapter,
            adapter_rank=0 if adapter == "none" else 4,
            adapter_alpha=0.0 if adapter == "none" else 8.0,
        )
        name, cluster = draw.choice(list(TINY_MODELS)), parse_cluster(draw.choice(CLUSTERS))
        known = workload.precision in cluster.accelerator.peak_flops
        if not known or (limits is not None and limits.problem_of_workload(workload)):
            continue
        model = adapted(model_spec(TINY_MODELS[name], name=name), workload)
        scenario = Scenario(model, cluster, workload, software)
        if plans := legal_plans(draw, scenario):
            return scenario, plans
    raise AssertionError(f"no job of {trainer} is legal")


def legal_plans(draw: random.Random, scenario: Scenario) -> list[Plan]:
    """Return legal plans of eight accelerators, drawn at random."""
    limits = capabilities_of(scenario.software)
    values = {} if limits is None else limits.limits()
    plans = [plan for _ in range(DRAWN) if (plan := drawn_plan(draw, values)) is not None]
    codes = legality_codes(scenario, PlanTable.from_plans(plans))
    legal = dict.fromkeys(plan for plan, code in zip(plans, codes, strict=True) if not code)
    return list(legal)[:PLANS]


def drawn_plan(draw: random.Random, limits: Mapping[str, Sequence[Any]]) -> Plan | None:
    """Return a plan within limits that is drawn at random, legal or not; None: of other sizes."""

    def several(name: str, share: float, *values: Any) -> Any:
        within = limits.get(name)
        allowed = values if within is None else [each for each in values if each in within]
        return (
            draw.choice(allowed) if draw.random() < share or values[0] not in allowed else values[0]
        )

    tensor = several("tensor_parallel", 0.4, 1, 2, 4)
    pipeline = several("pipeline_parallel", 0.4, 1, 2, 4)
    context = several("context_parallel", 0.2, 1, 2)
    data = GPUS // (tensor * pipeline * context)
    rows, left = draw.choice((1, 2, 3)), BATCH // max(1, data)
    if data < 1 or left % rows:
        return None
    return Plan(
        data,
        tensor,
        pipeline,
        several("virtual_stages", 0.4, 1, 2) if pipeline > 1 else 1,
        several("pipeline_schedule", 0.5, *SCHEDULES) if pipeline > 1 else "1f1b",
        several("zero_stage", 0.8, 0, 1, 2, 3) if data > 1 else 0,
        tensor > 1 and several("sequence_parallel", 0.6, False, True),
        several("recompute", 0.8, *OF_MEGATRON),
        rows,
        left // rows,
        dp_replicate=several("dp_replicate", 0.2, 1, 2),
        context_parallel=context,
        context_parallel_method=several("context_parallel_method", 0.5, *CONTEXT_METHODS)
        if context > 1
        else "ring",
        expert_parallel=several("expert_parallel", 0.4, 1, 2, 4),
        expert_tensor_parallel=several("expert_tensor_parallel", 0.3, True, False),
        offload=several("offload", 0.3, "none", *OFFLOADS),
        recompute_layers=several("recompute_layers", 0.2, 0, 1),
        secondary_ranks=several("secondary_ranks", 0.1, 1, 2),
        quantised_weights=several("quantised_weights", 0.1, False, True),
        quantised_gradients=several("quantised_gradients", 0.1, False, True),
    )


def sums(scenario: Scenario, table: PlanTable) -> Iterator[tuple[str, str]]:
    """Yield the sums of the parts of prices over a table."""
    found = price(scenario, table)
    yield from (("memory", added(found.memory)), ("host", added(found.host)))
    yield "seconds", added(found.time)
    flops = hardware_flops_per_step(scenario.model, scenario.workload, table)
    peaks = {"peak": found.memory.peak, "typical peak": found.typical_peak, "FLOP": flops}
    yield "all", words_of(peaks | {"step": found.step, "moment": found.moment})


def added(record: Struct) -> str:
    """Return the sums of a record's columns that are not zero."""
    return words_of(asdict(record))


def words_of(columns: Mapping[str, Any]) -> str:
    """Return the sums of columns that are not zero."""
    sums = ((name, float(np.sum(column))) for name, column in columns.items())
    return ", ".join(f"{name} {value:.10g}" for name, value in sums if value) or "0"
