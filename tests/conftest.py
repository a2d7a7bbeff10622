"""Settings that every test shares: hypothesis profiles, and the sample of a long list of rows."""

import gc
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Tests fork processes after torch was used: a pool of OpenMP threads does not survive a fork, so
# this process must never make one. Set before anything imports torch.
os.environ["OMP_NUM_THREADS"] = "1"
# Two workers and hundreds of processes start: each would compile all modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Answers and errors are wrapped to this width where it is set.
os.environ.pop("COLUMNS", None)

# Configurations of other trainers, some of which are Python, and scripts that train: not tests.
collect_ignore_glob = ["planner/exchange/real/*", "planner/exchange/toy_runs/*"]

settings.register_profile("thorough", deadline=None, print_blob=True, max_examples=100)
settings.register_profile("quick", deadline=None, print_blob=True, max_examples=12)
settings.load_profile("quick")  # CI: --hypothesis-profile=thorough


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the rows of a parametrised test as slow, but for the number in ``sampled(rows)``.

    Those that stay are spread evenly over the rows that are not slow, the first one included: the
    same ones in every run.
    """
    rows: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            rows[item.nodeid.partition("[")[0]].append(item)
    for group in rows.values():
        marker = group[0].get_closest_marker("sampled")
        assert marker is not None
        (count,) = marker.args
        kept = {number * len(group) // count for number in range(count)}
        for number, item in enumerate(group):
            if number not in kept:
                item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: -_expected_seconds(item))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep modules and tests, which live as long as the process, from garbage collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _expected_seconds(item: pytest.Item) -> float:
    """Return ``slow(seconds=…)``: the longest tests begin first, so that none runs last alone."""
    marker = item.get_closest_marker("slow")
    return 0.0 if marker is None else marker.kwargs.get("seconds", 0.0)


@cache
def plan_validator() -> Any:
    """Return the validator of docs/reference/plan.schema.json."""
    from jsonschema import Draft202012Validator

    schema = Path(__file__).parents[1] / "docs" / "reference" / "plan.schema.json"
    return Draft202012Validator(json.loads(schema.read_text(encoding="utf-8")))


@pytest.fixture(scope="session", autouse=True)
def _written_plans_match_the_schema() -> Iterator[None]:
    """Validate every plan.json that a test writes in its own process."""
    from cost_models import plan_file

    write = plan_file.write_text_atomically

    def validated(path: Path, text: str, **options: Any) -> None:
        plan_validator().validate(json.loads(text))
        write(path, text, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_file, "write_text_atomically", validated)
        yield
