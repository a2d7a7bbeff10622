"""``check()`` and ``estimate_memory()``: a live module, before its first step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cost_models.memory.parts import PART_WORDS
from cost_models.units import format_bytes, format_seconds
from hardware_profiles.arguments import names_arguments
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import ShardplanError
from hardware_profiles.terminal import say
from planner.answer.fit_answer import FitAnswer
from planner.api.fit import fit
from planner.assessment.assess import amounts
from planner.assessment.verdict import WORDS
from planner.live.description import LiveModel, cluster_of_run, describe_model, what_was_read
from planner.live.tracing import fit_live
from planner.request.options.choices import ClusterLike
from planner.text.answer import Answer
from planner.traced.answers import TracedFitAnswer

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn


@dataclass(frozen=True, repr=False)
class CheckAnswer(Answer):
    """Answer of ``check``: verdict, step time and largest part of the memory, in three lines."""

    live: LiveModel
    fit: FitAnswer | TracedFitAnswer

    @property
    def verdict(self) -> str:
        """fits, tight or does_not_fit."""
        return self.fit.verdict

    @property
    def fits(self) -> bool:
        """Whether it fits with its whole interval."""
        return self.verdict == "fits"

    @property
    def peak_bytes(self) -> float:
        """Predicted peak of the fullest accelerator."""
        return float(self.fit.assessment.memory.peak_bytes)

    @property
    def step_seconds(self) -> float:
        """Predicted time of an optimizer step."""
        return float(self.fit.assessment.time.step_seconds)

    @property
    def cluster(self) -> Cluster:
        """The cluster of the answer."""
        return self.fit.scenario.cluster

    @cached_property
    def ways_out(self) -> tuple[Any, ...]:
        """Changes with which it fits; they take a search, or a longer trace."""
        if isinstance(self.fit, FitAnswer):
            return self.fit.ways_out
        plan = {"zero_stage": self.fit.plan.zero_stage}
        plan["num_microbatches"] = self.fit.plan.num_microbatches
        return fit_live(self.live, self.cluster, plan, every_size=True).ways_out

    @property
    def lines(self) -> list[str]:
        """The verdict with peak and step time; the run as read; the largest parts or a fix."""
        return [self._verdict_line(), self._run_line(), self._last_line()]

    def _verdict_line(self) -> str:
        memory, budget = self.fit.assessment.memory, self.fit.assessment.budget
        likely = f"{format_bytes(memory.low_bytes)} to {format_bytes(memory.high_bytes)}"
        step = format_seconds(self.step_seconds)
        time: Any = self.fit.assessment.time
        if hasattr(time, "low_seconds"):
            low, high = format_seconds(time.low_seconds), format_seconds(time.high_seconds)
            step += f" ({low} to {high})"
        return (
            f"shardplan: {WORDS[self.fit.assessment.verdict]}: peak "
            f"{format_bytes(memory.peak_bytes)} of {format_bytes(budget.size)} (likely {likely}), "
            f"a step {step}"
        )

    def _run_line(self) -> str:
        plan, cluster = self.fit.plan, self.cluster
        batch = f"{plan.num_microbatches} x {plan.micro_batch_size} rows"
        if isinstance(self.fit, FitAnswer):
            batch += f" of {self.fit.scenario.workload.seq_len:,} tokens"
        ranks = f"{cluster.num_gpus} x {cluster.accelerator.name}"
        layout = f"ZeRO {plan.zero_stage}, " if cluster.num_gpus > 1 else ""
        software = self.fit.scenario.software.name
        return f"  {what_was_read(self.live)}; {batch}; {layout}{ranks}; {software}"

    def _last_line(self) -> str:
        sizes = amounts(self.fit.assessment.memory.parts)
        largest = sorted(sizes, key=lambda part: -sizes[part])[:3]
        words = ", ".join(f"{PART_WORDS[part]} {format_bytes(sizes[part])}" for part in largest)
        if self.verdict == "fits":
            return f"  largest: {words}"
        try:
            fixes = [str(way.change) for way in self.ways_out[:3]]
        except ShardplanError:
            fixes = []
        found = "; ".join(fixes) or "no single change that we know"
        return f"  largest: {words}; would fit with: {found}"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document of ``fit``, with the run as it was read."""
        return {**self.fit.to_dict(), "read": what_was_read(self.live), "lines": self.lines}

    def notebook_parts(self) -> Iterator[str]:
        """Yield the verdict, the run as it was read, the largest parts or a fix."""
        from planner.answer import notebook
        from planner.text.html_page import note

        step = f"A step takes about {format_seconds(self.step_seconds)}."
        yield notebook.verdict(self.fit.assessment, step)
        _, *others = self.lines
        yield from map(note, others)
        yield notebook.memory_bars(amounts(self.fit.assessment.memory.parts))

    def text(self, *, verbose: bool = False) -> str:
        """Return three lines; ``verbose``: followed by the answer of ``fit``."""
        lines = "\n".join(self.lines)
        return f"{lines}\n\n{self.fit.text(verbose=True)}" if verbose else lines

    def __str__(self) -> str:
        return self.text()


@dataclass(frozen=True, repr=False)
class MemoryEstimate(Answer):
    """Answer of ``estimate_memory``: the peak of the fullest accelerator, in parts, in bytes."""

    fit: FitAnswer | TracedFitAnswer

    @property
    def peak_bytes(self) -> float:
        """Predicted peak."""
        return float(self.fit.assessment.memory.peak_bytes)

    @property
    def parts(self) -> dict[str, float]:
        """Bytes of weights, gradients, optimizer states, activations and others at the peak."""
        return dict(amounts(self.fit.assessment.memory.parts))

    @property
    def table(self) -> pd.DataFrame:
        """Every term of the ledger with its formula, largest first; parts of a traced module."""
        import pandas as pd

        if isinstance(self.fit, FitAnswer):
            terms = self.fit.step_memory.terms
            rows = [(PART_WORDS[t.part], t.name, t.size, t.formula) for t in terms]
        else:
            rows = [(PART_WORDS[name], "", size, "traced") for name, size in self.parts.items()]
        found = pd.DataFrame(rows, columns=["part", "term", "bytes", "formula"])
        return found.sort_values("bytes", ascending=False, ignore_index=True)

    def notebook_parts(self) -> Iterator[str]:
        """Yield the peak, its parts, and the terms of the ledger."""
        from planner.answer import notebook
        from planner.answer.memory_html import terms_table

        yield notebook.verdict(self.fit.assessment)
        yield notebook.memory_bars(self.parts)
        if isinstance(self.fit, FitAnswer):
            yield terms_table(self.fit.step_memory)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        document: dict[str, Any] = {"peak_bytes": self.peak_bytes, "parts": self.parts}
        if isinstance(self.fit, FitAnswer):
            document |= self.fit.step_memory.to_dict()
        return document

    def __str__(self) -> str:
        if isinstance(self.fit, FitAnswer):
            return self.fit.explain()
        return self.fit.text(verbose=True)


@names_arguments("planner.check")
def check(
    model: nn.Module,
    *,
    optimizer: Any = None,
    inputs: Any = None,
    cluster: ClusterLike = "here",
    precision: str | None = None,
    micro_batch_size: int | None = None,
    seq_len: int | None = None,
    num_microbatches: int | None = None,
    zero_stage: int | None = None,
    recompute: str | None = None,
    software: str | None = None,
) -> CheckAnswer:
    """Return whether a live module's training step fits, and how long it takes.

    Nothing is moved or run. ``model``: a module of transformers is recognised by its config, one of
    peft by its adapters; any other is traced on fake tensors. DDP, FSDP, DeepSpeed and
    torch.compile are recognised. ``optimizer``: a live one, its class or its name; ``inputs``: a
    micro-batch as the model takes it, or (rows, tokens). ``cluster``: ``here`` has the ranks of
    this process group. The other arguments replace what was read: ``precision`` (of autocast),
    ``num_microbatches`` (accumulation), ``software`` (a profile, such as a file of ``learn``).
    """
    live = describe_model(model, optimizer, inputs, precision, software)
    found = cluster_of_run(cluster, live.sharding, say)
    fixed = {
        "micro_batch_size": micro_batch_size or (live.batch.rows if live.batch else None),
        "num_microbatches": num_microbatches or 1,
        "recompute": recompute or ("full" if live.recomputes else "none"),
        **_layout(live, found, zero_stage),
    }
    given = {name: value for name, value in fixed.items() if value is not None}
    if live.spec is None:
        return CheckAnswer(live, fit_live(live, found, given))
    tokens = seq_len or (live.batch.tokens if live.batch else None)
    options = {**live.options, "optimizer": live.optimizer, "seq_len": tokens}
    answer = fit(live.spec, found, **given, **options)
    assert isinstance(answer, FitAnswer)
    return CheckAnswer(live, answer)


def _layout(live: LiveModel, cluster: Cluster, zero_stage: int | None) -> dict[str, Any]:
    """Return the ranks of a run that has them; those of a larger cluster are searched."""
    sharding = live.sharding
    if cluster.num_gpus != sharding.ranks:
        return {"zero_stage": zero_stage}
    stage = sharding.zero_stage if zero_stage is None else zero_stage
    return {
        "data_parallel": sharding.ranks // sharding.tensor_parallel,
        "tensor_parallel": sharding.tensor_parallel,
        "dp_replicate": sharding.dp_replicate,
        "zero_stage": 0 if stage is None or sharding.ranks == 1 else stage,
    }


@names_arguments("planner.estimate_memory")
def estimate_memory(
    model: nn.Module,
    *,
    optimizer: Any = None,
    inputs: Any = None,
    cluster: ClusterLike = "here",
    precision: str | None = None,
    micro_batch_size: int | None = None,
    seq_len: int | None = None,
    num_microbatches: int | None = None,
    zero_stage: int | None = None,
    recompute: str | None = None,
    software: str | None = None,
) -> MemoryEstimate:
    """Return the memory of a live module's training step, term by term; arguments as ``check``."""
    answer = check(
        model,
        optimizer=optimizer,
        inputs=inputs,
        cluster=cluster,
        precision=precision,
        micro_batch_size=micro_batch_size,
        seq_len=seq_len,
        num_microbatches=num_microbatches,
        zero_stage=zero_stage,
        recompute=recompute,
        software=software,
    )
    return MemoryEstimate(answer.fit)
