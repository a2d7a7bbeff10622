"""What a run measured before it was resumed: kept, since run.json is written again."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from executor.records.report import RUN_FILE
from hardware_profiles.errors import InputError, RunError
from hardware_profiles.fields import read_json


def earlier_measurement(
    folder: Path, plan: Mapping[str, Any], environment: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """Return what earlier sessions in a folder measured (empty: nothing), and a note about it.

    Only of the same file of a plan in the same environment. The run.json of another one is renamed
    after the time when its session started, so that it stays for ``calibrate`` and ``compare``.
    """
    path = folder / RUN_FILE
    document: dict[str, Any] = {}
    with contextlib.suppress(InputError):  # there is none, or not a whole one
        document = read_json(path, "a run")
    measured = document.get("measured") or {}
    steps = measured.get("timed_steps")
    if not steps:
        return {}, ""
    before = document.get("plan", {}).get("sha256"), document.get("environment")
    if before == (plan.get("sha256"), environment):
        return measured, f"the {steps} steps timed before count until more are timed"
    other = folder / f"run-{re.sub(r'[^0-9]', '', str(document.get('started'))[:19])}.json"
    try:
        path.rename(other)
    except OSError as error:
        raise RunError(f"{path}: cannot be renamed: {error.strerror}") from None
    return {}, f"{other}: what was measured before, with another plan or in another environment"
