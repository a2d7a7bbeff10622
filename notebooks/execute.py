"""Execute the notebooks: ``python -m notebooks.execute`` keeps the outputs, ``--check`` only runs."""

from __future__ import annotations

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent


def main() -> None:
    """Run every notebook from the repository's root; a cell that fails ends the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="run, but leave the files as they are")
    check = parser.parse_args().check
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        client = NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            resources={"metadata": {"path": str(FOLDER.parent)}},
        )
        client.execute()
        if not check:
            nbformat.write(notebook, path)
        print(f"{path.name}: {len(notebook.cells)} cells ran")


if __name__ == "__main__":
    main()
