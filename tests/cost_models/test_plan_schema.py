"""The published JSON schema of plan.json refuses what the loader refuses."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import ValidationError

from cost_models.plan_file import SCHEMA_ID, plan_file_from_dict, plan_schema
from hardware_profiles.errors import InputError
from tests.conftest import plan_validator
from tests.cost_models.test_plan_file import contents

DOCUMENT: dict[str, Any] = json.loads(json.dumps(contents().to_dict()))


def objects(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of the objects whose keys are known: not a config, not a prediction."""
    if path in (("model", "config"), ("prediction",)):
        return
    if isinstance(value, dict):
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(inner, dict | list):
            yield from objects(inner, (*path, key))


def edited(path: tuple[Any, ...], key: Any, value: Any) -> dict[str, Any]:
    document = copy.deepcopy(DOCUMENT)
    inner: Any = document
    for step in path:
        inner = inner[step]
    inner[key] = value
    return document


def test_the_id_names_no_host() -> None:
    assert plan_schema()["$id"] == SCHEMA_ID == "urn:shardplan:plan:1"


def test_a_written_plan_matches() -> None:
    plan_validator().validate(DOCUMENT)


@pytest.mark.parametrize("path", list(objects(DOCUMENT)), ids=lambda path: ".".join(map(str, path)))
def test_unknown_keys_are_refused_by_schema_and_loader(path: tuple[Any, ...]) -> None:
    document = edited(path, "not_a_key", 1)
    with pytest.raises(ValidationError):
        plan_validator().validate(document)
    with pytest.raises(InputError, match="not_a_key"):
        plan_file_from_dict(document, "plan.json")


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        ((), "schema_version", 2),
        ((), "layer_ranges", [[0, 4, 8]]),
        (("plan",), "zero_stage", 4),
        (("plan",), "pipeline_schedule", "2f2b"),
        (("workload",), "seq_len", "long"),
        (("cluster",), "num_nodes", 0),
        (("cluster", "accelerator", "memory_capacity"), "kind", "guessed"),
    ],
)
def test_wrong_values_are_refused_by_schema_and_loader(
    path: tuple[Any, ...], key: str, value: Any
) -> None:
    document = edited(path, key, value)
    with pytest.raises(ValidationError):
        plan_validator().validate(document)
    with pytest.raises(InputError):
        plan_file_from_dict(document, "plan.json")


def test_a_test_cannot_write_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cost_models import plan_file

    file = contents()
    monkeypatch.setattr(plan_file.PlanFile, "to_dict", lambda _: DOCUMENT | {"not_a_key": 1})
    with pytest.raises(ValidationError):
        plan_file.write_plan_file(tmp_path / "plan.json", file)
