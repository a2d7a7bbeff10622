"""Candidate changes to make a plan fit, in the order in which people try them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from msgspec import Struct, structs

from cost_models.compute.rates import CUDA
from cost_models.model.lora import adapted, without_adapters
from cost_models.plan.plan import SEARCHED_RECOMPUTE, Offload, Plan
from cost_models.plan.workload import Optimizer
from cost_models.scenario import Scenario
from hardware_profiles.cluster.build import build_cluster
from hardware_profiles.cluster.catalogue import accelerators
from hardware_profiles.cluster.schema import Accelerator, Cluster
from hardware_profiles.errors import InputError
from hardware_profiles.fields import names_in
from hardware_profiles.progress import tracked
from hardware_profiles.software.trainer import software_profile
from planner.assessment.reach import fewest_recomputed, load, longest_sequence, with_seq_len
from planner.assessment.too_small import too_small
from planner.assessment.verdict import memory_budget
from planner.request.command import TAKE_BACK, batch_option, cluster_argument, replan_options
from planner.request.divisors import divisors
from planner.search.first_plan import FLAT, first_plan, is_complete

PLAN, TRAINING, HARDWARE = "same training", "another training", "more hardware"
MAX_NODES: Final = 1024
CARDS_OF_A_NODE: Final = 8  # in the largest usual server
ADAPTER_RANK: Final = 16  # with twice the rank as alpha: the default of --lora
QUANTISING: Final = "hf-trainer"  # with bitsandbytes: every matrix of a frozen base in 4 bits
SMALL_OPTIMIZER: Final[Optimizer] = "adamw_8bit"
# fields of a plan that share out its accelerators
DEGREES: Final = names_in("""
    data_parallel tensor_parallel pipeline_parallel context_parallel expert_parallel dp_replicate
    num_microbatches
""")
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


class Change(Struct, frozen=True):
    """A changed scenario, or changed fields of its plan, not priced yet."""

    group: str
    kind: str  # only one change of each kind is listed
    change: str  # in words
    options: str  # to append to the user's command
    scenario: Scenario
    fixed: Mapping[str, Any]  # the given fields of the plan, after the change
    plan: Plan | None = None  # the only plan of the change; None: it is searched


class PinnedPlan(Struct, frozen=True):
    """A scenario, the given fields of the plan, and the plan that does not fit."""

    scenario: Scenario
    plan: Plan
    fixed: Mapping[str, Any] = {}

    @property
    def even(self) -> Scenario:
        """The scenario without numbers of recomputed layers for each stage."""
        return replace(self.scenario, stage_recompute_layers=None)

    @property
    def recomputes_some(self) -> bool:
        """Whether the plan recomputes a given number of layers only."""
        given = self.scenario.stage_recompute_layers is not None
        return given or self.fixed.get("recompute_layers", 0) > 0

    def change(self, group: str, kind: str, words: str, options: str, **changed: Any) -> Change:
        """Return a change of the given fields of the plan.

        A complete plan keeps its other fields; else these are searched anew.
        """
        fixed = {**self.fixed, **changed}
        whole = replace(self.plan, **changed) if is_complete(self.fixed) else None
        own = self.even if "recompute" in changed else self.scenario
        return Change(group, kind, words, options, own, fixed, whole)

    def with_scenario(
        self, group: str, kind: str, words: str, options: str, scenario: Scenario, **changed: Any
    ) -> Change:
        """Return a change of the scenario, with changed fields of the plan."""
        one = self.change(group, kind, words, options, **changed)
        return structs.replace(one, scenario=scenario)

    def replanned(
        self, group: str, kind: str, words: str, options: str, scenario: Scenario, plan: Plan
    ) -> Change:
        """Return a change to another plan, given as a whole."""
        again = replan_options(scenario, plan, self.plan, reset_recompute=self.recomputes_some)
        words_of = f"{options} {again}".strip()
        return Change(group, kind, words, words_of, scenario, plan.to_dict(), plan)


def other_plans(pinned: PinnedPlan) -> Iterator[Change]:
    """Yield other plans for the same training on the same accelerators.

    Nothing but offload is left where no field of the plan is given: the search tried all others.
    """
    fixed = pinned.fixed
    yield from _smaller_micro_batches(pinned)
    if "recompute" in fixed:
        yield from _more_recomputation(pinned)
    for stage in range(fixed.get("zero_stage", 3) + 1, 4):
        options = f"--zero {stage}"
        yield pinned.change(PLAN, "zero", f"shard more: ZeRO-{stage}", options, zero_stage=stage)
    if fixed.get("micro_batch_size", 1) > 1 and "recompute" in fixed:
        yield _micro_batches_of(
            pinned, 1, "both", "micro-batch size 1 and recompute full", **_all_layers()
        )
    if fixed and pinned.scenario.layer_ranges is None:
        found = first_plan(pinned.even, {}, common_only=True)
        if found.plan is not None:
            words = "another plan on the same cluster"
            yield pinned.replanned(PLAN, "search", words, "", pinned.even, found.plan)


def _all_layers() -> dict[str, Any]:
    return {"recompute": "full", "recompute_layers": 0, "recompute_every": 0}


def _smaller_micro_batches(pinned: PinnedPlan) -> Iterator[Change]:
    """Yield smaller given micro-batches, in a larger number."""
    for size in reversed(divisors(pinned.fixed.get("micro_batch_size", 1))[:-1]):
        yield _micro_batches_of(pinned, size, "micro-batch", f"micro-batch size {size}")


def _micro_batches_of(
    pinned: PinnedPlan, size: int, kind: str, words: str, **changed: Any
) -> Change:
    """Return smaller micro-batches of the same global batch."""
    options = [f"--micro-batch-size {size}"]
    if changed:
        options.append("--recompute full" + (TAKE_BACK if pinned.recomputes_some else ""))
    options.append(batch_option(pinned.scenario.workload))
    fixed = pinned.fixed
    if "num_microbatches" in fixed or is_complete(fixed):
        share = pinned.plan.micro_batch_size // size
        changed["num_microbatches"] = pinned.plan.num_microbatches * share
        options.append(f"--num-microbatches {changed['num_microbatches']}")
    changed["micro_batch_size"] = size
    return pinned.change(PLAN, kind, words, " ".join(options), **changed)


def _more_recomputation(pinned: PinnedPlan) -> Iterator[Change]:
    """Yield more recomputation than given: the least first."""
    fixed, taken = pinned.fixed, TAKE_BACK if pinned.recomputes_some else ""
    given = SEARCHED_RECOMPUTE.index("full")
    if fixed["recompute"] in SEARCHED_RECOMPUTE:
        given = SEARCHED_RECOMPUTE.index(fixed["recompute"])
    for recompute in SEARCHED_RECOMPUTE[given + 1 : -1]:
        changed = {**_all_layers(), "recompute": recompute}
        words, options = f"recompute {recompute}", f"--recompute {recompute}{taken}"
        yield pinned.change(PLAN, "recompute", words, options, **changed)
    if given < SEARCHED_RECOMPUTE.index("full") or pinned.recomputes_some:
        if fewest := fewest_recomputed(pinned.even, pinned.plan):
            yield pinned.change(
                PLAN,
                "recompute",
                f"recompute {fewest} layers of every stage",
                f"--recompute full --recompute-layers {fewest}",
                **{**_all_layers(), "recompute_layers": fewest},
            )
        options = f"--recompute full{taken}"
        yield pinned.change(PLAN, "recompute", "recompute full", options, **_all_layers())


def offloads(pinned: PinnedPlan) -> Iterator[Change]:
    """Yield the offload with which the fastest plan fits that is found; then that to drives."""
    yield from _more_offload(pinned)
    given = pinned.fixed.get("offload", "none")
    device = pinned.fixed.get("offload_device", "cpu")
    if given not in ("none", "activations") and device == "cpu" and pinned.scenario.cluster.nvme:
        words, options = "offload to NVMe drives", "--offload-device nvme"
        yield pinned.change(PLAN, "offload", words, options, offload_device="nvme")


def _more_offload(pinned: PinnedPlan) -> Iterator[Change]:
    if not pinned.scenario.on_gpu or pinned.scenario.cluster.accelerator.host_bandwidth is None:
        return
    given: Offload = pinned.fixed.get("offload", "none")
    fixed, device = pinned.fixed, pinned.fixed.get("offload_device", "cpu")
    scenario = pinned.scenario
    more = tuple(one for one in MORE_OFFLOAD[given] if not too_small(scenario, one, device))
    if not more:
        return
    if not is_complete(fixed):
        free = {name: value for name, value in fixed.items() if name != "offload"}
        for pins in ({**FLAT, **free}, free):
            found = first_plan(scenario, pins, more, common_only=True)
            if found.plan is not None:
                more = (found.plan.offload,)
                break
        else:
            return
    for offload in more:
        words = f"offload {OFFLOADED[offload]} to the host"
        yield pinned.change(PLAN, "offload", words, f"--offload {offload}", offload=offload)


def sixteen_bits(pinned: PinnedPlan) -> Iterator[Change]:
    """Yield the training of all weights in bf16, without fp32 copies, and with 8-bit states."""
    scenario, workload = pinned.scenario, pinned.scenario.workload
    if not (workload.precision == "bf16" and workload.master_weights and not workload.freeze):
        return
    if workload.adapter == "none" and workload.optimizer in ("adam", "adamw", SMALL_OPTIMIZER):
        lean = replace(workload, optimizer=SMALL_OPTIMIZER, master_weights=False)
        yield pinned.with_scenario(
            TRAINING,
            "16 bits",
            "weights in bf16 alone, 8-bit states",
            f"--optimizer {SMALL_OPTIMIZER} --no-master-weights",
            replace(scenario, workload=lean),
        )


def other_trainings(pinned: PinnedPlan) -> Iterator[Change]:
    """Yield changed trainings: a smaller batch or optimizer, adapters, shorter sequences."""
    scenario, plan = pinned.scenario, pinned.plan
    workload = scenario.workload
    yield from _smaller_batches(pinned)
    if workload.adapter == "none":
        if workload.optimizer in ("adam", "adamw"):
            small = replace(workload, optimizer=SMALL_OPTIMIZER)
            yield pinned.with_scenario(
                TRAINING,
                "optimizer",
                "an optimizer with 8-bit states",
                f"--optimizer {SMALL_OPTIMIZER}",
                replace(scenario, workload=small),
            )
        for adapter in () if workload.freeze else ("lora", "qlora"):
            yield from _adapters(pinned, adapter)
    elif workload.adapter == "lora":
        yield _quantised_base(pinned)
    elif workload.adapter_targets != "all":
        yield from _quantised_wholly(pinned)
    if length := longest_sequence(scenario, plan, workload.seq_len - 1):
        words, shorter = f"sequences of {length:,} tokens", with_seq_len(scenario, length)
        yield pinned.with_scenario(TRAINING, "sequence", words, f"--seq-len {length}", shorter)


def _smaller_batches(pinned: PinnedPlan) -> Iterator[Change]:
    """Yield smaller given micro-batches in the same number, so that no gradients are summed up."""
    scenario, given = pinned.scenario, pinned.fixed.get("micro_batch_size", 1)
    workload = scenario.workload
    for size in reversed(divisors(given)[:-1]):
        batch = workload.global_batch_size * size // given
        yield pinned.with_scenario(
            TRAINING,
            "batch",
            f"micro-batch size {size}, global batch {batch:,}",
            f"--micro-batch-size {size} --global-batch-size {batch}",
            replace(scenario, workload=replace(workload, global_batch_size=batch)),
            micro_batch_size=size,
        )


def _adapters(pinned: PinnedPlan, adapter: str) -> Iterator[Change]:
    scenario = pinned.scenario
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
    yield pinned.with_scenario(
        TRAINING,
        adapter,
        f"adapters of rank {rank} alone, {frozen}",
        f"--{adapter} {rank}" + (f" --lora-targets {targets}" if experts else ""),
        replace(scenario, model=model, workload=workload),
    )


def _quantised_base(pinned: PinnedPlan) -> Change:
    """Return the same adapters on a base in 4 bits."""
    scenario = pinned.scenario
    workload = replace(scenario.workload, adapter="qlora")
    return pinned.with_scenario(
        TRAINING,
        "qlora",
        "the frozen base in 4 bits, --qlora instead of --lora",
        f"--qlora {workload.adapter_rank}",
        _adapted_anew(replace(scenario, workload=workload)),
    )


def _quantised_wholly(pinned: PinnedPlan) -> Iterator[Change]:
    """Yield a trainer that quantises the matrices without adapters too."""
    scenario = pinned.scenario
    if scenario.software.frozen.quantises_every_matrix:
        return
    software = software_profile(QUANTISING)
    yield pinned.with_scenario(
        TRAINING,
        "trainer",
        "a trainer that quantises every matrix",
        f"--software {software.name}",
        _adapted_anew(replace(scenario, software=software)),
    )


def _adapted_anew(scenario: Scenario) -> Scenario:
    """Return the scenario with the adapters of its workload, as its trainer makes them."""
    every = scenario.software.frozen.quantises_every_matrix
    base = without_adapters(scenario.model)
    model = adapted(base, scenario.workload, quantises_every_matrix=every)
    return replace(scenario, model=model)


def larger_accelerators(pinned: PinnedPlan) -> Iterator[Change]:
    """Yield accelerators with more memory that are at least as fast, the smallest memory first."""
    scenario = pinned.scenario
    if not scenario.on_gpu:
        return
    cluster, precision = scenario.cluster, scenario.workload.precision
    own = cluster.accelerator
    # the smallest plan needs the same memory everywhere
    needed = max(1.05, load(scenario, pinned.plan)) * _usable(own)
    for accelerator in sorted(accelerators(), key=_usable):
        if accelerator.device != "gpu" or _usable(accelerator) < needed:
            continue
        if not _same_programs(accelerator, own) or precision not in accelerator.peak_flops:
            continue
        if accelerator.peak_flops[precision].value < own.peak_flops[precision].value:
            continue
        larger = build_cluster(
            accelerator, num_nodes=cluster.num_nodes, gpus_per_node=cluster.gpus_per_node
        )
        changed = replace(scenario, cluster=larger)
        name = cluster_argument(larger)
        if name is None:
            continue
        words = f"{cluster.num_gpus} {accelerator.name} instead"
        options = f"{name} {batch_option(scenario.workload)}"
        yield pinned.with_scenario(HARDWARE, "accelerator", words, options, changed)


def _usable(accelerator: Accelerator) -> float:
    return memory_budget(accelerator).size


def more_accelerators(pinned: PinnedPlan) -> Iterator[Change]:
    """Yield clusters of more accelerators, the smallest first; the batch may have to grow."""
    scenario = pinned.scenario
    cluster = scenario.cluster
    if cluster.levels or not scenario.on_gpu:
        return  # undefined for an irregular tree
    for larger in tracked(list(larger_clusters(cluster))):
        batch = max(scenario.workload.global_batch_size, larger.num_gpus)
        workload = replace(scenario.workload, global_batch_size=batch)
        changed = replace(pinned.even, cluster=larger, workload=workload)
        fixed = pinned.fixed
        if too_small(changed, fixed.get("offload", "none"), fixed.get("offload_device", "cpu")):
            continue
        in_one = larger.num_nodes == 1
        words = (
            f"{larger.num_gpus} accelerators in one node"
            if in_one
            else f"{larger.num_nodes} nodes ({larger.num_gpus} accelerators)"
        )
        if batch != scenario.workload.global_batch_size:
            words += f" and a global batch of {batch:,}"
        name = cluster_argument(larger)
        name = name or f"(nodes = {larger.num_nodes} in the cluster's file)"
        if not (set(pinned.fixed) & {*DEGREES, "recompute_layers"}):
            options = f"{name} {batch_option(workload)}"
            yield pinned.with_scenario(HARDWARE, "nodes", words, options, changed)
            continue
        found = first_plan(changed, {}, common_only=True)
        if found.plan is not None:
            yield pinned.replanned(HARDWARE, "nodes", words, name, changed, found.plan)


def larger_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """Yield clusters with twice the accelerators and so on: full nodes before more nodes."""
    cards = cluster.gpus_per_node
    while cluster.num_nodes == 1 and 2 * cards <= CARDS_OF_A_NODE:
        cards *= 2
        yield build_cluster(cluster.accelerator, num_nodes=1, gpus_per_node=cards)
    nodes = 2 * cluster.num_nodes
    while nodes <= MAX_NODES:
        if cards == cluster.gpus_per_node:
            yield resized(cluster, nodes)
        else:
            yield build_cluster(cluster.accelerator, num_nodes=nodes, gpus_per_node=cards)
        nodes *= 2


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
        name = f"{num_nodes}x{cluster.gpus_per_node}x{cluster.accelerator.words}"
        return replace(cluster, name=name, num_nodes=num_nodes, tiers=tiers)
    return build_cluster(
        cluster.accelerator, num_nodes=num_nodes, gpus_per_node=cluster.gpus_per_node
    )
