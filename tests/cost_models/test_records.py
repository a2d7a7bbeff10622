"""Records that formulas pass on are values: nobody who gets one can change it."""

import importlib
import pkgutil
from dataclasses import is_dataclass

from msgspec import Struct

import cost_models


def test_every_record_is_frozen() -> None:
    changeable = set()
    for found in pkgutil.walk_packages(cost_models.__path__, "cost_models."):
        module = importlib.import_module(found.name)
        for record in vars(module).values():
            if not isinstance(record, type) or record.__module__ != found.name:
                continue
            if issubclass(record, Struct):
                frozen = record.__struct_config__.frozen
            elif is_dataclass(record):
                frozen = record.__dataclass_params__.frozen  # type: ignore[attr-defined]
            else:
                continue
            changeable |= set() if frozen else {record.__qualname__}
    assert changeable == set()
