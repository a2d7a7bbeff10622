"""Execute the notebooks: ``python -m notebooks.execute`` keeps the outputs, ``--check`` compares.

``--check`` fails where a cell raises, or prints other text than the committed notebook. Cells with
the tag ``measured`` print times of this machine and are not compared, nor are drawings.
"""

from __future__ import annotations

import argparse
import base64
import copy
import difflib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER: Final = Path(__file__).parent
MEASURES: Final = "measured"  # tag of cells whose output is a measurement
AT_ONCE: Final = 2
COLOURS: Final = 160  # of a drawing


def main() -> None:
    """Run the notebooks, those that measure this machine alone; a cell that fails ends it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, leave the files as they are")
    parser.add_argument("names", nargs="*", help="beginnings of file names; all by default")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    paths = sorted(FOLDER.glob("*.ipynb"))
    paths = [p for p in paths if not given.names or p.name.startswith(tuple(given.names))]
    alone = [path for path in paths if _measures(nbformat.read(path, as_version=4))]
    others = [path for path in paths if path not in alone]
    stale = [differences for path in alone for differences in _run(path, check=given.check)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        last_first = others[::-1]  # the last ones take longest
        for found in pool.map(lambda path: list(_run(path, check=given.check)), last_first):
            stale += found
    if stale:
        sys.exit(
            "\n".join([*stale, "python -m notebooks.execute keeps the new outputs; read them"])
        )


def _run(path: Path, *, check: bool) -> Iterator[str]:
    """Run one notebook; yield how its text differs from that of the file."""
    before = nbformat.read(path, as_version=4)
    after = copy.deepcopy(before)
    client = NotebookClient(
        after,
        timeout=600,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(FOLDER)}},
    )
    client.execute()
    print(f"{path.name}: {len(after.cells)} cells ran", flush=True)
    after.metadata = before.metadata  # the version of Python is no result
    if not check:
        for cell in after.cells:
            for output in cell.get("outputs", ()):
                if "image/png" in output.get("data", {}):
                    output.data["image/png"] = _smaller(output.data["image/png"])
        nbformat.write(after, path)
        return
    for number, (old, new) in enumerate(zip(before.cells, after.cells, strict=True)):
        if MEASURES in old.metadata.get("tags", ()):
            continue
        changed = difflib.unified_diff(_text(old), _text(new), "committed", "now", lineterm="", n=0)
        if lines := list(changed):
            yield "\n".join([f"{path.name}, cell {number}:", *lines])


def _smaller(picture: str) -> str:
    """Return a PNG in base64 with a palette, which is a third of the size."""
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    small = io.BytesIO()
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return base64.b64encode(small.getvalue()).decode() + "\n"


def _measures(notebook: Any) -> bool:
    return any(MEASURES in cell.metadata.get("tags", ()) for cell in notebook.cells)


def _text(cell: Any) -> Sequence[str]:
    """Return the lines that a cell printed or returned as text, but not warnings."""
    lines: list[str] = []
    for output in cell.get("outputs", ()):
        if output.output_type == "stream" and output.name == "stdout":
            lines += output.text.splitlines()
        elif "data" in output:
            lines += output.data.get("text/plain", "").splitlines()
    return lines


if __name__ == "__main__":
    main()
