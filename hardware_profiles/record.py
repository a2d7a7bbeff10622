"""Records as JSON documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from msgspec import Struct
from msgspec.structs import fields as struct_fields


class Record(Struct, frozen=True):
    """A record whose fields are its JSON document; ``field(name=...)`` gives a key of its own.

    >>> from msgspec import field
    >>> class Peak(Record, frozen=True):
    ...     size: float = field(name="bytes")
    ...     stages: tuple[int, ...] = ()
    >>> Peak(8.0, (1, 2)).to_dict()
    {'bytes': 8.0, 'stages': [1, 2]}
    """

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            one.encode_name: to_json(getattr(self, one.name)) for one in struct_fields(type(self))
        }


def to_json(value: Any) -> Any:
    """Return plain JSON values; of a record its document, else its fields by name."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, Struct):
        return {name: to_json(getattr(value, name)) for name in value.__struct_fields__}
    if is_dataclass(value):
        return {one.name: to_json(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {name: to_json(inner) for name, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json(one) for one in value]
    return value
