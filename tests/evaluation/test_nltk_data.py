"""NLTK's data: the user's, else the package's, else an error; never a download."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from racelab.experiments.errors import MissingDependencyError
from racelab.experiments.evaluation import nltk_data

INSIDE = "tokenizers/punkt_tab/english"


@pytest.fixture(autouse=True)
def _no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk
    import nltk.data

    monkeypatch.setattr(nltk.data, "path", [])

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a download was tried")

    monkeypatch.setattr(nltk, "download", refuse)


def user_data(folder: Path) -> Path:
    (folder / INSIDE).mkdir(parents=True)
    return folder


def test_the_users_own_data_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk.data

    monkeypatch.setattr(nltk.data, "path", [str(user_data(tmp_path))])
    assert nltk_data.ensure_punkt() == str(tmp_path / INSIDE)
    assert nltk.data.path == [str(tmp_path)]


def test_else_the_packages_are_taken_and_nothing_of_it_is_imported() -> None:
    import nltk.data

    found = nltk_data.ensure_punkt()
    assert found.endswith(f"llama_index/core/_static/nltk_cache/{INSIDE}")
    assert not any(name.split(".")[0] == "llama_index" for name in sys.modules)
    once = list(nltk.data.path)
    assert nltk_data.ensure_punkt() == found
    assert nltk.data.path == once


def test_else_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nltk_data, "_packaged", lambda: None)
    with pytest.raises(MissingDependencyError, match=r"pip install --no-deps llama-index-core==0\.14\.25"):
        nltk_data.ensure_punkt()


def test_the_makefile_installs_the_version_that_the_error_names() -> None:
    makefile = Path(__file__).resolve().parents[2] / "Makefile"
    assert f"PUNKT := {nltk_data.PACKAGE}\n" in makefile.read_text()
