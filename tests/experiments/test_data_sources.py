"""De-duplication, held-out split, seeded draw, and the hub reader on a local folder of Tulu's columns."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from racelab.experiments.data.sources import (
    Columns,
    deduplicate,
    draw,
    hold_out,
    normalise,
    prepare,
    read_hub,
    read_package,
    without,
)
from racelab.experiments.errors import ConfigError, DataError, MissingDependencyError, UnreachableError
from racelab.experiments.types import Prompt


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(f"p{i}", text, "s") for i, text in enumerate(texts)]


def test_normalise_folds_white_space_and_unicode_but_keeps_case():
    assert normalise("  a\t\u00a0b\n") == "a b"
    assert normalise("e\u0301") == "é"
    assert normalise("A b") != normalise("a b")


def test_the_first_of_equal_texts_is_kept():
    rows = prompts("a b", "c", " a\nb", "C", "e\u0301", "\u00e9")
    assert [p.prompt_id for p in deduplicate(rows)] == ["p0", "p1", "p3", "p4"]


def test_the_report_counts_rows_before_and_after():
    """7 rows, 5 different; 2 held out leave 3, of which 2 are drawn."""
    data, report = prepare(prompts("a", "b", "a ", "c", "d", "e", " b"), "s", heldout=2, limit=2, seed=3)
    assert (report.before, report.after, report.heldout, report.overlap, report.train) == (7, 5, 2, 0, 2)
    assert (len(data.train), len(data.heldout)) == (2, 2)
    assert "7 prompts, 5 after de-duplication, 2 of them to train on; 2 held out" in report.line()


def test_a_separate_held_out_set_takes_its_texts_out_of_training():
    rows = prompts("a", "b", "c")
    held = [Prompt("h", " b ", "other")]
    data, report = prepare(rows, "s", heldout=held)
    assert [p.text for p in data.train] == ["a", "c"]
    assert (report.overlap, report.heldout) == (1, 1)
    with pytest.raises(DataError, match="held-out set"):
        prepare(rows[1:2], "s", heldout=held)


def test_copies_of_a_held_out_prompt_leave_training_even_without_deduplication():
    rows = prompts(*["a"] * 5, *["b"] * 5)
    data, report = prepare(rows, "s", heldout=1, unique=False)
    assert report.after == 10
    assert len(data.train) == 5
    assert {p.text for p in data.train} != {data.heldout[0].text}


def test_the_package_splits_stay_apart():
    held = read_package("validation")
    data, report = prepare(read_package("train"), "package", heldout=held)
    assert report.overlap == 0
    assert report.before == report.after == report.train == len(data.train)


def test_impossible_numbers_are_refused():
    rows = prompts("a", "b", "b")
    with pytest.raises(ConfigError, match=r"data\.heldout=2: of 2 different prompts hold out at most 1"):
        hold_out(rows, 2, 0)
    with pytest.raises(ConfigError, match=r"data\.limit=0"):
        draw(rows, 0, 0)
    with pytest.raises(ConfigError, match="seed -1"):
        draw(rows, 1, -1)
    with pytest.raises(DataError, match="no prompts"):
        prepare([], "s", heldout=0)


def test_an_id_of_two_prompts_is_refused():
    rows = [Prompt("x", "a"), Prompt("x", "b")]
    with pytest.raises(DataError, match="id 'x' is given twice"):
        prepare(rows, "s", heldout=0)


def test_the_draw_is_seeded_uniform_and_ordered():
    rows = prompts(*map(str, range(50)))
    first = draw(rows, 10, 1)
    assert first == draw(rows, 10, 1)
    assert first != draw(rows, 10, 2)
    assert first == sorted(first, key=lambda p: int(p.text))
    counts = [0] * 50
    for seed in range(300):
        for p in draw(rows, 10, seed):
            counts[int(p.text)] += 1
    # Each prompt: binomial(300, 0.2), mean 60, deviation 6.93; five deviations.
    assert min(counts) > 25
    assert max(counts) < 95


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["a", "a ", "b", "B", "c", "d e", "d  e", "f"]), min_size=1, max_size=20),
    st.integers(0, 6),
    st.integers(1, 10) | st.none(),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_training_and_held_out_prompts_never_share_a_text(texts, held, limit, seed, unique):
    rows = [Prompt(f"{i}", t) for i, t in enumerate(texts)]
    try:
        data, report = prepare(rows, "s", heldout=held, limit=limit, seed=seed, unique=unique)
    except ConfigError:
        assert held >= len({normalise(t) for t in texts})
        return
    assert not {normalise(p.text) for p in data.train} & {normalise(p.text) for p in data.heldout}
    assert len(data.heldout) == held == report.heldout
    assert len(data.train) == report.train
    assert 1 <= len(data.train) <= (limit or 20)
    assert without(data.train, data.heldout) == list(data.train)


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


@pytest.fixture
def offline(monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "tulu"
    folder.mkdir()
    return folder, tmp_path / "cache"


def test_the_hub_reader_takes_prompts_only(offline):
    folder, cache = offline
    table = {"id": ["1", "2", "3"], "prompt": ["a", "b", "a "], "chosen": [CHAT] * 3, "rejected": [CHAT] * 3}
    pq.write_table(pa.table(table), folder / "train.parquet")
    rows = read_hub(str(folder), cache_dir=cache)
    assert [p.text for p in rows] == ["a", "b", "a "]
    assert all(p.check is None for p in rows)
    _, report = prepare(rows, "tulu", heldout=0)
    assert (report.before, report.after) == (3, 2)
    by_id = read_hub(str(folder), columns=Columns(prompt_id="id"), cache_dir=cache)
    assert [p.prompt_id for p in by_id] == ["1", "2", "3"]


def test_the_hub_reader_falls_back_to_the_first_user_turn_of_chosen(offline):
    folder, cache = offline
    pq.write_table(pa.table({"chosen": [CHAT], "rejected": [CHAT]}), folder / "train.parquet")
    assert [p.text for p in read_hub(str(folder), cache_dir=cache)] == ["hi"]


def test_the_hub_reader_names_what_is_wrong(offline):
    folder, cache = offline
    pq.write_table(pa.table({"text": ["a"]}), folder / "train.parquet")
    with pytest.raises(DataError, match=r"no column 'prompt'; it has text; set data\.prompt_field"):
        read_hub(str(folder), cache_dir=cache)
    with pytest.raises(DataError, match="test"):
        read_hub(str(folder), split="test", cache_dir=cache)
    pq.write_table(pa.table({"text": [" "]}), folder / "train.parquet")
    with pytest.raises(DataError, match=r"row 1: field 'text' is blank"):
        read_hub(str(folder), columns=Columns("text"), cache_dir=folder.parent / "cache2")


def test_a_hub_out_of_reach_and_a_missing_package(monkeypatch):
    from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError

    class Fake:
        class exceptions:
            class DatasetsError(Exception):
                pass

        def __init__(self, error):
            self.error = error

        def load_dataset(self, *args, **kwargs):
            raise self.error

    for kind in (ConnectionError, LocalEntryNotFoundError, HTTPError):
        monkeypatch.setitem(sys.modules, "datasets", Fake(kind("no route\nto host")))
        with pytest.raises(UnreachableError, match=r"x/y: the hub does not answer \(no route\)"):
            read_hub("x/y")
    monkeypatch.setitem(sys.modules, "datasets", Fake(ValueError("no such split")))
    with pytest.raises(DataError, match="x/y: cannot be loaded: no such split"):
        read_hub("x/y")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match="pip install"):
        read_hub("x/y")


def test_importing_the_readers_loads_nothing_heavy():
    heavy = ["torch", "pandas", "pyarrow", "datasets", "reasoning_gym", "transformers", "mlflow"]
    code = f"import sys, racelab.experiments.data.sources; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
