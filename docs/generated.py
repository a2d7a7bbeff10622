"""Generated files: written, or compared with what they would be."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_or_compare(made: Mapping[Path, str], there: Iterable[Path] = ()) -> None:
    """Write files with ``--write``; else exit with 1 where one is not as made.

    ``there``: the files of this kind that exist; what is not made any more is removed.
    """
    gone = set(there) - set(made)
    stale = {
        path: text
        for path, text in made.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }
    if "--write" in sys.argv[1:]:
        for path in gone:
            path.unlink()
        for path, text in stale.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    elif gone or stale:
        names = ", ".join(sorted(path.name for path in (*gone, *stale)))
        print(f"{names}: python docs/{Path(sys.argv[0]).name} --write")
        sys.exit(1)
