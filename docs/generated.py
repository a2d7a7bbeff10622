"""A generated folder of pages: written, or compared with its files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path


def write_or_compare(place: Path, made: Mapping[str, str], script: str) -> None:
    """Write the pages with ``--write``; else exit with 1 where one differs from its file."""
    if "--write" in sys.argv[1:]:
        place.mkdir(exist_ok=True)
        for path in place.glob("*.md"):
            path.unlink()
        for name, text in made.items():
            (place / name).write_text(text, encoding="utf-8")
        return
    kept = {path.name: path.read_text(encoding="utf-8") for path in place.glob("*.md")}
    if kept != made:
        print(f"docs/reference/{place.name}: python docs/{script} --write")
        sys.exit(1)
