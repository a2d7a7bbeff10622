"""Makes the table of targets in docs/exchange.md: --write, or --check.

The table follows from ``planner/exchange/capabilities.toml``, as searches and exports do.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from planner.exchange.capabilities import all_capabilities  # noqa: E402

PAGE: Final = ROOT / "docs" / "exchange.md"
BEGIN, END = "<!-- targets -->", "<!-- end of targets -->"
DEGREES: Final = {
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "cp": "context_parallel",
    "ep": "expert_parallel",
    "HSDP": "dp_replicate",
}
COLUMNS: Final = ("zero_stage", "pipeline_schedule", "recompute", "offload")


def table() -> str:
    """Return the table, one target a row."""
    head = ["`--to`", "version", "degrees beside dp", "ZeRO", "schedules", "recompute", "offload"]
    lines = [f"| {' | '.join([*head, 'precision', 'adapters'])} |", "| --- " * 9 + "|"]
    for name, one in sorted(all_capabilities().items()):
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


def main() -> None:
    """Write the table, or exit with 1 where the page differs from the code."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    text = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if "--write" in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    elif text != page:
        print("docs/exchange.md: python docs/make_targets.py --write")
        sys.exit(1)


if __name__ == "__main__":
    main()
