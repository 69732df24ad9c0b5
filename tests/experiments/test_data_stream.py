"""The prompt stream: epochs, batches over their border, and resuming at any sample."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from racelab.experiments.data.stream import SeededStream, data_digest
from racelab.experiments.errors import CheckpointError, ConfigError, DataError
from racelab.experiments.ports import PromptStream
from racelab.experiments.types import Prompt


def data(n: int) -> list[Prompt]:
    return [Prompt(f"p{i}", f"text {i}") for i in range(n)]


def ids(batch) -> list[str]:
    return [p.prompt_id for p in batch]


def test_it_is_the_port_and_follows_the_documented_permutation():
    stream = SeededStream(data(6), 9)
    assert isinstance(stream, PromptStream)
    order = [*np.random.default_rng(np.random.SeedSequence([9, 0])).permutation(6)]
    order += [*np.random.default_rng(np.random.SeedSequence([9, 1])).permutation(6)]
    assert ids(stream.take(3) + stream.take(3) + stream.take(6)) == [f"p{i}" for i in order]
    assert stream.epoch == 1


def test_seeds_and_epochs_differ():
    a, b = SeededStream(data(20), 0), SeededStream(data(20), 1)
    first, second = ids(a.take(20)), ids(a.take(20))
    assert first != second
    assert first != ids(b.take(20))


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(0, 2**40), st.data())
def test_no_batch_repeats_and_every_epoch_is_complete(size, seed, draw):
    stream = SeededStream(data(size), seed)
    taken: list[str] = []
    for n in draw.draw(st.lists(st.integers(1, size), min_size=1, max_size=25)):
        batch = ids(stream.take(n))
        assert len(batch) == n == len(set(batch))
        taken += batch
    # A prompt put off at a border only moves later inside its own epoch.
    for start in range(0, len(taken) - size + 1, size):
        assert len(set(taken[start : start + size])) == size


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(0, 1000), st.data())
def test_resumed_equals_uninterrupted_at_any_sample(size, seed, draw):
    sizes = draw.draw(st.lists(st.integers(1, size), min_size=1, max_size=20))
    stop = draw.draw(st.integers(0, len(sizes)))
    whole = SeededStream(data(size), seed)
    expected = [ids(whole.take(n)) for n in sizes]
    before = SeededStream(data(size), seed)
    got = [ids(before.take(n)) for n in sizes[:stop]]
    state = json.loads(json.dumps(before.state()))
    after = SeededStream(data(size), seed)
    after.take(size)  # a used stream must forget where it was
    after.load_state(state)
    assert after.state() == state
    got += [ids(after.take(n)) for n in sizes[stop:]]
    assert got == expected
    assert after.state() == whole.state()


def test_the_state_does_not_change_with_the_stream():
    stream = SeededStream(data(5), 0)
    stream.take(3)
    stream.take(4)
    state = stream.state()
    copy = json.loads(json.dumps(state))
    stream.take(5)
    assert state == copy


def test_impossible_requests():
    stream = SeededStream(data(3), 0)
    for n in (0, -1, 4):
        with pytest.raises(ConfigError, match=rf"{n} prompts per step, but the data has 3"):
            stream.take(n)
    assert stream.state() == SeededStream(data(3), 0).state()
    with pytest.raises(ConfigError, match=r"run\.seed=-1"):
        SeededStream(data(1), -1)
    with pytest.raises(DataError, match="no prompts"):
        SeededStream([], 0)
    with pytest.raises(DataError, match="same id"):
        SeededStream([*data(2), Prompt("p0", "x")], 0)


def test_a_state_of_other_data_or_seed_is_refused():
    state = SeededStream(data(4), 0).state()
    for other in (data(5), data(4)[::-1], [*data(3), Prompt("p3", "changed")]):
        assert data_digest(other) != data_digest(data(4))
        with pytest.raises(DataError, match="other prompts"):
            SeededStream(other, 0).load_state(state)
    with pytest.raises(ConfigError, match=r"set run\.seed=0"):
        SeededStream(data(4), 7).load_state(state)


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": None},
        {"epoch": -1},
        {"position": 5},
        {"position": 1.5},
        {"seed": True},
        {"deferred": 3},
        {"deferred": [4]},
        {"deferred": [1, 1]},
        {"deferred": ["1"]},
    ],
)
def test_a_malformed_state_is_refused_and_changes_nothing(change):
    stream = SeededStream(data(4), 0)
    stream.take(2)
    before = stream.state()
    with pytest.raises(CheckpointError, match="older checkpoint"):
        stream.load_state({**before, **change})
    missing = {k: v for k, v in before.items() if k not in change}
    with pytest.raises(CheckpointError):
        stream.load_state(missing)
    assert stream.state() == before
