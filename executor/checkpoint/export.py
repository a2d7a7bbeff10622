"""The command ``export``: a checkpoint as a Hugging Face folder, one tensor in memory at a time."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

from executor.checkpoint.format.checkpoint_errors import cannot_be_written
from executor.checkpoint.format.folder import removed_on_error, sync_folder, write_and_sync
from executor.checkpoint.format.hugging_face_names import (
    INDEX,
    SINGLE,
    StoredTensor,
    stored_tensors,
)
from executor.checkpoint.format.index import check_file
from executor.checkpoint.format.tensor_file import DTYPES, TensorFile
from executor.checkpoint.loading.checkpoint_reader import Checkpoint
from executor.checkpoint.loading.merged_adapters import is_adapter, merged_matrix
from executor.checkpoint.options import named_source
from executor.compat import causal_lm
from executor.data.vocabulary import open_vocabulary
from executor.dtypes import COMPUTE_DTYPE
from hardware_profiles.errors import InputError
from hardware_profiles.fields import names_in
from hardware_profiles.progress import report, status_line, tracked
from hardware_profiles.terminal import say, show

DTYPE_OF: Final = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
MAX_SHARD_BYTES: Final = 5_000_000_000  # per file, the default of save_pretrained
# files of a tokenizer in a Hugging Face folder
_TOKENIZER: Final = names_in("""
    tokenizer* special_tokens_map.json added_tokens.json vocab.* merges.txt *.model chat_template*
""")
CHECKING: Final = "checking file {number} of {total}"
WRITING: Final = "writing tensor {number} of {total}"
Planned = tuple[str, StoredTensor]  # a parameter, and a stored tensor with all or a piece of it


def export(
    source: Path, output: Path, *, dtype: str | None, max_shard_bytes: int, as_json: bool
) -> int:
    """Run the command; return the exit code."""
    with status_line("reading the checkpoint"):
        checkpoint, notes = newest_intact(source)
        report(f"writing the weights of step {checkpoint.index.step}")
        notes += write_hugging_face(
            checkpoint,
            output,
            dtype=None if dtype is None else DTYPE_OF[dtype],
            max_shard_bytes=max_shard_bytes,
        )
    for note in notes:
        say(f"note: {note}")
    document = {
        "schema_version": 1,
        "checkpoint": str(checkpoint.folder),
        "step": checkpoint.index.step,
        "output": str(output),
        "notes": notes,
    }
    if as_json:
        show(json.dumps(document, indent=2))
    else:
        show(f"Written: {output} (step {checkpoint.index.step})")
    return 0


def newest_intact(source: Path) -> tuple[Checkpoint, list[str]]:
    """Return the newest intact checkpoint of a run or folder, and notes about skipped ones."""
    notes: list[str] = []
    for folder in named_source(source).candidates:
        try:
            checkpoint = Checkpoint(folder)
            files = list(checkpoint.index.files.items())
            for name, file in tracked(files, CHECKING, size=lambda one: one[1].size):
                check_file(folder / name, file)
        except InputError as error:
            notes.append(f"skipped {folder.name}: {error}")
            continue
        return checkpoint, notes
    raise InputError(f"no usable checkpoint: {'; '.join(notes)}")


def write_hugging_face(
    checkpoint: Checkpoint,
    output: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[str]:
    """Write weights, config, generation config and tokenizer; return notes.

    ``dtype``: of the weights; None: the run's compute precision. The folder is published
    atomically.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output}: not empty; choose another -o")
    about = checkpoint.index.about
    if dtype is None:
        dtype = COMPUTE_DTYPE[about["workload"]["precision"]]
    temporary = output.with_name(f".{output.name}.tmp-{os.urandom(4).hex()}")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:  # a bad argument: nothing is written yet
        raise InputError(str(cannot_be_written(output, error))) from None
    try:
        with removed_on_error(temporary, owner=True):
            _write_weights(checkpoint, temporary, dtype, max_shard_bytes)
            tokenizer = about.get("options", {}).get("tokenizer")
            notes = _copy_tokenizer(tokenizer, temporary)
            end = open_vocabulary(str(temporary)).end if tokenizer and not notes else None
            _write_configs(about["model"]["config"], temporary, dtype, end)
            sync_folder(temporary)
            if output.exists():
                output.rmdir()
            temporary.rename(output)
    except OSError as error:
        raise cannot_be_written(Path(error.filename or output), error) from None
    return notes


def _write_weights(
    checkpoint: Checkpoint, folder: Path, dtype: torch.dtype, max_shard_bytes: int
) -> None:
    family = str(checkpoint.index.about["model"]["config"]["model_type"])
    planned = [
        (name, part)
        for name, entry in checkpoint.index.tensors.items()
        if not is_adapter(name)
        for part in stored_tensors(family, name, entry.shape)
    ]
    dtype_of = _dtypes(checkpoint, dtype)

    def size(item: Planned) -> int:
        return math.prod(item[1].shape) * int(dtype_of(item[0]).itemsize)

    shards = list(_shards(planned, size, max_shard_bytes))
    weight_map = {}
    written = tracked(shards, size=lambda shard: sum(map(size, shard)))
    for number, shard in enumerate(written, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else SINGLE
        declared = {part.key: (dtype_of(name), part.shape) for name, part in shard}
        with TensorFile(folder / file, declared, {"format": "pt"}) as opened:
            for name, part in tracked(shard, WRITING, size=size):
                values = merged_matrix(checkpoint, family, name)
                if values is None:
                    values = checkpoint.weights(name, part.pieces)
                opened.add(part.key, values.to(dtype_of(name)).view(part.shape))
                weight_map[part.key] = file
            opened.close()
    if len(shards) > 1:
        total = {"total_size": sum(map(size, planned))}
        text = json.dumps({"metadata": total, "weight_map": weight_map}, indent=2)
        write_and_sync(folder / INDEX, text + "\n")


def _dtypes(checkpoint: Checkpoint, dtype: torch.dtype) -> Callable[[str], torch.dtype]:
    """Return the dtype of each parameter in the export; integers keep theirs."""

    def of(name: str) -> torch.dtype:
        saved = DTYPES[checkpoint.index.tensors[name].dtype]
        return dtype if saved.is_floating_point else saved

    return of


def _shards(
    planned: list[Planned], size: Callable[[Planned], int], most: int
) -> Iterator[list[Planned]]:
    """Fill files in order; a tensor above the limit gets a file of its own."""
    shard: list[Planned] = []
    total = 0
    for item in planned:
        if shard and total + size(item) > most:
            yield shard
            shard, total = [], 0
        shard.append(item)
        total += size(item)
    yield shard


def _write_configs(
    config: dict[str, Any], folder: Path, dtype: torch.dtype, end: int | None
) -> None:
    """Write config.json and, for a generative model, generation_config.json.

    ``end``: the token after every document of the training data, which ends generation.
    """
    model: Any = causal_lm(config, device="meta", dtype=dtype, attention_kernel="flash")
    model.config.use_cache = config.get("use_cache", True)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = dtype
    model.config.save_pretrained(folder)
    if model.can_generate():
        generation = model.generation_config
        generation.use_cache = True
        if end is not None:
            generation.eos_token_id = end
        generation.save_pretrained(folder)


def _copy_tokenizer(source: str | None, folder: Path) -> list[str]:
    """Copy the files of the run's tokenizer."""
    if source is None:
        return ["no tokenizer: the run was trained on bytes or on tokens"]
    files = {file for pattern in _TOKENIZER for file in Path(source).glob(pattern)}
    if not files:
        return [f"the run's tokenizer is no longer in {source}: copy it by hand"]
    for file in sorted(files):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    return []
