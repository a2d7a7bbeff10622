"""A checkpoint that is not whole is skipped with a reason; the one before it is taken."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cost_models.plan.plan import Plan
from executor.checkpoint.format.checkpoint_errors import DamagedError
from executor.checkpoint.format.index import CheckpointIndex, read_index
from executor.checkpoint.format.pieces import local_shape, overlaps, whole_tensor
from executor.processes.fork import run_forked
from hardware_profiles.errors import InputError
from tests.executor.checkpoint.saving import train, trained
from tests.executor.tiny import tiny

TWO = Plan(data_parallel=2, zero_stage=1, micro_batch_size=2)
WEIGHTS = "weights-00001-of-00002.safetensors"
STATE = "state-00000-of-00002.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """Return a folder with checkpoints after steps 1 and 2, and the losses of three steps."""
    folder = tmp_path_factory.mktemp("saved")
    losses = trained(_file(), folder, 2, every=1)[0]["losses"]
    losses += train_on(folder)["losses"]
    return folder, dict(enumerate(losses, start=1))


def _file() -> Any:
    return tiny(TWO, num_layers=1, optimizer="adamw")


def train_on(folder: Path) -> dict[str, Any]:
    """Resume and train to step 3."""
    return trained(_file(), folder, 3)[0]


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def _lose_a_part(values: dict[str, Any]) -> None:
    values["tensors"]["lm_head.weight"]["parts"].pop()


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a bit": (lambda f: _flip(f / WEIGHTS), f"{WEIGHTS}: is corrupted"),
    "a short file": (lambda f: _cut(f / STATE), f"{STATE}: has .* bytes, the index"),
    "a lost file": (lambda f: (f / WEIGHTS).unlink(), f"{WEIGHTS}: cannot be read: No such file"),
    "a short index": (lambda f: _cut(f / "index.json"), "index.json: not JSON, or truncated"),
    "no index": (lambda f: (f / "index.json").unlink(), r"not a checkpoint \(no index.json in it"),
    "another version": (
        lambda f: _edit(f / "index.json", lambda v: v.update(schema_version=9)),
        "index.json: schema_version = 9; this version of shardplan reads 1",
    ),
    "a lost part": (
        lambda f: _edit(f / "index.json", _lose_a_part),
        "the parts of lm_head.weight hold 4,096 elements, its shape .* has 8,192",
    ),
    "a lost key": (
        lambda f: _edit(f / "index.json", lambda v: v.pop("files")),
        "index.json: files is missing; it is not an index of a checkpoint",
    ),
    "a wrong size": (
        lambda f: _edit(f / "index.json", lambda v: v["files"][STATE].update(bytes=-1)),
        f"index.json: files: {STATE}: bytes = -1 .*; it is not an index of a checkpoint",
    ),
    "no object": (lambda f: (f / "index.json").write_text("[]"), "not an index of a checkpoint"),
}
SLOW = ("another version", "a lost part", "a lost key", "a wrong size", "no object", "no index")


@pytest.mark.sampled(1)
@pytest.mark.distributed
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow if k in SLOW else ()) for k in DAMAGE]
)
def test_the_one_before_is_taken(kind: str, saved: Any, tmp_path: Path):
    source, losses = saved
    folder = tmp_path / "checkpoints"
    shutil.copytree(source, folder)
    (folder / "step-00000009.tmp-12ab").mkdir()
    damage, reason = DAMAGE[kind]
    damage(folder / "step-00000002")
    found = train_on(folder)
    assert found["losses"] == [losses[2], losses[3]]
    (note,) = found["notes"]
    assert re.match(f"skipped step-00000002: .*{reason}", note), note
    assert not (folder / "step-00000009.tmp-12ab").exists()
    damage(folder / "step-00000001")
    with pytest.raises(InputError, match="no usable checkpoint: skipped step-00000002: "):
        run_forked(train, 2, _file(), str(folder), 3, None)


def test_blocks_cover_what_both_hold():
    source = (((0, 4), (8, 12)), ((0, 3),))
    target = (((2, 9), (11, 12)), ((1, 5),))
    assert local_shape(target) == (8, 4)
    blocks = [tuple(span for span in block) for block in overlaps(source, target)]
    assert [tuple(tuple(span) for span in block) for block in blocks] == [
        ((2, 0, 2), (1, 0, 2)),
        ((4, 6, 1), (1, 0, 2)),
        ((7, 7, 1), (1, 0, 2)),
    ]
    assert list(overlaps(whole_tensor((2,)), (((5, 5),),))) == []
    assert list(overlaps((), ())) == [()]


def test_an_index_survives_json():
    values = {
        "schema_version": 1,
        "step": 3,
        "world_size": 1,
        "state": ["step"],
        "trainer": {"steps_done": 3},
        "plan": {"data_parallel": 1},
        "files": {"weights-00000-of-00001.safetensors": {"bytes": 8, "sha256": "0" * 64}},
        "tensors": {
            "w": {
                "shape": [2, 3],
                "dtype": "F32",
                "parts": [{"rank": 0, "ranges": [[[0, 2]], [[0, 3]]]}],
            }
        },
    }
    index = CheckpointIndex.from_dict(values, "here")
    assert json.loads(json.dumps(index.to_dict())) == values


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("files", {"../other": {"bytes": 0, "sha256": ""}}, "names a file elsewhere: '../other'"),
        ("files", {"pipe": {"bytes": 0, "sha256": ""}}, "pipe: is not a regular file"),
        ("plan", json.loads("[" * 100 + "]" * 100), "nested too deeply"),
    ],
)
def test_an_index_that_would_leave_its_folder_is_refused(
    key: str, value: Any, message: str, tmp_path: Path
):
    os.mkfifo(tmp_path / "pipe")
    values = {"schema_version": 1, "step": 3, "world_size": 1, "state": [], "trainer": {}}
    values |= {"files": {}, "tensors": {}, key: value}
    (tmp_path / "index.json").write_text(json.dumps(values))
    with pytest.raises(DamagedError, match=re.escape(message)):
        read_index(tmp_path)
