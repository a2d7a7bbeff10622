"""Candidate changes to make a plan fit: to the plan, the training or the hardware."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from cost_models.memory.optimizer_states import OPTIMIZER_TRAITS
from cost_models.model.lora import adapted, without_adapters
from cost_models.plan.plan import SEARCHED_RECOMPUTE, Offload, Plan
from cost_models.plan.workload import Optimizer
from cost_models.scenario import Scenario
from hardware_profiles.cluster.build import build_cluster
from hardware_profiles.cluster.catalogue import accelerators
from hardware_profiles.cluster.schema import Accelerator, Cluster
from hardware_profiles.errors import InputError
from planner.assessment.reach import fits, largest, load, longest_sequence, with_seq_len
from planner.assessment.verdict import budget_bytes
from planner.request.command import TAKE_BACK, cluster_argument, rebatch_options, replan_options
from planner.search.search import search

PLAN, TRAINING, HARDWARE = "same training", "another training", "more hardware"
MAX_NODES: Final = 1024
LONG_SEQUENCE: Final = 8192  # tokens; context parallelism is tried from this length on
ADAPTER_RANK: Final = 16  # with twice the rank as alpha: the default of --lora
SMALL_OPTIMIZER: Final[Optimizer] = "adamw_8bit"
# kinds of changes that invalidate numbers of recomputed layers for each stage
RESETS_STAGES: Final = ("recompute", "both", "tensor", "pipeline", "context", "search")
# fields of the plans that are searched first; other values are searched if none of these fits
SIMPLE: Final[dict[str, Any]] = {
    "pipeline_schedule": "1f1b",
    "virtual_stages": 1,
    "dp_replicate": 1,
    "recompute_layers": 0,
}
CUDA: Final = (
    "Pascal",
    "Volta",
    "Turing",
    "Ampere",
    "Ada",
    "Hopper",
    "Blackwell",
    "Blackwell RTX",
    "Blackwell Ultra",
)
# for each value of Plan.offload, values that offload more, the least first
MORE_OFFLOAD: Final[dict[Offload, tuple[Offload, ...]]] = {
    "none": ("optimizer", "activations", "optimizer+activations", "weights"),
    "optimizer": ("optimizer+activations", "weights"),
    "activations": ("optimizer+activations", "weights+activations"),
    "optimizer+activations": ("weights+activations",),
    "weights": ("weights+activations",),
    "weights+activations": (),
}
OFFLOADED: Final[dict[Offload, str]] = {
    "optimizer": "optimizer",
    "activations": "activations",
    "optimizer+activations": "optimizer and activations",
    "weights": "weights, gradients and optimizer",
    "weights+activations": "weights, gradients, optimizer and activations",
}


@dataclass(frozen=True, slots=True)
class Change:
    """A changed scenario or plan, not priced yet."""

    group: str
    kind: str  # only the cheapest change of each kind is listed
    words: str
    options: str  # to append to the user's command
    scenario: Scenario
    plan: Plan


def other_plans(
    scenario: Scenario, plan: Plan, known_unfit: Sequence[str] = ()
) -> Iterator[Change]:
    """Yield other plans for the same training on the same accelerators.

    ``known_unfit``: values of Plan.offload for which a search found no plan that fits.
    """
    even = without_own_stages(scenario)
    if scenario.stage_recompute_layers is not None or plan.offload_device != "cpu":
        known_unfit = ()  # the earlier search had other constraints
    some = recomputes_some(scenario, plan)

    def change(kind: str, words: str, options: str, changed: Plan) -> Change:
        own = even if kind in RESETS_STAGES else scenario
        return Change(PLAN, kind, words, options, own, changed)

    for recompute in SEARCHED_RECOMPUTE[1:]:
        changed = replace(plan, recompute=recompute, recompute_layers=0, recompute_every=0)
        options = f"--recompute {recompute}" + (TAKE_BACK if some else "")
        yield change("recompute", f"recompute {recompute}", options, changed)
    if fewest := _fewest_recomputed(even, plan):
        changed = _recomputing(plan, fewest)
        options = f"--recompute full --recompute-layers {fewest}"
        yield change("recompute", f"recompute {fewest} layers of every stage", options, changed)
    for stage in range(plan.zero_stage + 1, 4):
        changed = replace(plan, zero_stage=stage)
        yield change("zero", f"shard more: ZeRO-{stage}", f"--zero {stage}", changed)
    for size in _divisors(plan.micro_batch_size):
        count = plan.num_microbatches * plan.micro_batch_size // size
        changed = replace(plan, micro_batch_size=size, num_microbatches=count)
        options = f"--micro-batch-size {size} {rebatch_options(scenario, changed, plan)}"
        yield change("micro-batch", f"micro-batch size {size}", options, changed)
    if plan.micro_batch_size > 1 and (some or plan.recompute != "full"):
        changed = replace(
            plan,
            micro_batch_size=1,
            num_microbatches=plan.num_microbatches * plan.micro_batch_size,
            recompute="full",
            recompute_layers=0,
            recompute_every=0,
        )
        options = (
            f"--micro-batch-size 1 --recompute full {rebatch_options(scenario, changed, plan)}"
        )
        options += TAKE_BACK if some else ""
        yield change("both", "micro-batch size 1 and recompute full", options, changed)
    whole = plan if not some else replace(plan, recompute_layers=0, recompute_every=0)
    for kind, words, changed in _more_parallel(scenario, whole):
        yield change(
            kind,
            words,
            replan_options(scenario, changed, plan, reset_recompute=some),
            changed,
        )
    offloaded = [replace(plan, offload=more) for more in MORE_OFFLOAD[plan.offload]]
    for changed in offloaded if scenario.on_gpu else ():
        options = f"--offload {changed.offload}"
        yield change("offload", _offload_words(changed.offload), options, changed)
    if best := None if "none" in known_unfit else _best(even):
        options = replan_options(scenario, best, plan, reset_recompute=some)
        yield change("search", "another plan on the same cluster", options, best)
    elif scenario.on_gpu and not any(fits(scenario, changed) for changed in offloaded):
        for offload in MORE_OFFLOAD[plan.offload]:
            if offload in known_unfit:
                continue
            best = _best(even, offload=offload, offload_device=plan.offload_device)
            if best is not None and fits(even, best):
                words = f"{_offload_words(offload)}, under another plan"
                yield change(
                    "search",
                    words,
                    replan_options(scenario, best, plan, reset_recompute=some),
                    best,
                )
                return


def _offload_words(offload: Offload) -> str:
    """Describe an offload in words; offloading weights includes gradients and optimizer."""
    return f"offload {OFFLOADED[offload]} to the host"


def _more_parallel(scenario: Scenario, plan: Plan) -> Iterator[tuple[str, str, Plan]]:
    """Yield plans with more tensor, pipeline or context and less data parallelism."""
    for ranks in _divisors(plan.data_parallel // plan.dp_replicate, whole=True)[::-1]:
        if ranks == 1:
            continue
        fewer = replace(
            plan,
            data_parallel=plan.data_parallel // ranks,
            num_microbatches=plan.num_microbatches * ranks,
        )
        tensor = plan.tensor_parallel * ranks
        if tensor <= scenario.cluster.gpus_per_node:
            changed = replace(fewer, tensor_parallel=tensor, sequence_parallel=True)
            yield "tensor", f"tensor parallel {tensor}", changed
        pipeline = plan.pipeline_parallel * ranks
        if scenario.layer_ranges is None and pipeline * plan.virtual_stages <= (
            scenario.model.num_layers
        ):
            changed = replace(fewer, pipeline_parallel=pipeline)
            yield "pipeline", f"pipeline parallel {pipeline}", changed
        if scenario.workload.seq_len >= LONG_SEQUENCE:
            context = plan.context_parallel * ranks
            changed = replace(fewer, context_parallel=context)
            yield "context", f"context parallel {context}", changed


def _divisors(number: int, *, whole: bool = False) -> list[int]:
    """Return the divisors of a number, largest first; the number itself only if ``whole``."""
    most = number if whole else number // 2
    return [n for n in range(most, 0, -1) if number % n == 0]


def _recomputing(plan: Plan, count: int) -> Plan:
    return replace(plan, recompute="full", recompute_layers=count, recompute_every=0)


def _fewest_recomputed(scenario: Scenario, plan: Plan) -> int:
    """Return the fewest recomputed layers of every stage that fit (more never need more memory)."""
    smallest = scenario.model.num_layers // plan.num_stages

    def load_without(layers: int) -> float:
        return load(scenario, _recomputing(plan, smallest - layers))

    most = largest(load_without, smallest - 1)
    return smallest - most if most else 0


def _best(scenario: Scenario, **fixed: Any) -> Plan | None:
    """Return the fastest of the ``SIMPLE`` plans that fit; if none does, the fastest of all."""
    if too_small(scenario, fixed.get("offload", "none")):
        return None  # without a search
    for pins in ({**SIMPLE, **fixed}, fixed):
        plans = search(scenario, pins, top=1).plans
        if plans and fits(scenario, plans[0]):
            return plans[0]
    return plans[0] if plans else None


def without_own_stages(scenario: Scenario) -> Scenario:
    """Return the scenario without numbers of recomputed layers for each stage."""
    return replace(scenario, stage_recompute_layers=None)


def recomputes_some(scenario: Scenario, plan: Plan) -> bool:
    """Whether the plan recomputes a given number of layers only."""
    return plan.recompute_layers > 0 or scenario.stage_recompute_layers is not None


def other_trainings(scenario: Scenario, plan: Plan) -> Iterator[Change]:
    """Yield changed trainings: a smaller batch or optimizer, adapters, shorter sequences."""
    workload = scenario.workload
    yield from _smaller_batches(scenario, plan)
    if workload.adapter == "none":
        if workload.optimizer in ("adam", "adamw"):
            small = replace(workload, optimizer=SMALL_OPTIMIZER)
            yield Change(
                TRAINING,
                "optimizer",
                "an optimizer with 8-bit states",
                f"--optimizer {SMALL_OPTIMIZER}",
                replace(scenario, workload=small),
                plan,
            )
        for adapter in () if workload.freeze else ("lora", "qlora"):
            yield from _adapters(scenario, plan, adapter)
    elif workload.adapter == "lora":
        yield from _quantised_base(scenario, plan)
    if length := longest_sequence(scenario, plan, workload.seq_len - 1):
        yield Change(
            TRAINING,
            "sequence",
            f"sequences of {length:,} tokens",
            f"--seq-len {length}",
            with_seq_len(scenario, length),
            plan,
        )


def _smaller_batches(scenario: Scenario, plan: Plan) -> Iterator[Change]:
    """Yield smaller micro-batches in the same number, so that no more gradients are summed up."""
    workload = scenario.workload
    for size in _divisors(plan.micro_batch_size):
        batch = workload.global_batch_size * size // plan.micro_batch_size
        yield Change(
            TRAINING,
            "batch",
            f"micro-batch size {size}, global batch {batch:,}",
            f"--micro-batch-size {size} --global-batch-size {batch}",
            replace(scenario, workload=replace(workload, global_batch_size=batch)),
            replace(plan, micro_batch_size=size),
        )


def _adapters(scenario: Scenario, plan: Plan, adapter: str) -> Iterator[Change]:
    experts = any(kind.feed_forward.num_experts for kind in scenario.model.kinds)
    targets, rank = "attention" if experts else scenario.workload.adapter_targets, ADAPTER_RANK
    workload = replace(
        scenario.workload,
        adapter=adapter,  # type: ignore[arg-type]
        adapter_rank=rank,
        adapter_targets=targets,
        adapter_alpha=2.0 * rank,
    )
    every = scenario.software.frozen.quantises_every_matrix
    try:
        model = adapted(scenario.model, workload, quantises_every_matrix=every)
    except InputError:  # no matrix to adapt
        return
    frozen = "its frozen base in 4 bits" if adapter == "qlora" else "the base frozen"
    yield Change(
        TRAINING,
        adapter,
        f"adapters of rank {rank} alone, {frozen}",
        f"--{adapter} {rank}" + (f" --lora-targets {targets}" if experts else ""),
        replace(scenario, model=model, workload=workload),
        plan,
    )


def _quantised_base(scenario: Scenario, plan: Plan) -> Iterator[Change]:
    """Yield the same adapters on a base in 4 bits."""
    workload = replace(scenario.workload, adapter="qlora")
    every = scenario.software.frozen.quantises_every_matrix
    base = without_adapters(scenario.model)
    model = adapted(base, workload, quantises_every_matrix=every)
    yield Change(
        TRAINING,
        "qlora",
        "the frozen base in 4 bits, --qlora instead of --lora",
        f"--qlora {workload.adapter_rank}",
        replace(scenario, model=model, workload=workload),
        plan,
    )


def other_hardware(scenario: Scenario, plan: Plan) -> Iterator[Change]:
    """Yield larger accelerators for the same plan, and more nodes for the best plan."""
    if not scenario.on_gpu:
        return
    yield from _larger_accelerator(scenario, plan)
    some = recomputes_some(scenario, plan)
    yield from _more_nodes(without_own_stages(scenario), plan, resets=some)


def _larger_accelerator(scenario: Scenario, plan: Plan) -> Iterator[Change]:
    """Yield the smallest larger accelerator of the catalogue on which the plan fits unchanged."""
    cluster = scenario.cluster
    have = cluster.accelerator.memory_capacity.value

    def memory(accelerator: Accelerator) -> float:
        return accelerator.memory_capacity.value

    for accelerator in sorted(accelerators(), key=memory):
        if accelerator.device != "gpu" or memory(accelerator) <= 1.05 * have:
            continue
        if not _same_programs(accelerator, cluster.accelerator):
            continue
        if scenario.workload.precision not in accelerator.peak_flops:
            continue
        larger = build_cluster(
            accelerator, num_nodes=cluster.num_nodes, gpus_per_node=cluster.gpus_per_node
        )
        name = cluster_argument(larger)
        changed = replace(scenario, cluster=larger)
        if name is not None and fits(changed, plan):
            words = f"{cluster.num_gpus} {accelerator.name} instead"
            options = f"{name} {replan_options(scenario, plan, plan)}"
            yield Change(HARDWARE, "accelerator", words, options, changed, plan)
            return


def _same_programs(one: Accelerator, other: Accelerator) -> bool:
    """Whether two accelerators run the same programs: both CUDA, or of one product line."""
    lines = [
        "CUDA"
        if accelerator.architecture in CUDA
        else accelerator.architecture.rstrip("0123456789")
        for accelerator in (one, other)
    ]
    return lines[0] == lines[1]


def resized(cluster: Cluster, num_nodes: int) -> Cluster:
    """Return the cluster with another number of equal nodes."""
    if cluster.num_nodes > 1 and num_nodes > 1:  # keeps a user-defined network
        outer = replace(cluster.tiers[-1], domain_size=num_nodes * cluster.gpus_per_node)
        tiers = (*cluster.tiers[:-1], outer)
        name = f"{num_nodes}x{cluster.gpus_per_node}x{cluster.accelerator.name}"
        return replace(cluster, name=name, num_nodes=num_nodes, tiers=tiers)
    return build_cluster(
        cluster.accelerator, num_nodes=num_nodes, gpus_per_node=cluster.gpus_per_node
    )


def least_bytes(scenario: Scenario, offload: Offload = "none") -> float:
    """Return the least bytes that all accelerators together have to keep, however many they are.

    One copy of the trained weights in the precision of the updates, and the optimizer states,
    unless they are offloaded.
    """
    workload, rule = scenario.workload, OPTIMIZER_TRAITS[scenario.workload.optimizer]
    if "weights" in offload:
        return 0.0
    kept = rule.is_uniform and not rule.paged and "optimizer" not in offload
    states = workload.state_bytes * rule.states if kept else 0.0
    return scenario.model.num_trainable_parameters * (workload.master_bytes + states)


def too_small(scenario: Scenario, offload: Offload = "none") -> bool:
    """Whether no plan can fit: even ``least_bytes`` exceed the budgets of all accelerators."""
    if not scenario.on_gpu:
        return False
    shared, software = least_bytes(scenario, offload) / scenario.cluster.num_gpus, scenario.software
    runtime = software.memory.context_bytes + software.memory.allocator_slack * shared
    return shared + runtime > budget_bytes(scenario.cluster)


def _more_nodes(scenario: Scenario, plan: Plan, *, resets: bool) -> Iterator[Change]:
    """Yield the fewest nodes, by doubling, with a plan that fits; the batch may have to grow."""
    if scenario.cluster.levels:
        return  # undefined for an irregular tree
    nodes = scenario.cluster.num_nodes * 2
    while nodes <= MAX_NODES:
        larger = resized(scenario.cluster, nodes)
        batch = max(scenario.workload.global_batch_size, larger.num_gpus)
        workload = replace(scenario.workload, global_batch_size=batch)
        changed = replace(scenario, cluster=larger, workload=workload)
        words = f"{nodes} nodes ({larger.num_gpus} accelerators)"
        if batch != scenario.workload.global_batch_size:
            words += f" and a global batch of {batch:,}"
        best = _best(changed)
        if best is not None and fits(changed, best):
            name = cluster_argument(larger) or f"(nodes = {nodes} in the cluster's file)"
            options = f"{name} {replan_options(changed, best, plan, reset_recompute=resets)}"
            yield Change(HARDWARE, "nodes", words, options, changed, best)
            return
        nodes *= 2
