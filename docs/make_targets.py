"""Makes the tables of targets in docs/how-to/exchange.md: --write, or --check.

They follow from ``cost_models/legality/capabilities.toml``, as searches and exports do.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from generated import write_or_compare  # noqa: E402

from cost_models.legality.capabilities import targets as tables  # noqa: E402

PAGE: Final = ROOT / "docs" / "how-to" / "exchange.md"
PARTS: Final = ("targets", "checks")  # the tables: <!-- NAME --> to <!-- end of NAME -->
DEGREES: Final = {
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "cp": "context_parallel",
    "ep": "expert_parallel",
    "HSDP": "dp_replicate",
}
COLUMNS: Final = ("zero_stage", "pipeline_schedule", "recompute", "offload")


def targets() -> str:
    """Return the table, one target a row."""
    head = ["`--to`", "version", "degrees besides dp", "ZeRO", "schedules", "recompute", "offload"]
    lines = [f"| {' | '.join([*head, 'precision', 'adapters'])} |", "| --- " * 9 + "|"]
    for name, one in sorted(tables().items()):
        limits = one.limits()
        degrees = [word for word, part in DEGREES.items() if limits.get(part) != [1]]
        cells = [", ".join(degrees) or "none"]
        cells += [_words(limits.get(part, "any")) for part in COLUMNS]
        cells += [_words(one.workload.get("precision", ["bf16"]))]
        cells += [_words(one.workload.get("adapter", ["none"]))]
        lines.append(f"| `{name}` | {one.title} {one.version} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _words(allowed: object) -> str:
    return ", ".join(map(str, allowed)) if isinstance(allowed, list) else str(allowed)


def checks() -> str:
    """Return what checks the files of each target."""
    lines = ["| `--to` | in CI a sample of all legal plans is read by |", "| --- | --- |"]
    for name, one in sorted(tables().items()):
        lines.append(f"| `{name}` | {one.checked_by} |")
    return "\n".join(lines)


def main() -> None:
    """Write the tables, or exit with 1 where the page differs from the code."""
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in zip(PARTS, (targets(), checks()), strict=True):
        before, _, rest = text.partition(f"<!-- {name} -->")
        after = rest.partition(f"<!-- end of {name} -->")[2]
        text = f"{before}<!-- {name} -->\n{lines}\n<!-- end of {name} -->{after}"
    write_or_compare({PAGE: text})


if __name__ == "__main__":
    main()
