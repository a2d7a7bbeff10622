"""Makes the tables of docs/reference/defaults.md: ``make_defaults.py --write``, --check.

The tables follow from the fields of ``FitRequest`` and ``PlanRequest``; the rest of the page, about
defaults that have no such option, is written by hand.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from generated import write_or_compare  # noqa: E402

from cost_models.plan.plan import Plan  # noqa: E402
from hardware_profiles.options import Declared, dashed, declared  # noqa: E402
from planner.request.requests import FitRequest, PlanRequest  # noqa: E402

PAGE: Final = ROOT / "docs" / "reference" / "defaults.md"
MARKED: Final = re.compile(r"(<!-- generated -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def default_of(option: Declared) -> str:
    """Return the default in words: those of the option, else the value of the field."""
    if option.option is not None and option.option.default:
        return option.option.default
    value = getattr(Plan(), option.name, option.default)
    if value is None:
        return "–"
    return (
        {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    )


def row(option: Declared, commands: str) -> str:
    """Return the row of an option."""
    assert option.option is not None
    flags = ", ".join(f"`{flag}`" for flag in option.flags)
    if dashed(option.name) not in option.flags:
        flags += f" (Python: `{option.name}`)"
    cells = [flags, commands, option.help, default_of(option), option.option.why]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def tables() -> str:
    """Return one table for each group of options."""
    fit, plan = declared(FitRequest), declared(PlanRequest)
    groups: dict[str, list[str]] = {}
    for name, option in (fit | {key: one for key, one in plan.items() if key not in fit}).items():
        if option.option is None or not option.flags:
            continue
        commands = " ".join(word for word, found in (("fit", fit), ("plan", plan)) if name in found)
        groups.setdefault(option.option.group, []).append(row(option, commands))
    parts = []
    for group, rows in groups.items():
        heads = [
            "| option | command | meaning | default | note |",
            "| --- | --- | --- | --- | --- |",
        ]
        parts.append("\n".join([f"## {group[:1].upper()}{group[1:]}", "", *heads, *rows, ""]))
    return "\n".join(parts) + "\n"


def main() -> None:
    """Write the page, or exit with 1 where its tables differ from the options."""
    text = PAGE.read_text(encoding="utf-8")
    new = MARKED.sub(lambda match: match[1] + "\n" + tables() + match[3], text)
    write_or_compare({PAGE: new})


if __name__ == "__main__":
    main()
