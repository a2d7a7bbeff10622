"""Errors of values that do not fit their type: file, path, value and allowed values."""

from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta, Struct

from hardware_profiles.errors import InputError
from hardware_profiles.fields import Amount, convert


class Link(Struct, forbid_unknown_fields=True):
    kind: Literal["ring", "tree"]
    count: Annotated[int, Meta(ge=1, le=2000)] = 1
    rate: Amount | None = None


class Document(Struct, forbid_unknown_fields=True):
    links: tuple[Link, ...] = ()
    named: dict[str, Link] = {}
    table: dict[Literal["bf16", "fp16"], Amount] = {}
    flag: bool = True


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"links": [{"kind": "ring"}, {}]}, "f.json: links[1]: kind is missing"),
        ({"links": [{"kind": "rang"}]}, 'links[0]: kind = "rang" (must be one of ring, tree'),
        ({"links": [{"kind": "rang"}]}, "Did you mean ring?"),
        (
            {"named": {"a": {"kind": "ring"}, "b": {"kind": "ring", "count": 0}}},
            "f.json: named: b: count = 0 (must be a whole number from 1 to 2,000)",
        ),
        ({"named": {"a": 3}}, "f.json: named: a = 3 (must be an object with keys)"),
        ({"links": 3}, "f.json: links = 3 (must be a list)"),
        ({"links": [{"kind": "ring", "rate": -1}]}, "links[0]: rate = -1 (must be a number from 0"),
        ({"table": {"bf17": 1.0}}, "f.json: table: unknown key 'bf17'. Did you mean"),
        ({"table": {"bf16": True}}, "f.json: table: bf16 = true (must be a number from 0 to"),
        ({"flag": 1}, "f.json: flag = 1 (must be true or false)"),
        ({"flags": True}, "f.json: unknown key 'flags'. Did you mean flag?"),
        ([1], "f.json: must be an object with keys"),
    ],
)
def test_errors_name_file_path_value_and_allowed_values(document: Any, words: str) -> None:
    with pytest.raises(InputError) as caught:
        convert(document, Document, "f.json")
    assert words in str(caught.value)


@pytest.mark.parametrize("document", [{"\ud800": 1}, {"x": "\ud800"}])
def test_half_a_character_is_one_error(document: dict[str, Any]) -> None:
    """JSON may hold a lone surrogate, which is no text."""

    class Numbers(Struct, forbid_unknown_fields=True):
        x: int = 0

    with pytest.raises(InputError, match="is half of a character, not text"):
        convert(document, Numbers, "f.json")
