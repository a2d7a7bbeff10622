"""MFU and HFU: the FLOP of a step relative to the datasheet peak of its devices."""

from __future__ import annotations

from typing import Any

from cost_models.plan_file import PlanFile
from cost_models.pricing.prediction import scenario_of
from cost_models.pricing.utilisation import counted_flops
from hardware_profiles.cluster.catalogue import match_accelerator
from hardware_profiles.errors import InputError


def peak_flops(file: PlanFile, device: str) -> float | None:
    """Return the peak of one device in the plan's precision; None if unknown.

    ``device``: torch's name of a GPU, or "cpu". A plan for GPUs gives no peak of a CPU it is tried
    on.
    """
    accelerator = file.cluster.accelerator
    if device != "cpu":
        try:
            accelerator = match_accelerator(device).entry
        except InputError:
            return None
    elif accelerator.device != "cpu":
        return None
    figure = accelerator.peak_flops.get(file.workload.precision)
    return None if figure is None else figure.value


def utilisation(file: PlanFile, peak: float | None, step_seconds: float) -> dict[str, Any]:
    """Return ``{mfu, hfu}`` of a step.

        mfu  model FLOP / (seconds x devices x peak)     forward once, backward twice
        hfu  the same including recomputation, in the predicted ratio

    Source: Chowdhery et al., PaLM (arXiv:2204.02311), appendix B; Korthikanti et al.
    (arXiv:2205.05198), sec. 6.3.
    """
    if peak is None:
        return {"mfu": None, "hfu": None}
    flops = counted_flops(scenario_of(file)).flops
    mfu = flops / (step_seconds * file.plan.world_size * peak)
    predicted = file.prediction.get("time") or {}
    if not predicted.get("mfu") or not predicted.get("hfu"):
        return {"mfu": mfu, "hfu": mfu if file.plan.recompute == "none" else None}
    return {"mfu": mfu, "hfu": mfu * predicted["hfu"] / predicted["mfu"]}
