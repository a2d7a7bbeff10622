"""The index of a checkpoint: the file of every part of every tensor, and a description of the run.

Written last, into a folder that is then published: a checkpoint without an index, or whose files
have other sizes or checksums than the index, is invalid. Imports no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct, field

from executor.checkpoint.format.checkpoint_errors import DamagedError, file_in
from executor.checkpoint.format.pieces import numel, whole_tensor
from hardware_profiles.errors import InputError
from hardware_profiles.fields import MAX_DEPTH, convert, nesting, read_text
from hardware_profiles.message import on_one_line

INDEX_NAME: Final = "index.json"
SCHEMA_VERSION: Final = 1
WEIGHTS, STATE = "weights", "state"  # the two files of a rank
CHUNK: Final = 1 << 24
MAX_BYTES: Final = 1_000_000_000  # of an index

Count = Annotated[int, Meta(ge=0, le=10**15)]


class TensorPart(Struct, frozen=True):
    """The part of a tensor that one rank wrote."""

    rank: Count
    pieces: tuple[tuple[tuple[Count, Count], ...], ...] = field(name="ranges")


class TensorEntry(Struct, frozen=True):
    """One parameter of the model, under its Hugging Face name."""

    shape: tuple[Count, ...]
    dtype: str  # name in safetensors
    parts: tuple[TensorPart, ...]


class FileEntry(Struct, frozen=True):
    """Size and checksum of a file."""

    size: Count = field(name="bytes")
    sha256: str


class CheckpointIndex(Struct, frozen=True):
    """The contents of index.json."""

    step: Count  # completed optimizer steps
    world_size: Annotated[int, Meta(ge=1, le=10**6)]  # ranks that wrote it
    state: tuple[str, ...]  # optimizer state of every tensor: exp_avg, step, ...
    trainer: Mapping[str, Any]  # the trainer's non-tensor state
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    # the other keys: model, workload, plan, layer_ranges, data, options, environment
    about: Mapping[str, Any] = {}

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "step": self.step,
            "world_size": self.world_size,
            "state": list(self.state),
            "trainer": dict(self.trainer),
            **self.about,
            "files": msgspec.to_builtins(self.files),
            "tensors": msgspec.to_builtins(self.tensors),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str) -> CheckpointIndex:
        """Read and check the values of an index.json."""
        version = values.get("schema_version")
        if version != SCHEMA_VERSION:
            raise DamagedError(
                f"{where}: schema_version = {on_one_line(str(version)[:20])}; this version of "
                f"shardplan reads {SCHEMA_VERSION}"
            )
        try:
            found = convert(values, cls, where)
        except InputError as error:
            raise DamagedError(f"{error}; it is not an index of a checkpoint") from None
        checked = ("schema_version", *cls.__struct_fields__)
        about = {name: value for name, value in values.items() if name not in checked}
        index = msgspec.structs.replace(found, about=about)
        index.check_cover(where)
        return index

    def check_cover(self, where: str) -> None:
        """Check the names of files, and that the parts of every tensor cover it."""
        for name in self.files:
            file_in(Path(where).parent, name)
        for name, entry in self.tensors.items():
            found, expected = (
                sum(numel(p.pieces) for p in entry.parts),
                numel(whole_tensor(entry.shape)),
            )
            if found != expected:
                raise DamagedError(
                    f"{where}: the parts of {name} hold {found:,} elements, its shape "
                    f"{list(entry.shape)} has {expected:,}"
                )


def file_name(kind: str, rank: int, world_size: int) -> str:
    """Return the name of a rank's file."""
    return f"{kind}-{rank:05d}-of-{world_size:05d}.safetensors"


def state_name(key: str, name: str) -> str:
    """Return the name of a parameter's optimizer state in a file."""
    return f"{key}/{name}"


def read_index(folder: Path) -> CheckpointIndex:
    """Read the index in a checkpoint's folder, without its files."""
    path = folder / INDEX_NAME
    if not path.exists():
        reason = "no such folder" if not folder.is_dir() else f"no {INDEX_NAME} in it"
        raise DamagedError(f"{folder}: not a checkpoint ({reason})")
    try:
        text = read_text(path, "the index of a checkpoint", max_bytes=MAX_BYTES)
        values = msgspec.json.decode(text)
    except InputError as error:
        raise DamagedError(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise DamagedError(f"{path}: not JSON, or truncated: {error}") from None
    if not isinstance(values, dict):
        raise DamagedError(f"{path}: not an index of a checkpoint")
    if nesting({k: v for k, v in values.items() if k not in ("files", "tensors")}) > MAX_DEPTH:
        raise DamagedError(f"{path}: nested too deeply (at most {MAX_DEPTH} levels)")
    return CheckpointIndex.from_dict(values, str(path))


def check_file(path: Path, expected: FileEntry, beat: Callable[[], Any] = lambda: None) -> None:
    """Check a file's size and SHA-256; ``beat`` is called after every chunk."""
    found = hashlib.sha256()
    try:
        size = path.stat().st_size
        if size != expected.size:
            raise DamagedError(f"{path}: has {size:,} bytes, the index {expected.size:,}")
        with path.open("rb") as handle:
            while chunk := handle.read(CHUNK):
                found.update(chunk)
                beat()
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read: {error.strerror or error}") from None
    if found.hexdigest() != expected.sha256:
        raise DamagedError(f"{path}: is corrupted (its SHA-256 differs from the index)")
