"""What counts as too much in a program's folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from racelab.experiments.evaluation.sandbox.box import stored


def test_files_of_all_folders_are_added_up(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x").write_bytes(b"1" * 600)
    (tmp_path / "y").write_bytes(b"1" * 400)
    os.link(tmp_path / "y", tmp_path / "a" / "same")
    (tmp_path / "elsewhere").symlink_to("/usr")
    assert not stored.holds_more(str(tmp_path), 1100)
    assert stored.holds_more(str(tmp_path), 999)


def test_entries_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MOST_ENTRIES", 3)
    for name in "ab":
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "c").symlink_to(".")
    assert not stored.holds_more(str(tmp_path), 10)
    (tmp_path / "a" / "d").touch()
    assert stored.holds_more(str(tmp_path), 10)


def test_a_folder_that_is_gone_holds_nothing(tmp_path: Path) -> None:
    assert not stored.holds_more(str(tmp_path / "gone"), 0)


def test_one_too_deep_to_be_named_is_too_much(tmp_path: Path) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    name = "d" * 250
    for _ in range(20):
        os.mkdir(name, dir_fd=here)
        deeper = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    os.close(here)
    assert stored.holds_more(str(tmp_path), 1 << 20)


@pytest.mark.parametrize(("mode", "too_much"), [(0o300, True), (0o700, False), (0, False), (0o500, False)])
def test_a_folder_that_may_be_filled_but_not_listed_is_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, too_much: bool
) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d").chmod(mode)
    listed = os.scandir

    def refusing(path: str) -> object:  # root may list everything
        if path.endswith("/d") and mode & 0o400 == 0:
            raise PermissionError(path)
        return listed(path)

    monkeypatch.setattr(stored.os, "scandir", refusing)
    assert stored.holds_more(str(tmp_path), 10) is too_much
    (tmp_path / "d").chmod(0o700)
