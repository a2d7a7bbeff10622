"""How much a prediction may be trusted, in one word with a rule."""

from __future__ import annotations

from typing import Final, Literal

from cost_models.estimate import Setting

Confidence = Literal["measured", "published", "datasheet"]
# accelerators of the published runs that the time model was compared with
COMPARED: Final = ("A100-SXM-80GB", "H100-SXM-80GB")


def confidence(setting: Setting) -> Confidence:
    """Return the word for a setting.

    measured   the rates were measured on this machine
    published  this accelerator is among the published runs that ``benchmarks`` compares with
    datasheet  neither: rates come from the vendor, the error is carried over
    """
    accelerator = setting.cluster.accelerator
    if accelerator.device == "cpu":
        return "measured"
    return "published" if accelerator.name in COMPARED else "datasheet"
