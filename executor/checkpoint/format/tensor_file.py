"""Writer of safetensors files: one tensor in memory at a time, hashed while written.

The format: the length of the header (8 bytes, little endian), the header as JSON ({name: {dtype,
shape, data_offsets}}), then the tensors one after the other. Files are read with the safetensors
library; its writer would copy all tensors of a file into memory first.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from executor.checkpoint.format.checkpoint_errors import cannot_be_written
from executor.checkpoint.format.index import FileEntry

DTYPES: Final[dict[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
CHUNK: Final = 1 << 24  # bytes hashed and written at a time
Declared = tuple[torch.dtype, tuple[int, ...]]


class TensorFile:
    """A safetensors file being written; tensors are added in the declared order."""

    def __init__(
        self, path: Path, tensors: Mapping[str, Declared], metadata: Mapping[str, str] | None = None
    ) -> None:
        self.path = path
        self.left = list(tensors.items())
        self.size, self.hash = 0, hashlib.sha256()
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        offset = 0
        for name, (dtype, shape) in tensors.items():
            end = offset + dtype.itemsize * math.prod(shape)
            entry = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (offset, end)}
            header[name], offset = entry, end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
        try:
            self.handle = path.open("xb", buffering=0)
        except OSError as error:
            raise cannot_be_written(path, error) from None
        self._write(memoryview(len(text).to_bytes(8, "little") + text))

    def add(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor."""
        expected, (dtype, shape) = self.left.pop(0)
        assert (name, tensor.dtype, tuple(tensor.shape)) == (expected, dtype, shape), name
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            self._write(memoryview(flat.numpy()))

    def close(self) -> FileEntry:
        """Wait until the file is on the disk; return its size and checksum."""
        assert not self.left, f"{self.path}: {len(self.left)} tensors are missing"
        try:
            os.fsync(self.handle.fileno())
            self.handle.close()
        except OSError as error:
            raise cannot_be_written(self.path, error) from None
        return FileEntry(self.size, self.hash.hexdigest())

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.close()

    def _write(self, data: memoryview) -> None:
        for start in range(0, len(data), CHUNK):
            chunk = data[start : start + CHUNK]
            self.hash.update(chunk)
            self.size += len(chunk)
            try:
                while chunk:  # a disk that fills up accepts a part first
                    chunk = chunk[self.handle.write(chunk) :]
            except OSError as error:
                raise cannot_be_written(self.path, error) from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Write a file of tensors and wait until it is on the disk."""
    declared = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with TensorFile(path, declared) as file:
        for name, tensor in tensors.items():
            file.add(name, tensor)
        return file.close()
