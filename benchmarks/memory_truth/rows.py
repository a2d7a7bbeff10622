"""One case and its prediction."""

from __future__ import annotations

import re
from typing import Any, Final

from benchmarks.memory_truth.cases import Case
from cost_models.memory.ledger import MOMENTS
from cost_models.memory.peak import timelines
from cost_models.plan_file import PlanFile
from cost_models.pricing.observed import with_predicted_names
from cost_models.pricing.prediction import scenario_of
from executor.counters.memory_peak import MemoryPeak
from executor.verify.rehearsal import EMBEDDING, HEAD, LOSS, rehearse

# events of the ledger in the phases that the tracer tells apart; peaks of a forward pass before the
# loss are not priced
PHASES: Final = {"backward": MOMENTS[1:-1], "optimizer": MOMENTS[-1:]}
PARTS: Final = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")


def rows_of(file: PlanFile) -> list[dict[str, Any]]:
    """Rehearse the first rank of every pipeline stage."""
    return [row_of(Case("", file, stage)) for stage in range(file.plan.pipeline_parallel)]


def row_of(case: Case) -> dict[str, Any]:
    """Rehearse a case; return both peaks, their parts and their moments."""
    peak = rehearse(case.file, case.rank, documents=case.file.workload.document_mask)
    predicted = case.prediction
    bytes_ = predicted["allocated_bytes"]
    return {
        "case": case.text,
        "stage": case.stage,
        "predicted": bytes_,
        "traced": peak.peak_bytes,
        "error_percent": 100.0 * (bytes_ / peak.peak_bytes - 1.0),
        "moment": predicted["moment"],
        "traced_moment": moment_of(peak),
        "parts": {name: predicted["parts"][name] for name in PARTS},
        "traced_parts": traced_parts(case, peak),
        "phases": phase_peaks(case),
        "traced_phases": {name: peak.phase_peaks.get(name, 0) for name in PHASES},
    }


def phase_peaks(case: Case) -> dict[str, float]:
    """Return the largest sum of the ledger's rows at the events of each phase of a step."""
    file = case.file
    line = timelines(scenario_of(file), file.plan, file.layer_ranges)[case.stage]
    sizes = dict(zip(MOMENTS, (float(parts.allocated) for parts in line), strict=True))
    return {phase: max(sizes[name] for name in names) for phase, names in PHASES.items()}


def moment_of(peak: MemoryPeak) -> str:
    """Name a traced moment as the formulas do, where they have a name for it."""
    place = re.sub(r" of micro-batch \d+", "", peak.place)
    if peak.phase == "optimizer":
        return "optimizer"
    if place == LOSS:
        return f"loss_{peak.phase}"
    if peak.phase == "forward":
        return f"forward {peak.place}"
    named = {HEAD: "head", EMBEDDING: "embedding"}
    return named.get(place, f"backward {peak.place}")


def traced_parts(case: Case, peak: MemoryPeak) -> dict[str, float]:
    """Name what was traced as the formulas do.

    What is made and freed within a pass counts as activations.
    """
    rank = {"stage": case.stage, "memory": peak.to_dict()}
    traced = with_predicted_names(rank, case.file)["memory"]["parts"]
    found = {name: float(traced.get(name, 0)) for name in PARTS}
    found["activations"] += traced.get("temporary", 0) + traced.get("other", 0)
    return found
