"""What a Hugging Face folder of weights holds, by the names of its files; imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hardware_profiles.errors import InputError
from hardware_profiles.fields import read_json

CONFIG: Final = "config.json"
SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"


def require_weights(folder: Path) -> None:
    """Raise an InputError where a folder has no config, or no weights that are read."""
    read_json(folder / CONFIG, "the config of a Hugging Face folder")
    if not any((folder / name).exists() for name in (SINGLE, INDEX)):
        raise no_weights(folder)


def no_weights(folder: Path) -> InputError:
    """Say that a folder holds none."""
    pickled = " (pickled weights are not read: they can run code)"
    others = pickled if any(folder.glob("*.bin")) else ""
    return InputError(f"{folder}: neither {SINGLE} nor {INDEX} in it{others}")
