"""Pipeline stages of a traced module, with data parallelism and ZeRO.

Stages are contiguous in the order in which the module's nodes run (``cost_models.traced.graph``).
Dynamic programming over (remaining stages, first node) minimises the longest stage:

    longest(s, a) = min over b of max(time(a, b), longest(s - 1, b))

with time(a, b) the seconds of the passes of the nodes a..b and of their sends, and infinity if the
stage does not fit: under 1F1B a stage followed by r others keeps min(r + 1, m) micro-batches. The
step of the result is then simulated.

    memory     whole weights and gradients, w P each; optimizer states w P x states (/ d: ZeRO-1);
               saved tensors of the nodes and received tensors, for each micro-batch in flight;
               the largest working memory of a node; two of each message
    data       ZeRO 0 all-reduces the stage's gradients once a step, ZeRO 1 reduce-scatters them and
               all-gathers the weights

The executor trains traced modules over data ranks only; the stages are informative.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from msgspec import field
from numpy.typing import NDArray

from cost_models.arrays import Real
from cost_models.communication.ring_and_tree import COLLECTIVE_START, send
from cost_models.communication.seconds import achieved, axis_seconds
from cost_models.communication.traffic import Traffic
from cost_models.compute.elementwise import optimizer_seconds
from cost_models.compute.kernel_launch import host_wait
from cost_models.compute.rates import Rates, rates
from cost_models.memory.allocator import free_bytes
from cost_models.memory.optimizer_states import OPTIMIZER_TRAITS
from cost_models.memory.outside_torch import outside_bytes
from cost_models.plan.plan import Plan, PlanTable
from cost_models.step_time.optimizer_update import update_accesses
from cost_models.step_time.overlap import Hiding, exposed_data_seconds
from cost_models.step_time.parts import RankSeconds
from cost_models.step_time.pipeline_simulation import makespan
from cost_models.traced.graph import ModuleNodes, nodes_of
from cost_models.traced.memory import OPTIMIZER_COPIES
from cost_models.traced.module import OUTSIDE
from cost_models.uncertainty import MEMORY, interval
from hardware_profiles.cluster.links.groups import point_to_point_link
from hardware_profiles.fields import names_in
from hardware_profiles.record import Record, to_json
from planner.assessment.verdict import memory_budget
from planner.request.divisors import divisors
from planner.traced.scenario import TracedScenario

Floats = NDArray[np.float64]
MOST_STAGES: Final = 64
MOST_NODES: Final = 1_000
CHOSEN: Final = names_in("""
    pipeline_parallel data_parallel zero_stage recompute micro_batch_size num_microbatches
""")
MESSAGES: Final = 2.0  # buffers of each message: one in transfer, one in use


class CutStage(Record, frozen=True):
    """One stage: its nodes, seconds of one micro-batch, bytes."""

    first: str  # block
    last: str
    num_nodes: int = field(name="nodes")
    parameters: int
    forward: float = field(name="forward_seconds")
    backward: float = field(name="backward_seconds")
    peak: float = field(name="peak_bytes")
    sent: float = field(name="sent_bytes")  # of a micro-batch to the next stage


@dataclass(frozen=True, slots=True)
class Cut:
    """A module cut into stages, with the predicted step in seconds."""

    plan: Plan
    stages: tuple[CutStage, ...]
    step: float

    @property
    def peak(self) -> float:
        """Largest peak of all stages, in bytes."""
        return max(stage.peak for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            **{name: getattr(self.plan, name) for name in CHOSEN},
            "step_seconds": self.step,
            "peak_bytes": self.peak,
            "stages": to_json(self.stages),
        }


def best_cut(scenario: TracedScenario) -> Cut | None:
    """Return the fastest pipeline of stages that fit, over all divisors of the accelerators."""
    gpus, batch = scenario.cluster.num_gpus, scenario.global_batch_size
    found = []
    for stages in divisors(gpus):
        if not 1 < stages <= min(len(scenario.module.blocks), MOST_STAGES) or batch * stages % gpus:
            continue
        sizes = divisors(batch * stages // gpus)
        filling = [size for size in sizes if batch * stages // gpus // size >= stages]
        for micro, recompute in itertools.product(filling or sizes[:1], scenario.module.passes):
            cut = cut_into(scenario, _plan(scenario, stages, micro, recompute))
            found += [] if cut is None else [cut]
    return min(found, key=lambda cut: (cut.step, cut.peak), default=None)


def _plan(scenario: TracedScenario, stages: int, micro: int, recompute: Any) -> Plan:
    data = scenario.cluster.num_gpus // stages
    return Plan(
        data_parallel=data,
        pipeline_parallel=stages,
        zero_stage=1 if data > 1 else 0,
        recompute=recompute,
        micro_batch_size=micro,
        num_microbatches=scenario.global_batch_size // data // micro,
    )


def cut_into(scenario: TracedScenario, plan: Plan) -> Cut | None:
    """Return the stages that fit with the shortest longest stage; None if none fit."""
    costs = TracedStageCosts.of(scenario, plan)
    count, stages = len(costs.nodes), plan.pipeline_parallel
    if not stages <= count <= MOST_NODES:
        return None
    whole = costs.times()
    longest = np.full((stages + 1, count + 1), np.inf)
    chosen = np.zeros((stages + 1, count + 1), dtype=np.intp)
    longest[0, count] = 0.0
    for left in range(1, stages + 1):  # remaining stages, this one included
        flight = min(left, plan.num_microbatches)
        for first in range(count):
            peaks = costs.peaks(first, flight)
            each = np.where(peaks <= costs.max_peak, whole[first], np.inf)
            bounds = np.maximum(each, longest[left - 1])
            chosen[left, first] = int(np.argmin(bounds))
            longest[left, first] = bounds[chosen[left, first]]
    if not np.isfinite(longest[stages, 0]):
        return None
    ends = [0]
    for left in range(stages, 0, -1):
        ends.append(int(chosen[left, ends[-1]]))
    return costs.cut(ends)


@dataclass(frozen=True)
class TracedStageCosts:
    """Times and peaks of all contiguous ranges of nodes, for one plan."""

    scenario: TracedScenario
    plan: Plan
    nodes: ModuleNodes
    rate: Rates
    bandwidth: float  # to the next stage
    latency: float
    max_peak: float  # bytes, largest peak with which a stage fits

    @classmethod
    def of(cls, scenario: TracedScenario, plan: Plan) -> TracedStageCosts:
        """Return the costs of a module's nodes with a plan's micro-batches."""
        module, software = scenario.module, scenario.software
        rate = rates(scenario.cluster.accelerator, module.precision, software).of_unknown_shapes
        reached = scenario.cluster
        if scenario.on_gpu:
            reached = achieved(
                reached,
                software.communication.bus_efficiency,
                software.communication.network_efficiency,
            )
        bandwidth, latency = point_to_point_link(
            reached, plan.data_parallel, plan.pipeline_parallel
        )
        upper = interval(1.0, MEMORY)[1]
        return cls(
            scenario,
            plan,
            nodes_of(module, plan.recompute, plan.micro_batch_size, rate),
            rate,
            float(bandwidth),
            float(latency),
            memory_budget(scenario.cluster.accelerator).size / upper,
        )

    def passes(self, first: int, last: int | None = None) -> tuple[Floats, Floats]:
        """Return forward and backward seconds of the nodes first..last (default: by end)."""
        nodes, ends = self.nodes, slice(first, last)
        # data ranks gather and reduce block by block, and all nodes outside of blocks together
        group = self.rate.operator * self.scenario.software.host.group_operators
        group = group if self.plan.data_parallel > 1 else 0.0
        collectives = group * (1.0 + np.cumsum(np.array(nodes.blocks[ends]) != OUTSIDE))
        passes = []
        for work, starts, arrives in (
            (nodes.forward, nodes.starts_forward, nodes.crossing),
            (nodes.backward, nodes.starts_backward, nodes.returning),
        ):
            device = np.cumsum(work[ends])
            device = device + host_wait(np.cumsum(starts[ends]) + collectives, device, self.rate)
            # forward: sent to the next stage; backward: sent to the previous one
            moved = arrives[first + 1 : first + 1 + len(device)]
            if work is nodes.backward:
                moved = np.full(len(device), arrives[first])
            passes.append(device + np.where(moved > 0.0, self._sent(moved), 0.0))
        return passes[0], passes[1]

    def times(self) -> Floats:
        """Return seconds of one micro-batch, (first node, end of the nodes)."""
        count = len(self.nodes)
        found = np.full((count, count + 1), np.inf)
        for first in range(count):
            found[first, first + 1 :] = np.sum(self.passes(first), axis=0)
        return found

    def peaks(self, first: int, flight: int) -> Floats:
        """Return peak bytes of stages that begin with a node, by their end; infinity before it."""
        nodes, module = self.nodes, self.scenario.module
        every, trained = self.parameters[first]
        master = module.weight_bytes
        states = OPTIMIZER_TRAITS[self.scenario.workload.optimizer].states / self.plan.data_parallel
        states_bytes = master * (every + trained + states * trained) + module.buffer_bytes
        kept = np.cumsum(nodes.kept[first:]) + nodes.crossing[first]
        height = np.maximum.accumulate(nodes.working[first:])
        here = nodes.crossing[first] + nodes.returning[first]
        onward = nodes.crossing[first + 1 :] + nodes.returning[first + 1 :]
        busy = flight * kept + height + MESSAGES * (here + onward)
        copies = OPTIMIZER_COPIES[self.scenario.workload.optimizer] * master
        update = copies * float(module.tensors.largest())
        allocated = states_bytes + np.maximum(busy, update)
        software = self.scenario.software
        table = PlanTable.from_plans([self.plan])
        free = free_bytes(software, table, master * trained, np.maximum(busy, update))
        runtime = outside_bytes(software, self.scenario.cluster, table) + free
        found = np.full(len(nodes) + 1, np.inf)
        found[first + 1 :] = allocated + (runtime if self.scenario.on_gpu else 0.0)
        return found

    @cached_property
    def parameters(self) -> list[tuple[Floats, Floats]]:
        """Parameters of stages by first and last node, all and trained; shared ones count once."""
        return [self._parameters(first) for first in range(len(self.nodes))]

    def _parameters(self, first: int) -> tuple[Floats, Floats]:
        seen: set[int] = set()
        every, trained = [], []
        for used in self.nodes.parameters[first:]:
            fresh = [(size, learns) for n, size, learns in used if n not in seen]
            seen.update(n for n, *_ in used)
            every.append(float(sum(size for size, _ in fresh)))
            trained.append(float(sum(size for size, learns in fresh if learns)))
        return np.cumsum(every), np.cumsum(trained)

    def cut(self, ends: list[int]) -> Cut:
        """Return the stages with given ends, and their simulated step."""
        stages, once = [], []
        pairs = list(itertools.pairwise(ends))
        for place, (first, last) in enumerate(pairs):
            forward, backward = (float(seconds[-1]) for seconds in self.passes(first, last))
            every, trained = (float(count[last - first - 1]) for count in self.parameters[first])
            flight = min(len(pairs) - place, self.plan.num_microbatches)
            stages.append(
                CutStage(
                    first=self._name(range(first, last)),
                    last=self._name(range(last - 1, first - 1, -1)),
                    num_nodes=last - first,
                    forward=forward,
                    backward=backward,
                    peak=float(self.peaks(first, flight)[last]),
                    sent=float(self.nodes.crossing[last]),
                    parameters=round(every),
                )
            )
            once.append(self._once(forward, backward, trained))
        step = makespan(
            self.plan,
            [stage.forward for stage in stages],
            [stage.backward for stage in stages],
            [0.0] * len(stages),
        )
        return Cut(self.plan, tuple(stages), step + max(once))

    def _name(self, nodes: range) -> str:
        """Return the name of the first block of some nodes; of the first node without blocks."""
        blocks = [node for node in nodes if self.nodes.blocks[node] != OUTSIDE]
        return self.nodes.names[(blocks or nodes)[0]]

    def _sent(self, size: Floats) -> Real:
        start = COLLECTIVE_START if self.scenario.on_gpu else 0.0
        return send(size, self.bandwidth, self.latency) + start

    def _once(self, forward: float, backward: float, trained: float) -> float:
        """Return seconds of a stage once a step: exposed gradient reduction and the update."""
        scenario, table = self.scenario, PlanTable.from_plans([self.plan])
        whole = np.array([scenario.module.weight_bytes * trained])
        calls = np.array([1.0])
        shared = self.plan.data_parallel > 1
        kinds = ("reduce_scatter", "all_gather") if self.plan.zero_stage else ("all_reduce",)
        traffic = {("data", kind): Traffic(calls, whole) for kind in kinds if shared}
        seconds = axis_seconds(traffic, scenario.cluster, scenario.software, table)
        zero = np.zeros(1)
        mine = trained / (self.plan.data_parallel if self.plan.zero_stage else 1)
        rank = RankSeconds(
            compute=np.array([forward + backward]),
            recompute=zero,
            host=zero,
            tensor_communication=zero,
            pipeline_communication=zero,
            backward=np.array([backward]),
            weights=zero,
            data_communication=seconds["data"],
            optimizer=optimizer_seconds(
                mine, self.rate, update_accesses(scenario.workload, scenario.software)
            )
            + scenario.software.host.step_operators * self.rate.operator,
        )
        hiding = Hiding.of(scenario.software)
        exposed = exposed_data_seconds(rank, table, hiding, on_gpu=scenario.on_gpu)
        return float(np.ravel(exposed)[0]) + float(np.ravel(rank.optimizer)[0])
