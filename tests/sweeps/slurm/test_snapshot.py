"""A launch's copy of the code: the real package, copied; and a copy of the package that then changes."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import racelab
from racelab.experiments.errors import RunFolderError
from racelab.sweeps.fingerprint import code_state
from racelab.sweeps.slurm.snapshot import place, take

PACKAGE = Path(racelab.__file__).parent
TAKE = """
import sys
from pathlib import Path
from racelab.sweeps.slurm.snapshot import take
print(take(Path(sys.argv[1])))
"""


def python(code: str, *words: str, path: Path | None) -> str:
    """What a fresh interpreter prints; `path` is its PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *words],
        env=environment, check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.stdout.strip()


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, links followed, without Python's caches."""
    found = {}
    for here, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            path = Path(here) / name
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder that holds a copy of the package, with real folders in the place of links, to be changed."""
    folder = tmp_path / "source"
    shutil.copytree(PACKAGE, folder / "racelab", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_the_copy_is_the_package_and_says_what_code_it_is(tmp_path: Path) -> None:
    copy = take(tmp_path / "runs")
    assert copy.parent == tmp_path / "runs" / ".launches" / "code"
    assert sorted(path.name for path in copy.iterdir()) == ["code.json", "racelab"]
    assert files(copy / "racelab") == files(PACKAGE)
    assert json.loads((copy / "code.json").read_text()) == code_state()
    assert [path for path in copy.rglob("*") if path.is_symlink()] == []
    assert place(tmp_path / "runs") == copy


def test_a_process_imports_the_copy_although_racelab_is_installed(tmp_path: Path) -> None:
    copy = take(tmp_path / "runs with space")
    code = """
import racelab, racelab.cli.main, racelab.sweeps.slurm.model
from racelab.configs.keys import CONFIG_DIR
import racelab.experiments.data as data
from pathlib import Path
print(racelab.__file__, racelab.cli.main.__file__, racelab.sweeps.slurm.model.__file__, sep="\\n")
print((CONFIG_DIR / "launcher" / "slurm.yaml").is_file(), len(list(Path(data.__file__).parent.glob("*.jsonl"))) > 0)
"""
    *modules, data = python(code, path=copy).splitlines()
    assert modules == [
        str(copy / "racelab" / name) for name in ("__init__.py", "cli/main.py", "sweeps/slurm/model.py")
    ]
    assert data == "True True"
    assert not python("import racelab; print(racelab.__file__)", path=None).startswith(str(copy))


def test_a_changed_source_gives_another_copy_and_leaves_the_old_one(tmp_path: Path, source: Path) -> None:
    runs = str(tmp_path / "runs")
    old = Path(python(TAKE, runs, path=source))
    before = files(old)
    (source / "racelab" / "__init__.py").write_text('"""Other code."""\n__version__ = "other"\n')
    new = Path(python(TAKE, runs, path=source))
    assert new != old
    assert files(old) == before
    version = "import racelab; print(racelab.__version__)"
    assert python(version, path=old) == racelab.__version__
    assert python(version, path=new) == "other"


def test_the_same_code_is_copied_once(tmp_path: Path) -> None:
    copy = take(tmp_path)
    inode = (copy / "racelab" / "__init__.py").stat().st_ino
    assert take(tmp_path) == copy
    assert (copy / "racelab" / "__init__.py").stat().st_ino == inode
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]


def test_a_copy_of_a_copy_is_the_same_with_the_same_words_about_the_code(tmp_path: Path) -> None:
    first = take(tmp_path / "a")
    second = Path(python(TAKE, str(tmp_path / "b"), path=first))
    assert second.name == first.name
    assert (second / "code.json").read_bytes() == (first / "code.json").read_bytes()


def test_nobody_edits_a_copy_by_accident(tmp_path: Path) -> None:
    copy = take(tmp_path)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in copy.rglob("*") if path.is_file()}
    assert modes == {0o444}


def test_caches_and_editors_files_stay_behind(tmp_path: Path, source: Path) -> None:
    clean = Path(python(TAKE, str(tmp_path / "a"), path=source))
    package = source / "racelab"
    for name in (".hidden.py", "#edited.py#", "grid.py~", ".grid.py.swp", "grid.py.orig", "old.pyc"):
        (package / "sweeps" / name).write_text("left behind")
    for name in (".git", "__pycache__"):
        (package / "experiments" / name).mkdir(exist_ok=True)
        (package / "experiments" / name / "thing.py").write_text("left behind")
    assert Path(python(TAKE, str(tmp_path / "b"), path=source)).name == clean.name


def test_two_at_once_end_with_one_whole_copy(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        copies = set(pool.map(lambda _: python(TAKE, str(tmp_path), path=None), range(4)))
    (copy,) = map(Path, copies)
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]
    assert files(copy / "racelab") == files(PACKAGE)


def test_what_a_scratch_disk_has_deleted_is_put_back(tmp_path: Path) -> None:
    copy = take(tmp_path)
    shutil.rmtree(copy / "racelab" / "configs" / "launcher")
    (copy / "racelab" / "__init__.py").unlink()
    cut = copy / "racelab" / "sweeps" / "slurm" / "model.py"
    cut.unlink()
    cut.write_text("")
    assert take(tmp_path) == copy
    assert files(copy / "racelab") == files(PACKAGE)
    assert stat.S_IMODE(cut.stat().st_mode) == 0o444


def test_a_root_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    (tmp_path / ".launches").write_text("a file")
    with pytest.raises(
        RunFolderError, match=r"cannot copy racelab's code to .*\.launches/code/\w{16}: not a directory"
    ):
        take(tmp_path)
