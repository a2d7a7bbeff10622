"""Writer of one checkpoint: each rank writes its files, then rank 0 the index, and publishes it.

Every rank calls this together, in a thread with a process group of its own. What it writes are
copies in host memory, taken between two steps.
"""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from cost_models.units import format_bytes
from executor.checkpoint.agreement import CPU, on_all_ranks, on_rank_0
from executor.checkpoint.format.folder import CheckpointFolder, removed_on_error, write_and_sync
from executor.checkpoint.format.index import (
    INDEX_NAME,
    STATE,
    WEIGHTS,
    CheckpointIndex,
    FileEntry,
    TensorEntry,
    TensorPart,
    file_name,
    state_name,
)
from executor.checkpoint.format.tensor_file import DTYPE_NAMES, write_tensors
from executor.parallel.mesh import gather_json
from executor.training.optimizer import ParameterShard
from executor.training.trainer import Trainer
from hardware_profiles.errors import InputError

TIMEOUT: Final = datetime.timedelta(hours=1)  # of the slowest rank's disk
Files = dict[str, dict[str, Tensor]]  # file of the rank -> name in it -> tensor


class CheckpointWriter:
    """Writes the checkpoints of a run into one folder."""

    def __init__(
        self,
        folder: CheckpointFolder,
        share: Sequence[ParameterShard],
        about: Mapping[str, Any],
        *,
        keep: int,
        keep_every: int | None,
    ) -> None:
        self.folder, self.about = folder, about
        self.keep, self.keep_every = keep, keep_every
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        entries = gather_json(
            [[h.layout.name, h.layout.shape, DTYPE_NAMES[h.saved_dtype], h.pieces] for h in share],
            CPU,
            self.group,
        )
        self.tensors = _tensors(entries) if self.rank == 0 else {}

    def prepare(self, expected_bytes: float) -> None:
        """Create the folder, and check that every rank can write there and the disk has room."""
        probe = Path(on_rank_0(lambda: str(self._probe(expected_bytes)), group=self.group))
        try:
            on_all_ranks(lambda: self._try(probe), group=self.group)
        finally:
            if self.rank == 0:
                shutil.rmtree(probe, ignore_errors=True)

    def write(self, step: int, trainer: Mapping[str, Any], files: Files) -> Path:
        """Write a checkpoint; return its folder, or raise an error on every rank."""
        begun: str = on_rank_0(lambda: str(self.folder.begin(step)), group=self.group)
        temporary = Path(begun)
        with removed_on_error(temporary, owner=self.rank == 0):
            reports = on_all_ranks(lambda: self._write_files(temporary, files), group=self.group)
            published: str = on_rank_0(
                lambda: self._publish(temporary, step, trainer, reports), group=self.group
            )
        return Path(published)

    def _write_files(self, temporary: Path, files: Files) -> dict[str, Any]:
        """Write this rank's files; return their sizes and checksums."""
        found = {}
        for kind, tensors in files.items():
            name = file_name(kind, self.rank, self.world_size)
            written = write_tensors(temporary / name, tensors)
            found[name] = [written.size, written.sha256]
        keys = {name.split("/", 1)[0] for name in files.get(STATE, {})}
        return {"files": found, "state": sorted(keys)}

    def _publish(
        self,
        temporary: Path,
        step: int,
        trainer: Mapping[str, Any],
        reports: Sequence[Mapping[str, Any]],
    ) -> str:
        """Write the index, publish the checkpoint, delete old ones; return its folder."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        index = CheckpointIndex(
            step=step,
            world_size=self.world_size,
            trainer=trainer,
            state=tuple(sorted({key for report in reports for key in report["state"]})),
            files={n: FileEntry(*f) for report in reports for n, f in report["files"].items()},
            tensors=self.tensors,
            about={"saved_at": now, **self.about},
        )
        write_and_sync(temporary / INDEX_NAME, json.dumps(index.to_dict(), allow_nan=False) + "\n")
        folder = self.folder.publish(temporary, step)
        self.folder.prune(self.keep, self.keep_every)
        return str(folder)

    def _probe(self, expected_bytes: float) -> Path:
        self.folder.prepare()
        free = shutil.disk_usage(self.folder.path).free
        if free < expected_bytes:
            raise InputError(
                f"{self.folder.path}: a checkpoint takes about {format_bytes(expected_bytes)}, "
                f"{format_bytes(free)} are free on this disk"
            )
        return self.folder.begin(0)

    def _try(self, probe: Path) -> None:
        if not probe.is_dir():
            raise InputError(
                f"{self.folder.path}: rank 0 wrote there, but this rank does not see it "
                "(checkpoints need a file system that all nodes share)"
            )
        write_and_sync(probe / f"rank-{self.rank}", "")


def _tensors(entries: Sequence[Sequence[Any]]) -> dict[str, TensorEntry]:
    """Return the table of tensors from the entries of all ranks."""
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    parts: dict[str, list[TensorPart]] = {}
    for rank, own in enumerate(entries):
        for name, shape, dtype, pieces in own:
            shapes[name] = (tuple(shape), dtype)
            parts.setdefault(name, []).append(TensorPart(rank, pieces))
    return {name: TensorEntry(*shapes[name], tuple(parts[name])) for name in sorted(shapes)}


class Snapshot:
    """Copies this rank's tensors; the memory is reused by the next snapshot."""

    def __init__(self, trainer: Trainer, share: Sequence[ParameterShard]) -> None:
        self.trainer, self.share = trainer, share
        self.memory: dict[str, Tensor] = {}

    def take(self) -> Files:
        """Return the copies: master weights, and their optimizer state."""
        state = {
            state_name(key, h.layout.name): value
            for h in self.share
            for key, value in self.trainer.optimizer.state(h).items()
        }
        copies = {
            # in turn: a 4-bit matrix is unpacked for its copy
            WEIGHTS: {
                h.layout.name: self._copy(f"{WEIGHTS}/{h.layout.name}", h.saved())
                for h in self.share
            },
            STATE: {name: self._copy(f"{STATE}/{name}", value) for name, value in state.items()},
        }
        copies = {kind: tensors for kind, tensors in copies.items() if tensors}
        if self.trainer.device.type == "cuda":
            torch.cuda.synchronize(self.trainer.device)
        return copies

    def _copy(self, key: str, tensor: Tensor) -> Tensor:
        """Return a copy on the host, in memory of the last snapshot where possible."""
        tensor = tensor.detach()
        memory = self.memory.get(key)
        if memory is None or (memory.shape, memory.dtype) != (tensor.shape, tensor.dtype):
            memory = torch.empty_like(
                tensor,
                device="cpu",
                memory_format=torch.contiguous_format,
                pin_memory=tensor.device.type == "cuda",
            )
            self.memory[key] = memory
        return memory.copy_(tensor, non_blocking=True)
