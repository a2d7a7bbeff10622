"""Base class of the planner's answers: one text for prompt and notebook, one JSON document."""

from __future__ import annotations

import html
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final

SCHEMA_VERSION: Final = 1  # of all JSON documents


class Answer(ABC):
    """Answer with a text, which notebooks show preformatted, and a JSON document."""

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

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


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
