"""A folder for each run: one at a time in it, nothing overwritten, nothing empty left behind."""

import os
from pathlib import Path

import pytest

from executor.run_folder import LOCK, claimed_folder
from hardware_profiles.errors import InputError


def test_new_folders_do_not_collide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with claimed_folder(None) as one, claimed_folder(None) as two:
        assert one != two
        (one / "run.json").touch()
    assert list(Path("runs").iterdir()) == [one]


def test_a_folder_that_cannot_be_made_is_named():
    with (
        pytest.raises(InputError, match=r"^/proc/nowhere/run: cannot be created"),
        claimed_folder(Path("/proc/nowhere/run")),
    ):
        pass


def test_a_run_keeps_others_out_of_its_folder(tmp_path):
    folder = tmp_path / "run"
    with claimed_folder(folder):
        with (
            pytest.raises(InputError, match="another run is using it"),
            claimed_folder(folder),
        ):
            pass
        (folder / "run.json").touch()
    assert [path.name for path in folder.iterdir()] == ["run.json"]
    with claimed_folder(folder, resume=True):
        pass
    with (
        pytest.raises(InputError, match=r"is not empty; choose another --output$"),
        claimed_folder(folder),
    ):
        pass
    (folder / "checkpoints").mkdir()
    with (
        pytest.raises(InputError, match=r"go on from it with --resume .*run$"),
        claimed_folder(folder),
    ):
        pass


def test_a_folder_that_nothing_came_into_is_taken_away(tmp_path):
    with pytest.raises(KeyError), claimed_folder(tmp_path / "run"):
        raise KeyError
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir(mode=0o500)
    with (
        pytest.raises(InputError, match=r"run: cannot be written: Permission denied"),
        claimed_folder(folder),
    ):
        pass


def test_a_lock_that_a_killed_run_left_does_not_count(tmp_path):
    (tmp_path / LOCK).touch()
    with claimed_folder(tmp_path):
        (tmp_path / "run.json").touch()
