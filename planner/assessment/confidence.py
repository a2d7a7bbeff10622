"""Confidence in a prediction: measured, published or datasheet."""

from __future__ import annotations

from typing import Final, Literal

from cost_models.scenario import Scenario
from cost_models.uncertainty import was_compared

Confidence = Literal["measured", "published", "datasheet"]
# families, precisions and accelerators of the published runs that the time model was validated on
COMPARED_FAMILIES: Final = ("gpt2", "llama")
COMPARED_PRECISIONS: Final = ("bf16", "fp16")
COMPARED: Final = ("A100-SXM-80GB", "H100-SXM-80GB")


def confidence(scenario: Scenario) -> Confidence:
    """Return the confidence in predictions for a scenario.

    measured   the rates were measured on this machine
    published  ``shardplan validate`` compares with published runs of this trainer on this
               accelerator, with the same model family and precision, and the intervals contain them
    datasheet  no such run: rates come from the vendor, the error from other runs
    """
    accelerator = scenario.cluster.accelerator
    if accelerator.device == "cpu":
        return "measured"
    alike = (
        accelerator.name in COMPARED
        and was_compared(scenario.software.name, accelerator)
        and scenario.model.family in COMPARED_FAMILIES
        and scenario.workload.precision in COMPARED_PRECISIONS
    )
    return "published" if alike else "datasheet"
