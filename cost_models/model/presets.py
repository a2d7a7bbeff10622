"""Well-known architectures by name, as TOML files in ``preset_data/``.

Every preset has the keys of the published config.json, their source, and the published number of
parameters, which a test compares with the computed one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from hardware_profiles.errors import InputError, similar
from hardware_profiles.fields import convert, read_text, read_toml

FOLDER: Final = Path(__file__).parent / "preset_data"
_SIZE: Final = re.compile(r"\d+(?:\.\d+)?[bm]")  # in a model's name, such as 7b


@dataclass(frozen=True, slots=True)
class Preset:
    """One well-known architecture."""

    name: str
    aliases: tuple[str, ...]
    source: str
    published_parameters: int
    config: Mapping[str, Any]
    stored: str = ""  # format of the published weights where it is not one of 16 or 32 bits


class _PresetEntry(Struct, frozen=True, forbid_unknown_fields=True):
    source: str
    parameters: Annotated[int, Meta(ge=1, le=10**14)]
    config: dict[str, Any]
    null: tuple[str, ...] = ()  # keys of config.json that are null, which TOML cannot say
    aliases: tuple[str, ...] = ()
    stored: str = ""


@cache
def _files() -> dict[Path, str]:
    """Return the text of every preset file in lower case, in the order of their names."""
    return {path: read_text(path, "presets").lower() for path in sorted(FOLDER.glob("*.toml"))}


@cache
def _of_file(path: Path) -> tuple[Preset, ...]:
    """Read one preset file."""
    entries = convert(read_toml(path, "presets"), dict[str, _PresetEntry], str(path))
    return tuple(
        Preset(
            name=name,
            aliases=entry.aliases,
            source=entry.source,
            published_parameters=entry.parameters,
            config={**entry.config, **dict.fromkeys(entry.null)},
            stored=entry.stored,
        )
        for name, entry in entries.items()
    )


@cache
def _find(name: str) -> Preset | None:
    """Return the preset of a name or alias in lower case; files that do not have it stay unread."""
    for path, text in _files().items():
        if name not in text:
            continue
        for preset in _of_file(path):
            if name in (preset.name.lower(), *map(str.lower, preset.aliases)):
                return preset
    return None


# words of a repository's name that name a training stage or a file format, not a shape
_STAGES: Final = frozenset({"instruct", "chat", "it", "base", "pt", "hf"})


def _shape_name(name: str) -> str:
    """Return a name in lower case without the words of ``_STAGES``.

    >>> _shape_name("mistralai/Mistral-7B-Instruct-v0.3")
    'mistralai/mistral-7b-v0.3'
    """
    return "-".join(word for word in name.lower().split("-") if word not in _STAGES)


@cache
def preset_of_shape(name: str) -> Preset | None:
    """Return the preset whose name or hub id differs only in the stage of training.

    >>> preset_of_shape("Qwen/Qwen2.5-7B-Instruct").name
    'qwen2.5-7b'
    """
    wanted = _shape_name(name)
    for path, text in _files().items():
        if wanted not in text:
            continue
        for preset in _of_file(path):
            if wanted in map(_shape_name, (preset.name, *preset.aliases)):
                return preset
    return None


# words beside a model's name that change no shape
_BESIDE: Final = _STAGES | {
    *("model", "dense", "full", "lora", "qlora", "sft", "dpo", "pretrain", "pretraining"),
    *("int4", "int8", "gptq", "awq", "bnb", "4bit", "8bit", "hf", "coder", "math", "code"),
    *("training", "finetuning", "finetune", "fine", "tuning", "causal", "lm", "bf16", "fp16"),
}


@cache
def preset_of_spelling(name: str) -> Preset | None:
    """Return the preset whose name or hub id has the same letters and digits, as people write it.

    Owners, and words such as "chat", "pretraining" or "LoRA", do not count.

    >>> preset_of_spelling("Llama 2 7B chat").name, preset_of_spelling("Mixtral-8x7B").name
    ('llama-2-7b', 'mixtral-8x7b')
    >>> preset_of_spelling("llama") is None
    True
    """
    for wanted in filter(None, map(letters, (name, name.replace("_", "-")))):
        for preset in all_presets():
            if wanted in map(letters, (preset.name, *preset.aliases)):
                return preset
    return None


def letters(name: str) -> str:
    """Return letters, digits and dots of a name without its owner and the words of ``_BESIDE``.

    >>> letters("Baichuan2-13B-Chat"), letters("internlm/internlm2_5-7b")
    ('baichuan213b', 'internlm2.57b')
    >>> letters("qwen1half-7b-chat")
    'qwen1.57b'
    """
    name = re.sub(r"(?<=\d)half\b", ".5", name)  # ModelScope writes no dots
    own = re.sub(r"^[^/]*/(?!\d+$)", "", name.lower())  # ViT-B/16 has no owner
    words = re.findall(r"[a-z0-9.]+", re.sub(r"(?<=\d)_(?=\d)", ".", own))
    return "".join(word for word in words if word not in _BESIDE)


def all_presets() -> tuple[Preset, ...]:
    """Return all presets."""
    return tuple(preset for path in _files() for preset in _of_file(path))


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets, without their aliases."""
    return tuple(preset.name for preset in all_presets())


def is_preset(name: str) -> bool:
    """Whether ``name`` is a preset or an alias of one; case does not matter."""
    return _find(name.lower()) is not None


def similar_presets(name: str) -> str:
    """Return a hint such as ``Did you mean llama-3-8b?``, or an empty string.

    Presets that begin with the name come first, then those of its size; none of another family.

    >>> similar_presets("llama3"), similar_presets("whisper-large")
    ('Did you mean llama-3-8b or llama-3-70b or llama-3.1-8b?', '')
    """
    given = _squeezed(name)
    begun = [one for one in preset_names() if given and _squeezed(one).startswith(given)]
    size = _SIZE.search(name.lower())
    close = [one for one in similar(name, preset_names(), count=12) if _same_family(name, one)]
    close.sort(key=lambda one: size is None or size[0] not in _SIZE.findall(one))
    chosen = (begun or close)[:3]
    return f"Did you mean {' or '.join(chosen)}?" if chosen else ""


def _squeezed(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def _same_family(one: str, other: str) -> bool:
    """Whether the letters at the beginning of two names are alike."""
    first, second = (re.sub(r"[^a-z].*", "", _squeezed(name)) for name in (one, other))
    return SequenceMatcher(None, first, second).ratio() >= 0.7


def load_preset(name: str) -> Preset:
    """Return a preset by its name or an alias; case does not matter.

    >>> load_preset("Meta-Llama-3-8B").name
    'llama-3-8b'
    """
    found = _find(name.lower())
    if found is None:
        hint = similar_presets(name) or f"Known: {', '.join(preset_names())}"
        raise InputError(f"no preset is named {name!r}. {hint}")
    return found
