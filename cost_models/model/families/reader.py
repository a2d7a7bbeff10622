"""Typed access to a config.json with its family's defaults, as in transformers.

A missing key takes the family's default (that of transformers' config class); ``null`` means *none*
if the family allows it, and is an error otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct, field

from hardware_profiles.errors import InputError
from hardware_profiles.fields import convert, tidied, wrong_value

MAX_LAYERS: Final = 10_000
MAX_WIDTH: Final = 1_000_000  # hidden size, head_dim, low ranks
MAX_FFN: Final = 10_000_000
MAX_HEADS: Final = 10_000
MAX_EXPERTS: Final = 10_000
MAX_VOCAB: Final = 10_000_000
MAX_POSITIONS: Final = 1_000_000_000
# named activations of transformers (transformers/activations.py), except those with parameters
# (prelu, xielu)
ACTIVATIONS: Final = (
    "gelu",
    "gelu_10",
    "gelu_accurate",
    "gelu_fast",
    "gelu_new",
    "gelu_python",
    "gelu_python_tanh",
    "gelu_pytorch_tanh",
    "hardswish",
    "laplace",
    "leaky_relu",
    "linear",
    "mish",
    "quick_gelu",
    "relu",
    "relu2",
    "relu6",
    "sigmoid",
    "silu",
    "swish",
    "tanh",
)


Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
REQUIRED: Final = object()  # in the place of a default: the key must be there


class Defaults(Struct, frozen=True):
    """Default values and synonyms of keys of a family's config class."""

    values: Mapping[str, Any]
    synonyms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


# sizes of a decoder, in this order
SIZES: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


def decoder_defaults(
    sizes: Sequence[int | None], *, synonyms: Mapping[str, Any] | None = None, **others: Any
) -> Defaults:
    """Return the defaults of a decoder: ``SIZES``, and what it has besides or otherwise."""
    usual = {"hidden_act": "silu", "tie_word_embeddings": False, "attention_dropout": 0.0}
    return Defaults({**dict(zip(SIZES, sizes, strict=True)), **usual, **others}, synonyms or {})


def whole(low: int, high: int) -> Any:
    """Return the type of whole numbers from ``low`` to ``high``."""
    return Annotated[int, Meta(ge=low, le=high)]


class Config:
    """Typed access to the keys of a config.json."""

    def __init__(
        self, values: Mapping[str, Any], where: str, family: str, defaults: Defaults
    ) -> None:
        self.values = values
        self.where = where  # the file, and the path inside it, for errors
        self.family = family
        self.defaults = defaults
        self.defaulted: dict[str, Any] = {}  # sizes missing in the file

    def read(self, key: str, kind: Any, default: Any = REQUIRED) -> Any:
        """Return the value of a key of the file, checked against a type with bounds.

        A key that is missing or null takes ``default``.
        """
        value = self.values.get(key)
        if value is None:
            if default is REQUIRED:
                raise InputError(f"{self.where}: {key} is missing")
            return default
        value = tidied(value) if isinstance(value, float) else value
        return convert({key: value}, dict[str, kind], self.where)[key]

    def _key(self, key: str) -> str:
        """Return the name of ``key`` in the file."""
        names = (key, *self.defaults.synonyms.get(key, ()))
        return next((name for name in names if name in self.values), key)

    def has(self, key: str) -> bool:
        """Whether the file has ``key`` with a value other than null."""
        return self.values.get(self._key(key)) is not None

    def is_null(self, key: str) -> bool:
        """Whether ``key`` is null."""
        found = self._key(key)
        return found in self.values and self.values[found] is None

    def default(self, key: str) -> Any:
        """Return the family's default, or REQUIRED."""
        return self.defaults.values.get(key, REQUIRED)

    def size(self, key: str, high: int = MAX_WIDTH, *, low: int = 1) -> int:
        """Return a whole number from ``low`` to ``high``."""
        if self.is_null(key):
            raise self.wrong(key, None, f"a whole number from {low:,} to {high:,}")
        if not self.has(key) and self.default(key) is not REQUIRED:
            self.defaulted[key] = self.default(key)
        value: int = self.read(self._key(key), whole(low, high), self.default(key))
        return value

    def index(self, key: str, high: int) -> int:
        """Return a whole number from 0 to ``high``, not a size: its default is not listed."""
        return int(self.read(self._key(key), whole(0, high), self.default(key)))

    def optional_size(self, key: str, high: int = MAX_WIDTH) -> int | None:
        """Return a whole number, or None for null or a default of None."""
        if self.is_null(key):
            return None
        default = self.defaults.values.get(key)
        if default is not None and not self.has(key):
            self.defaulted[key] = default
        value: int | None = self.read(self._key(key), whole(1, high), default)
        return value

    def flag(self, key: str) -> bool:
        """Return true or false; null counts as false."""
        if self.is_null(key):
            return False
        return bool(self.read(self._key(key), bool, self.default(key)))

    def dropout(self, key: str) -> float:
        """Return a probability; null counts as 0."""
        if self.is_null(key):
            return 0.0
        return float(self.read(self._key(key), Fraction, self.default(key)))

    def fraction(self, key: str) -> float:
        """Return a number from 0 to 1."""
        return float(self.read(self._key(key), Fraction, self.default(key)))

    def text(self, key: str, choices: Iterable[str] | None = None) -> str:
        """Return a string."""
        kind = str if choices is None else Literal[tuple(choices)]
        return str(self.read(self._key(key), kind, self.default(key)))

    def activation(self, key: str) -> str:
        """Return the name of an activation that transformers knows."""
        return self.text(key, choices=ACTIVATIONS)

    def layer_types(self, num_layers: int, choices: Iterable[str]) -> list[str] | None:
        """Return ``layer_types``, one of ``choices`` for each layer, or None without the key."""
        key = "layer_types"
        if not self.has(key):
            return None
        values = self.read(self._key(key), list[Any])
        known = list(choices)
        if len(values) != num_layers or not all(value in known for value in values):
            allowed = f"{num_layers:,} of {', '.join(known)}, one a layer"
            raise self.wrong(key, values, allowed)
        return list(values)

    def whole_numbers(self, key: str, high: int) -> list[int]:
        """Return a list of whole numbers from 0 to ``high``; null counts as an empty list."""
        values = self.read(self._key(key), list[Any], ())
        if not all(type(value) is int and 0 <= value <= high for value in values):
            raise self.wrong(key, values, f"a list of whole numbers from 0 to {high:,}")
        return list(values)

    def wrong(self, key: str, value: object, allowed: str) -> InputError:
        """Return the error for a value that is not allowed."""
        return wrong_value(self.where, self._key(key), value, allowed)

    def must_divide(self, divisor: str, number: int, key: str, value: int) -> None:
        """Raise unless the value of ``divisor`` divides that of ``key``."""
        if value % number:
            raise self.wrong(divisor, number, f"a divisor of {self._key(key)} = {value:,}")
