"""How much a prediction may be trusted, in one word with a rule."""

from __future__ import annotations

from typing import Final, Literal

from cost_models.scenario import Scenario
from cost_models.uncertainty import was_compared

Confidence = Literal["measured", "published", "datasheet"]
# what the published runs that the time model was compared with have in common
COMPARED_FAMILIES: Final = ("gpt2", "llama")
COMPARED_PRECISIONS: Final = ("bf16", "fp16")
COMPARED: Final = ("A100-SXM-80GB", "H100-SXM-80GB")


def confidence(scenario: Scenario) -> Confidence:
    """Return the word for a scenario.

    measured   the rates were measured on this machine
    published  runs of this trainer on this accelerator with such a model and precision are among
               the published ones that ``shardplan validate`` compares with, inside the interval
    datasheet  they are not: rates come from the vendor, the error is carried over
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
