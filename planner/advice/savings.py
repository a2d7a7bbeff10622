"""Changes that would make the best plan faster and that the search leaves out.

Left out are techniques that change the numerics of a training (16-bit gradients, 8-bit optimizer
states, quantised messages of ZeRO++), and techniques that few trainers have (the secondary copy of
ZeRO++, recomputation by module) or that use fewer accelerators than are given. Each change is
priced around the best plan: the same degrees and schedule, with every micro-batch size, ZeRO stage
and recomputation (ZeRO++: around the fastest plan of ZeRO 3 that the search found; fewer
accelerators: all plans). A whole search with the change may find more, never less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from msgspec import Struct, field

from cost_models.legality.rules import legality_codes
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.recompute import OF_MEGATRON
from cost_models.plan.workload import Workload
from cost_models.pricing.simulated_steps import above, simulated_steps
from cost_models.pricing.table import table_steps
from cost_models.scenario import Scenario
from hardware_profiles.errors import InputError
from hardware_profiles.fields import names_in
from hardware_profiles.record import Record
from planner.assessment.assess import Assessment
from planner.request.clusters import part_of
from planner.request.constraints import Constraint, broken_by_plan
from planner.request.divisors import divisors
from planner.search.feasible import Feasible
from planner.search.search import SearchResult, search

LEAST: Final = 0.005  # of a step: smaller savings are not named
ROUNDING: Final = 1e-9
DEGREES: Final = names_in("""
    data_parallel dp_replicate context_parallel context_parallel_method tensor_parallel
    expert_parallel expert_tensor_parallel pipeline_parallel virtual_stages pipeline_schedule
    offload offload_device
""")
SMOOTH: Final = (2, 3, 5, 7)  # prime factors of numbers of nodes that leave many splits


class Saving(Record, frozen=True):
    """A change with which a plan is faster than the best one, and that plan."""

    words: str = field(name="change")
    options: str  # to append to the command
    share: float  # of the step that is saved
    seconds: float = field(name="step_seconds")  # of a step with the change
    changes_numerics: bool
    plan: Plan


class _Around(Struct, frozen=True):
    """The best plan of a search, its pins and requirements."""

    scenario: Scenario
    best: Assessment
    step: float  # seconds of the fastest plan
    fixed: Mapping[str, Any]
    require: Sequence[Constraint]

    def search(
        self,
        words: str,
        options: str,
        scenario: Scenario,
        pins: Mapping[str, Any],
        *,
        numerics: bool,
    ) -> Saving | None:
        """Return the fastest plan with a change, if it fits and saves."""
        try:
            below = self.step * (1.0 - LEAST) * (1.0 + ROUNDING)
            found = search(scenario, pins, require=self.require, top=1, below=below)
        except InputError:  # too many candidates, or not defined for this accelerator
            return None
        if not found.fits:
            return None
        return self.saving(words, options, found.seconds[0], found.plans[0], numerics=numerics)

    def saving(
        self, words: str, options: str, seconds: float, plan: Plan, *, numerics: bool = False
    ) -> Saving | None:
        """Return a saving of at least LEAST, else None."""
        share = 1.0 - seconds / self.step
        return Saving(words, options, share, seconds, numerics, plan) if share >= LEAST else None

    def pins(self, plan: Plan, **more: Any) -> dict[str, Any]:
        """Return the degrees and schedule of a plan as pins, with further ones."""
        return {**{name: getattr(plan, name) for name in DEGREES}, **self.fixed, **more}


def savings(
    scenario: Scenario,
    best: Assessment,
    result: SearchResult,
    fixed: Mapping[str, Any],
    require: Sequence[Constraint] = (),
    fastest: float = np.inf,
) -> tuple[Saving, ...]:
    """Return what would save at least LEAST of the fastest plan's step, the most first.

    ``fastest``: seconds of a plan with stages of its own, if one is the best.
    """
    if not best.fits or not scenario.on_gpu or scenario.layer_ranges is not None:
        return ()
    step = best.time.step_seconds if result.tie is None else result.tie.seconds
    around = _Around(scenario, best, min(step, fastest), fixed, require)
    every = [*_trainings(around), *_zero_plus_plus(around, [best.plan, *result.plans])]
    every += [*_by_module(around), *_fewer_accelerators(around)]
    return tuple(sorted((one for one in every if one is not None), key=lambda one: -one.share))


def _trainings(around: _Around) -> Iterator[Saving | None]:
    """Yield 16-bit gradients, and an optimizer with 8-bit states."""
    scenario, pins = around.scenario, around.pins(around.best.plan)
    workload = scenario.workload
    changes: list[tuple[str, str, Workload]] = []
    if workload.precision == "bf16" and workload.gradient_precision == "auto":
        bf16 = replace(workload, gradient_precision="bf16")
        changes.append(("bf16 gradients", "--gradient-precision bf16", bf16))
    if workload.optimizer == "adamw" and workload.adapter == "none":
        small = replace(workload, optimizer="adamw_8bit")
        changes.append(("8-bit optimizer states", "--optimizer adamw_8bit", small))
    for words, options, changed in changes:
        priced = replace(scenario, workload=changed)
        yield around.search(words, options, priced, pins, numerics=True)


def _zero_plus_plus(around: _Around, plans: Sequence[Plan]) -> Iterator[Saving | None]:
    """Yield the secondary copy, and quantised messages, around the fastest plan of ZeRO 3."""
    first = next((plan for plan in plans if plan.zero_stage == 3), None)
    if first is None or around.fixed.get("zero_stage", 3) != 3:
        return
    cluster = around.scenario.cluster
    names = ("secondary_ranks", "quantised_weights", "quantised_gradients")
    if any(name in around.fixed for name in names):
        return
    pins = around.pins(first, zero_stage=3)
    given = "" if around.fixed.get("zero_stage") == 3 else "zero=3,"
    inside = cluster.gpus_per_node
    if cluster.num_nodes > 1 and first.shard_ranks > inside:
        options = f"--fix {given}secondary_ranks={inside}"
        more = {**pins, "secondary_ranks": inside}
        words = "a secondary copy of the weights in every node (hpZ)"
        yield around.search(words, options, around.scenario, more, numerics=False)
    quantised = {"quantised_weights": True, "quantised_gradients": True}
    options = f"--fix {given}quantised_weights=on,quantised_gradients=on"
    words = "quantised messages of ZeRO++"
    yield around.search(words, options, around.scenario, {**pins, **quantised}, numerics=True)


def _by_module(around: _Around) -> Iterator[Saving | None]:
    """Yield the fastest recomputation of operators or modules, where layers are recomputed."""
    scenario, plan = around.scenario, around.best.plan
    if plan.recompute == "none" or "recompute" in around.fixed:
        return
    share = plan.micro_batch_size * plan.num_microbatches
    sizes = divisors(share) if "micro_batch_size" not in around.fixed else [plan.micro_batch_size]
    same = replace(plan, recompute_layers=0, recompute_every=0)
    table = PlanTable.from_plans(
        [
            replace(same, recompute=word, micro_batch_size=size, num_microbatches=share // size)
            for word in OF_MEGATRON
            for size in sizes
        ]
    )
    rows = (legality_codes(scenario, table) == 0) & (broken_by_plan(around.require, table) == 0)
    table = table.rows(np.flatnonzero(rows))
    feasible = Feasible(scenario, around.require, 0)
    fitting, peak = feasible.fits(table)
    table, peak = table.rows(np.flatnonzero(fitting)), peak[fitting]
    if len(table) == 0:
        return
    step = table_steps(scenario, table)
    first = np.flatnonzero(step == step.min())[:1]
    seconds = step[first]
    if plan.pipeline_parallel > 1:
        seconds = above(seconds, simulated_steps(scenario, table.rows(first)))
    found = table.plan(int(first[0]))
    if not feasible.broken(table, peak)(first, seconds)[0]:
        words, options = f"recompute {found.recompute}", f"--fix recompute={found.recompute}"
        yield around.saving(words, options, float(seconds[0]), found)


def _fewer_accelerators(around: _Around) -> Iterator[Saving | None]:
    """Yield half of the accelerators, and nodes in a number that can be split in many ways.

    Not searched where computation alone would take longer than the best plan's step.
    """
    cluster, compute = around.scenario.cluster, around.best.time.parts.compute
    if cluster.accelerator.device == "cpu" or cluster.levels:
        return
    sizes = {cluster.num_gpus // 2} if cluster.num_gpus % 2 == 0 else set()
    if not _is_smooth(cluster.num_nodes):
        fewer = next(n for n in range(cluster.num_nodes - 1, 0, -1) if _is_smooth(n))
        sizes.add(fewer * cluster.gpus_per_node)
    for size in sorted(sizes, reverse=True):
        if compute * cluster.num_gpus / size >= (1.0 - LEAST) * around.step:
            continue
        part = part_of(cluster, size)
        fixed = {name: value for name, value in around.fixed.items() if name != "data_parallel"}
        given, used, what = cluster.num_gpus, size, "accelerators"
        if cluster.num_nodes > 1:
            given, used, what = cluster.num_nodes, part.num_nodes, "nodes"
        words = f"{used:,} of {given:,} {what}"
        priced = replace(around.scenario, cluster=part)
        yield around.search(words, f"on {part.name} ({words})", priced, fixed, numerics=False)


def _is_smooth(number: int) -> bool:
    for prime in SMOOTH:
        while number % prime == 0:
            number //= prime
    return number == 1
