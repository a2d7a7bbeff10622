"""Well-known architectures by name, as TOML files in ``preset_data/``.

Every preset has the keys of the published config.json, their source, and the published number of
parameters, which a test compares with the computed one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from hardware_profiles.errors import InputError, similar
from hardware_profiles.fields import convert, read_text, read_toml

FOLDER: Final = Path(__file__).parent / "preset_data"
_SIZE: Final = re.compile(r"\d+(?:\.\d+)?[bm]")  # in a model's name, such as 7b


class Preset(Struct, frozen=True):
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


# words next to a model's name that change no shape
_BESIDE: Final = _STAGES | {
    *("model", "dense", "full", "lora", "qlora", "sft", "dpo", "pretrain", "pretraining"),
    *("int4", "int8", "gptq", "awq", "aqlm", "bnb", "4bit", "8bit", "2bit", "1x16"),
    *("hf", "coder", "math", "code"),
    *("training", "finetuning", "finetune", "fine", "tuning", "causal", "lm", "bf16", "fp16"),
    *("megatron", "uncased", "cased", "fp8"),
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
    return "".join(_words(name))


_LENGTH: Final = re.compile(r"\d+k|4096")  # the longest sequence: "32k", "longformer-base-4096"


def _words(name: str) -> list[str]:
    name = re.sub(r"(?<=\d)half\b", ".5", name)  # ModelScope writes no dots
    name = _SIZE_AFTER.sub("-", name)
    own = re.sub(r"^[^/]*/(?!\d+$)", "", name.lower())  # ViT-B/16 has no owner
    words = re.findall(r"[a-z0-9.]+", re.sub(r"(?<=\d)_(?=\d)", ".", own))
    return [word for word in words if word not in _BESIDE and not _LENGTH.fullmatch(word)]


# an underscore between the number of a release and a size: "gpt3_13B", "llama31_8b", "llama3_1_8b",
# but not "Qwen-1_8B"
_SIZE_AFTER: Final = re.compile(
    r"(?:(?<=[a-zA-Z.]\d)|(?<=[a-zA-Z]\d\d)|(?<=\d[_.]\d))_(?=\d+(?:\.\d+)?[bmtBMT](?![a-zA-Z]))"
)
# words for sizes of a family, which count no parameters
_SIZE_WORDS: Final = frozenset({"mini", "small", "medium", "large", "xl", "xxl", "huge"})
_UNITS: Final = {"m": 1e6, "b": 1e9, "t": 1e12}
# of a size in a name: GPT-2 medium has 355 million parameters and is called 345M, as 7B is 6.7
ROUNDED: Final = 0.05


def family_and_size(name: str) -> tuple[str, float]:
    """Return the letters of a name but for its size, and its size in parameters, 0 without one.

    >>> family_and_size("GPT-2 XL (1.5B)"), family_and_size("39.1B Megatron-GPT")
    (('gpt2', 1500000000.0), ('gpt', 39100000000.0))
    >>> family_and_size("opt66b"), family_and_size("command-r")
    (('opt', 66000000000.0), ('commandr', 0.0))
    """
    spelled = re.sub(r"(?<=\d)[ -]?(?:(b)illion|(m)illion|(t)rillion)\b", r"\1\2\3", name.lower())
    family, size = [], 0.0
    for word in _words(re.sub(r"(?<=\d) (?=[mbt]\b)", "", spelled)):
        found = None if size else re.fullmatch(r"([a-z]*)(\d+(?:\.\d+)?)([mbt])", word)
        if found:
            size, word = float(found[2]) * _UNITS[found[3]], found[1]
        family.append(word if word not in _SIZE_WORDS else "")
    return "".join(family).removeprefix("megatron"), size


@cache
def presets_of_size(name: str) -> tuple[Preset, ...]:
    """Return the presets of the family and size in a name, the one that it means first.

    Sizes are equal within ``ROUNDED``. A family without the number of its release is that of any,
    the latest first.

    >>> [preset.name for preset in presets_of_size("GPT2-774M")]
    ['gpt2-large']
    >>> [preset.name for preset in presets_of_size("Llama 70B")]
    ['llama-3.1-70b', 'llama-3-70b', 'llama-2-70b']
    """
    family, size = family_and_size(name)
    if not family or not size:
        return ()
    near = [
        (abs(own / size - 1.0), release, preset)
        for preset, names in _families()
        for release, own in names
        if abs(own / size - 1.0) <= ROUNDED
    ]
    same = sorted((off, preset.name) for off, release, preset in near if release == family)
    if same:
        return (load_preset(same[0][1]),)
    any_release = {
        preset.name: float(number[1])
        for _, release, preset in near
        if (number := re.fullmatch(rf"{re.escape(family)}v?(\d+(?:\.\d+)?)", release))
    }
    return tuple(map(load_preset, sorted(any_release, key=any_release.__getitem__, reverse=True)))


@cache
def _families() -> tuple[tuple[Preset, frozenset[tuple[str, float]]], ...]:
    """Return the family and size of every name of a preset, and the size that was published."""
    return tuple(
        (
            preset,
            frozenset(
                (family, size)
                for family, own in map(family_and_size, (preset.name, *preset.aliases))
                for size in (own or preset.published_parameters, preset.published_parameters)
            ),
        )
        for preset in all_presets()
    )


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
