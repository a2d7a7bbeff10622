"""The price of a run that ran out of memory: as stated, and as its traceback shows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Final

from hardware_profiles.errors import InputError
from hardware_profiles.options import declared
from planner.answer.fit_answer import FitAnswer
from planner.api.fit import fit_as_stated
from planner.request.requests import FitRequest, StatedRun

RANK: Final = 16  # of adapters: no traceback tells it
# what files in a traceback tell of a run, the first that matches of each setting
SHOWN_BY: Final[tuple[tuple[str, Mapping[str, Any]], ...]] = (
    (r"\btorchtitan[/\\]", {"software": "torchtitan", "zero_stage": 3}),
    (r"\btorchtune[/\\]", {"software": "torchtune"}),
    (r"\blitgpt[/\\]", {"software": "litgpt"}),
    (r"\bnanotron[/\\]", {"software": "nanotron"}),
    (r"\bmegatron[/\\]core[/\\]", {"software": "megatron-core"}),
    (r"\btransformers[/\\]trainer\.py", {"software": "hf-trainer"}),
    (r"\bpeft[/\\]", {"software": "peft"}),
    (r"fsdp[/\\]|\bzero[/\\](?:partition|stage3)", {"zero_stage": 3}),
    (r"\bzero[/\\]stage_1_and_2", {"zero_stage": 2}),
    (r"torch[/\\]utils[/\\]checkpoint\.py", {"recompute": "full"}),
    (r"Linear4bit|matmul_4bit", {"qlora": RANK}),
    (r"\bpeft[/\\]tuners[/\\]lora", {"lora": RANK}),
)
SOFTWARE: Final = "torch-trainer"  # where neither options nor the traceback name one


def priced_run(run: StatedRun, text: str) -> FitAnswer | None:
    """Return the prediction of the run that was stated; None without a model.

    ``text``: the traceback. Options and files that are given win over what it shows.
    """
    given = {one.name: getattr(run, one.name) for one in fields(run)}
    stated = {name: value for name, value in given.items() if value is not None}
    if run.model is None or run.cluster is None:
        if stated:
            flags = ", ".join(declared(StatedRun)[name].flags[0] for name in stated)
            raise InputError(f"{flags}: a run is priced with both --model and --cluster")
        return None
    shown = {} if run.source is not None else _shown_by(text, stated)
    software = {} if run.source is not None else {"software": SOFTWARE}
    answer = fit_as_stated(FitRequest(**{**software, **shown, **stated}))
    said = [f"{name} {value} (default: the traceback shows it)" for name, value in shown.items()]
    if software and "software" not in {**shown, **stated}:
        said.append(f"software {SOFTWARE} (default: any trainer on torch)")
    return replace(answer, assumptions=(*answer.assumptions, *said))


def _shown_by(text: str, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of the run that the traceback shows and that are not stated."""
    shown: dict[str, Any] = {}
    for pattern, settings in SHOWN_BY:
        if re.search(pattern, text):
            shown = {**settings, **shown}
    if {"lora", "qlora"} & stated.keys():
        shown = {name: value for name, value in shown.items() if name not in ("lora", "qlora")}
    elif "qlora" in shown:
        shown.pop("lora", None)
    return {name: value for name, value in shown.items() if name not in stated}
