"""An extension of griffe: docstrings reach mkdocstrings as the Markdown of ``docstrings.py``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))

from docstrings import markdown


class MarkdownDocstrings(griffe.Extension):
    """Replaces the text of every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Replace the text of one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
