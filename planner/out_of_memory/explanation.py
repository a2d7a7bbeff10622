"""Explanation of an out-of-memory error: which tensor, where in the step, and what would help."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from cost_models.plan.plan import Plan
from cost_models.units import format_bytes
from planner.advice.ways_out import WayOut
from planner.answer.fit_answer import FitAnswer
from planner.answer.text import short_plan_of
from planner.out_of_memory.report import OutOfMemory, read_report
from planner.request.command import describe_plan
from planner.text.answer import SCHEMA_VERSION, Answer
from planner.text.fixes import pace
from planner.text.paragraphs import hanging, plain

SEGMENTS: Final = "PYTORCH_ALLOC_CONF=expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF before 2.9)"
ADVICE: Final = {
    "forward": (
        "recompute activations (gradient checkpointing)",
        "a smaller micro-batch with more accumulation: the same global batch",
        "shorter sequences, or context parallelism",
    ),
    "backward": (
        "recompute activations (gradient checkpointing)",
        "a smaller micro-batch with more accumulation: the same global batch",
        "shard gradients over data ranks (ZeRO 2, FSDP)",
    ),
    "backward (recomputation)": (
        "a smaller micro-batch with more accumulation: the same global batch",
        "shorter sequences, or context parallelism",
    ),
    "loss": (
        "a loss that never holds all logits (chunked, or Liger's fused linear cross-entropy)",
        "a smaller micro-batch with more accumulation: the same global batch",
        "tensor parallelism over the vocabulary",
    ),
    "optimizer": (
        "shard optimizer states over data ranks (ZeRO 1 and higher, FSDP)",
        "a fused update, which makes no copies of lists of tensors (AdamW(fused=True))",
        "8-bit or paged states (bitsandbytes), or states in host memory",
        "the states are made in the first step: a run that passes it keeps them",
    ),
    "gradient clipping": (
        "clip without copies of lists of tensors (foreach=False)",
        "shard gradients over data ranks (ZeRO 2, FSDP)",
    ),
    "gathering weights": (
        "wrap smaller units, so that less is gathered at once",
        "fewer units gathered ahead (prefetch limits)",
    ),
    "loading the model": (
        "build on the meta device and load shards, or load in 16 bits",
        "shard weights over data ranks (ZeRO 3, FSDP), or quantise a frozen base (QLoRA)",
    ),
}
OPTION: Final = re.compile(r"--\S+(?: (?!--)\S+)?")  # with its value
USUAL: Final = (
    "recompute activations (gradient checkpointing)",
    "a smaller micro-batch with more accumulation: the same global batch",
    "shard weights, gradients and optimizer states over data ranks (FSDP, ZeRO)",
)


@dataclass(frozen=True, slots=True, repr=False)
class OutOfMemoryAnswer(Answer):
    """Answer of ``shardplan oom``: an error in words, with fixes; priced where a run was given."""

    report: OutOfMemory
    fit: FitAnswer | None = None

    @property
    def advice(self) -> tuple[str, ...]:
        """What would help, by the place in the step."""
        report = self.report
        first = [f"{SEGMENTS}: free blocks are joined"] if report.is_fragmented else []
        if report.others > 0.05 * (report.capacity or float("inf")):
            size = format_bytes(report.others)
            first.append(f"end the other processes on this device: they hold {size}")
        return (*first, *ADVICE.get(report.phase or "", USUAL))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "schema_version": SCHEMA_VERSION,
            **asdict(self.report),
            "fragmented": self.report.is_fragmented,
            "advice": list(self.advice),
            "fit": None if self.fit is None else self.fit.to_dict(),
        }

    def __str__(self) -> str:
        lines = [*self._what(), *self._memory(), "Would help:"]
        for words in self.advice:
            lines += hanging("  - ", words)
        if self.fit is not None:
            lines += ["", *_priced(self.fit)]
        else:
            lines += plain(
                "Priced for your run: shardplan oom FILE --model MODEL --cluster CLUSTER"
            )
        return "\n".join(lines)

    def _what(self) -> list[str]:
        report = self.report
        device = "torch" if report.device is None else f"GPU {report.device}"
        where = f" (during: {report.phase})" if report.phase else ""
        words = f"{device} has no room for a tensor of {format_bytes(report.requested)}{where}."
        if report.place is None:
            return [words]
        code = "" if report.code is None else f": {report.code}"
        return [words, f"Raised by {report.place}{code}"]

    def _memory(self) -> list[str]:
        report, words = self.report, []
        if report.allocated is not None:
            whole = "" if report.capacity is None else f" of {format_bytes(report.capacity)}"
            words.append(f"live tensors {format_bytes(report.allocated)}{whole}")
        if report.unallocated is not None:
            size = format_bytes(report.unallocated)
            words.append(f"reserved without live tensors {size}")
        if report.free is not None:
            words.append(f"free {format_bytes(report.free)}")
        if report.others:
            words.append(f"other processes {format_bytes(report.others)}")
        lines = plain("Memory: " + ", ".join(words)) if words else []
        if report.is_fragmented:
            lines += plain(
                "Fragmentation: the free blocks together are larger than the tensor, but none of "
                "them alone."
            )
        elif report.unallocated is not None:
            lines += plain("Hardly any fragmentation: the live tensors themselves are too large.")
        return lines


def _priced(fit: FitAnswer) -> Sequence[str]:
    """Return the predicted peak of the run and the changes with which it fits."""
    assessment, scenario = fit.assessment, fit.scenario
    num_gpus = scenario.cluster.num_gpus
    own = assessment.time.step_seconds * num_gpus / scenario.workload.tokens_per_step
    peak, budget = assessment.memory.peak_bytes, assessment.budget.size
    plan = short_plan_of(scenario, fit.plan)
    lines = plain(f"Predicted peak {format_bytes(peak)} of {format_bytes(budget)} with {plan}")
    assumed = [text.split(" (default")[0] for text in fit.assumptions if " (default" in text]
    lines += hanging("Assumed: ", ", ".join(assumed) + "; options state others") if assumed else []
    if fit.verdict == "fits":
        lines += plain("It should fit: is that the run? State what differs (shardplan oom --help).")
    elif fit.ways_out:
        lines.append("Would fit:")
    for way in fit.ways_out:
        slower = pace(way.device_seconds_per_token * num_gpus / way.num_gpus, own)
        lines += hanging(
            f"  {format_bytes(way.peak_bytes):>9}  {slower:<12}  ", _options(way, fit.plan)
        )
    return lines


def _options(way: WayOut, plan: Plan) -> str:
    """Return a way out as options, others in which its plan differs from the run, and its needs."""
    before = OPTION.findall(describe_plan(plan))
    others = [one for one in OPTION.findall(describe_plan(way.plan)) if one not in before]
    stated = {one.split()[0] for one in OPTION.findall(way.options)}
    needs = [f"({way.condition})"] if way.condition else []
    return " ".join([way.options, *(one for one in others if one.split()[0] not in stated), *needs])


def explain_out_of_memory(text: str, fit: FitAnswer | None = None) -> OutOfMemoryAnswer:
    """Explain an out-of-memory error in a traceback; ``fit``: the prediction of that run."""
    return OutOfMemoryAnswer(read_report(text), fit)
