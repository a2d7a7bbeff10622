"""Base class of the planner's answers: one text for prompt and notebook, one JSON document."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Final

SCHEMA_VERSION: Final = 1  # of all JSON documents


class Answer(ABC):
    """Answer with a text, a JSON document, and HTML for notebooks."""

    __slots__ = ()

    @abstractmethod
    def __str__(self) -> str: ...

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""

    def text(self, *, verbose: bool = False) -> str:
        """Return the text; ``verbose``: with assumptions, sources and counts, if it has them."""
        return str(self)

    def __repr__(self) -> str:
        return str(self)

    def notebook_parts(self) -> Iterable[str]:
        """Return what a notebook shows above the text: verdict, bars, tables."""
        return ()

    def _repr_html_(self) -> str:
        from planner.text.notebook import notebook_html

        return notebook_html(self.notebook_parts(), str(self))


class DetailedAnswer(Answer):
    """Answer whose text leaves out details unless it is ``verbose``."""

    __slots__ = ()

    @abstractmethod
    def text(self, *, verbose: bool = False) -> str:
        """Return the text; ``verbose``: with assumptions, sources and counts."""

    def __str__(self) -> str:
        return self.text()


def json_text(document: Mapping[str, Any], *, indent: int | None = 2) -> str:
    """Return JSON text; NaN and infinities raise a ValueError. ``indent`` None: in one line."""
    return json.dumps(document, indent=indent, allow_nan=False)
