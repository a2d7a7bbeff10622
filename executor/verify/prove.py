"""``python -m executor.verify --matrix``: compares every case of ``matrix`` with a single process.

For each case: loss and all gradients with gradient accumulation, and the weights after three
updates; bytes of every collective; FLOP; peak memory of every rank. ``--write`` saves the verified
features to ``cost_models/legality/executor_proofs.json``, which the planner and ``run`` read.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from typing import Any, Final

import torch

from cost_models.legality.executor_proofs import SUPPORTED_FILE
from executor.processes.fork import run_forked
from executor.training.traffic import is_as_predicted
from executor.verify.matrix import VerificationCase, cases
from executor.verify.parity import TOLERANCE, Verification, verify
from hardware_profiles.errors import InputError
from hardware_profiles.fields import write_text_atomically
from hardware_profiles.terminal import say, show

BATCHES: Final = 3
TIMEOUT_SECONDS: Final = 300.0
# of the peak; small temporary tensors matter at these sizes. For larger models the errors of
# predictions are measured by python -m benchmarks.memory_truth
MEMORY_TOLERANCE: Final = 0.5


def prove(part: tuple[int, int] = (1, 1), only: str = "", *, write: bool = False) -> int:
    """Run the cases and return the exit code.

    ``part``: (k, n) for every n-th case from the k-th; ``only``: text in the names of the cases.
    """
    chosen = _chosen(part, only)
    if write and len(chosen) < len(cases()):
        raise InputError("--write needs the results of all cases: remove --part and --only")
    started, failed, worst = time.monotonic(), [], LargestDifferences()
    for number, case in enumerate(chosen, start=1):
        begun = time.monotonic()
        try:
            found = verify_case(case)
            problem = worst.take(case, found)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            say(traceback.format_exc())
        words = problem or "ok"
        seconds = time.monotonic() - begun
        show(f"{number:>3}/{len(chosen)}  {case.name:<60} {seconds:5.1f} s  {words}")
        if problem:
            failed.append(case.name)
    show(f"\n{len(chosen) - len(failed)} of {len(chosen)} cases passed, {_minutes(started)}")
    show(worst)
    for name in failed:
        show(f"failed: {name}")
    if failed:
        return 5
    if write:
        write_text_atomically(SUPPORTED_FILE, proofs_text(chosen), force=True)
        show(f"written: {SUPPORTED_FILE}")
    return 0


def _minutes(started: float) -> str:
    seconds = time.monotonic() - started
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def _chosen(part: tuple[int, int], only: str) -> list[VerificationCase]:
    found = [case for case in cases() if only in case.name]
    if not found:
        raise InputError(f"--only {only}: no case has this text in its name")
    first, every = part
    return found[first - 1 :: every]


def verify_case(case: VerificationCase) -> Verification:
    """Run one case on its ranks."""
    ranks = case.plan.world_size
    answer = run_forked(_on_rank, ranks, case.file(), timeout=TIMEOUT_SECONDS)[0]
    return Verification(**answer)


def _on_rank(rank: int, file: Any) -> dict[str, Any] | None:
    found = verify(file, seed=1, batches=BATCHES)
    return None if found is None else asdict(found)


class LargestDifferences:
    """Largest difference of each quantity, and the case it occurred in."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[float, str]] = {}

    def take(self, case: VerificationCase, found: Verification) -> str | None:
        """Record a case; return a description of its problems, or None."""
        problems = []
        for what in ("loss", "gradient", "weight", "norm"):
            difference = getattr(found, f"{what}_difference")
            self._note(what, difference, case)
            if not difference <= TOLERANCE:
                named = getattr(found, f"worst_{what}", "")
                problems.append(f"{what} {difference:.1e} {named}".rstrip())
        if not found.traffic_is_predicted:
            row = next(row for row in found.traffic if not is_as_predicted(row))
            problems.append(
                f"rank {row['rank']} {row['kind']} ({row['axis']}): {row['counted_count']:.0f} "
                f"of {row['counted_bytes']:,.0f} bytes, predicted {row['predicted_count']:.0f} "
                f"of {row['predicted_bytes']:,.0f}"
            )
        predicted, counted = found.flops["predicted"], found.flops["counted"]
        if predicted != counted:
            problems.append(f"FLOP {counted:,.0f}, predicted {predicted:,.0f}")
        assert found.memory is not None
        off = max(
            (row["predicted_bytes"] / row["counted_bytes"] - 1.0 for row in found.memory), key=abs
        )
        self._note("memory", abs(off), case)
        if abs(off) > MEMORY_TOLERANCE:
            problems.append(f"memory {100 * off:+.0f} %")
        return "; ".join(problems) or None

    def _note(self, what: str, difference: float, case: VerificationCase) -> None:
        self.found[what] = max(self.found.get(what, (0.0, "")), (difference, case.name))

    def __str__(self) -> str:
        lines = []
        for what, (value, name) in self.found.items():
            shown = f"{100 * value:.1f} %" if what == "memory" else f"{value:.1e}"
            lines.append(f"largest difference of {what}: {shown} ({name})")
        return "\n".join(lines)


def proofs_text(proven: Sequence[VerificationCase]) -> str:
    """Return the contents of executor_proofs.json."""
    import transformers

    plans = [case.plan for case in proven]
    families: dict[str, set[str]] = {}
    for case in proven:
        families.setdefault(case.family, set()).update(axes(case))
    document = {
        "schema_version": 1,
        "written_by": "python -m executor.verify --matrix --write",
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "families": {name: sorted(found) for name, found in sorted(families.items())},
        "pipeline_schedule": sorted(
            {plan.pipeline_schedule for plan in plans if plan.pipeline_parallel > 1}
        ),
        "context_parallel_method": sorted(
            {plan.context_parallel_method for plan in plans if plan.context_parallel > 1}
        ),
        "recompute": sorted({plan.recompute for plan in plans}),
        "offload": sorted({plan.offload for plan in plans}),
        "adapter": sorted({case.file().workload.adapter for case in proven}),
        "zero_stage": sorted({plan.zero_stage for plan in plans}),
        "cases": sorted(case.name for case in proven),
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def axes(case: VerificationCase) -> set[str]:
    """Return the kinds of parallelism that a case uses."""
    plan = case.plan
    sizes = {
        "data_parallel": plan.data_parallel,
        "dp_replicate": plan.dp_replicate,
        "context_parallel": plan.context_parallel,
        "tensor_parallel": plan.tensor_parallel,
        "pipeline_parallel": plan.pipeline_parallel,
        "expert_parallel": plan.expert_parallel,
    }
    return {name for name, size in sizes.items() if size > 1}
