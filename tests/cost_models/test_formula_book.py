"""The book of formulas has the numbers of the code: docs/reference/formulas.

``python docs/make_formulas.py --write`` makes the pages anew.
"""

import functools
import gc
import importlib
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BOOK = DOCS / "reference" / "formulas"


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a script of docs/, with no result kept that would not be computed again."""
    monkeypatch.syspath_prepend(DOCS)
    for each in gc.get_objects():
        if type(each) is functools._lru_cache_wrapper and each.__module__.startswith("cost_models"):
            each.cache_clear()
    return importlib.import_module(name)


@pytest.mark.slow
def test_every_worked_number_is_that_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    made = module("make_formulas", monkeypatch).pages()
    kept = {path.name for path in BOOK.glob("*.md")} - {"jobs.md", "tables.md"}
    assert kept == set(made)
    for name, text in made.items():
        assert text.splitlines() == (BOOK / name).read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jobs", "tables"])
def test_prices_are_those_of_the_page(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = module(f"worked.{name}", monkeypatch).page()
    kept = (BOOK / f"{name}.md").read_text(encoding="utf-8")
    assert made.splitlines() == kept.splitlines()
