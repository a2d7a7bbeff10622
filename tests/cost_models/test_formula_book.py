"""The book of formulas has the numbers of the code: docs/reference/formulas."""

from __future__ import annotations

import functools
import gc
import importlib
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_every_worked_number_is_that_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """``python docs/make_formulas.py --write`` makes the pages anew."""
    monkeypatch.syspath_prepend(DOCS)
    book = importlib.import_module("make_formulas")
    for each in gc.get_objects():  # results that are kept would not be computed again
        if type(each) is functools._lru_cache_wrapper:
            each.cache_clear()
    made = book.pages()
    for path in sorted(book.BOOK.glob("*.md")):
        assert made.pop(path.name).splitlines() == path.read_text(encoding="utf-8").splitlines()
    assert made == {}
