"""The vectorised actor against the text environment and the model's own scores."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from racelab.experiments.backends.local.grid import GridModel
from racelab.experiments.episodes import AgentSampling, Episode, Instance, Start
from racelab.experiments.errors import DataError
from racelab.experiments.ports import Actor
from racelab.experiments.tasks.frozenlake.boards import ACTIONS, to_instance
from racelab.experiments.tasks.frozenlake.env import FrozenLakeEnv
from racelab.experiments.tasks.frozenlake.grid_actor import GridActor

from ...grid_models import TURNS, doubles, plain_shares, small_model, some_boards

SIDE = 4
VOCAB = 9 + SIDE * SIDE
SAMPLED = AgentSampling(0.8)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def instances() -> list[Instance]:
    boards = some_boards(12, sizes=(2, 3, SIDE), seed=1)
    assert set(boards.size_M.tolist()) == {2, 3, SIDE}
    return [to_instance(boards, i, "train") for i in range(len(boards))]


def acting_model(seed: int = 0) -> GridModel:
    """Mostly samples actions, at times something else."""
    model = small_model(SIDE, seed)
    with torch.no_grad():
        model.core.masters["token"][5:9] *= 0.2
        model.core.masters["head"][:5] *= 0.4
        model.core.masters["head"][9:] *= 0.4
        model.core.masters["head"][5:9] *= 1.2
    return model


@pytest.fixture(scope="module")
def model() -> GridModel:
    return acting_model()


def play(model: GridModel, starts: list[Start], sampling=SAMPLED, seed: int = 0) -> list[Episode | None]:
    actor: Actor = GridActor(model, TURNS)
    return actor.play(starts, sampling, torch.Generator().manual_seed(seed))


def groups_of(instances: list[Instance], g: int = 5) -> list[Start]:
    """Not sorted by board."""
    return [Start(instance) for _ in range(g) for instance in instances]


def test_it_is_an_actor_and_plays_nothing_for_nobody(model):
    actor = GridActor(model, TURNS)
    assert isinstance(actor, Actor)
    assert actor.play([], SAMPLED, torch.Generator()) == []


def test_positions_ends_and_counts_are_those_of_the_text_environment(model, instances):
    episodes = play(model, groups_of(instances, 12))
    for episode in episodes:
        env = FrozenLakeEnv(episode.instance, TURNS)
        env.reset()
        for u, turn in enumerate(episode.turns):
            seen = env.step(f"<action>{turn.text}</action>")
            assert (turn.info["action"], turn.info["cell"]) == (seen.info["action"], seen.info["cell"])
            assert seen.done == (u == len(episode.turns) - 1)
        assert episode.result == env.result()
    assert {e.result.end_reason for e in episodes} == {"goal", "hole", "turns"}
    assert sum(e.result.metrics["invalid_turns"] for e in episodes) > 5
    assert sum(e.result.metrics["bumps"] for e in episodes) > 5


def test_the_tokens_are_header_positions_and_actions(model, instances):
    for episode in play(model, groups_of(instances, 3)):
        rows = episode.instance.data["rows"]
        size, place = len(rows), {"S": 0, "F": 0, "H": 1, "G": 2}
        cells = [place[rows[y][x]] if y < size and x < size else 3 for y in range(SIDE) for x in range(SIDE)]
        at = "".join(rows).index("S")
        on_canvas = lambda cell, size=size: 9 + cell // size * SIDE + cell % size  # noqa: E731
        assert episode.prompt == episode.bare_prompt == (4, *cells, on_canvas(at))
        for turn, after in zip(episode.turns, [*episode.turns[1:], None], strict=True):
            (token,) = turn.tokens
            assert turn.text == (ACTIONS[token - 5] if 5 <= token < 9 else "invalid")
            assert turn.finished
            assert turn.bridge == ((on_canvas(turn.info["cell"]),) if after else ())
        assert (episode.retry_from, episode.is_retry, episode.addition, episode.bare_bridge) == (
            0,
            False,
            "",
            None,
        )


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_log_probs_are_those_that_the_learner_computes(model, instances, temperature):
    episodes = play(model, groups_of(instances), AgentSampling(temperature))
    scored = model.logprobs([(e.prompt, [e.tokens()]) for e in episodes], temperature)
    for episode, (logp,) in zip(episodes, scored, strict=True):
        own = np.array([turn.logprobs[0] for turn in episode.turns])
        np.testing.assert_allclose(own, logp[::2], atol=2e-5)


def test_greedy_takes_the_likeliest_token_and_gives_plain_log_probs(model, instances):
    episodes = play(model, [Start(i) for i in instances], AgentSampling(0.0))
    assert episodes == play(model, [Start(i) for i in instances], AgentSampling(0.0), seed=9)
    w = doubles(model)
    for episode in episodes:
        with torch.no_grad():
            shares = plain_shares(model.spec, w, episode.prompt, episode.tokens(), 1.0)[::2]
        best = shares.max(1)
        assert [t.tokens[0] for t in episode.turns] == best.indices.tolist()
        np.testing.assert_allclose([t.logprobs[0] for t in episode.turns], best.values.numpy(), atol=2e-5)


def test_draws_follow_the_distribution(model, instances):
    n = 3000
    actor = GridActor(model, 1)
    episodes = actor.play([Start(instances[0])] * n, SAMPLED, torch.Generator().manual_seed(3))
    share = np.bincount([e.turns[0].tokens[0] for e in episodes], minlength=VOCAB) / n
    with torch.no_grad():
        p = plain_shares(model.spec, doubles(model), episodes[0].prompt, (5,), 0.8)[0].exp().numpy()
    assert (np.abs(share - p) < 4 * np.sqrt(p * (1 - p) / n) + 1e-3).all()


def test_a_nucleus_draws_from_the_likeliest_and_says_so(model, instances):
    actor = GridActor(model, 1)
    episodes = actor.play([Start(instances[0])] * 400, AgentSampling(0.8, 0.6), torch.Generator())
    with torch.no_grad():
        p = plain_shares(model.spec, doubles(model), episodes[0].prompt, (5,), 0.8)[0].exp().numpy()
    order = np.argsort(-p)
    kept = order[: int(np.searchsorted(p[order].cumsum(), 0.6)) + 1]
    found = {e.turns[0].tokens[0]: e.turns[0].logprobs[0] for e in episodes}
    assert set(found) == set(kept.tolist())
    for token, logp in found.items():
        assert logp == pytest.approx(np.log(p[token] / p[kept].sum()), abs=1e-4)


def test_an_episode_does_not_depend_on_its_neighbours(model, instances):
    """Each start has its own draws, whatever the others do and however many share its board."""
    starts = groups_of(instances, 20)
    whole = play(model, starts)
    assert play(model, starts[:7]) == [_close(e) for e in whole[:7]]


def _close(episode: Episode) -> Episode:
    """Equal up to the last bits of log-probs."""
    turns = tuple(replace(t, logprobs=(pytest.approx(t.logprobs[0], abs=1e-5),)) for t in episode.turns)
    return replace(episode, turns=turns)


# ---- retries ---------------------------------------------------------------------------------------------


def retries(episodes: list[Episode], rng: np.random.Generator) -> list[Start]:
    made = []
    for e in episodes:
        first, word = int(rng.integers(0, len(e.turns))), ACTIONS[int(rng.integers(0, 4))]
        made.append(Start(e.instance, e, first, word))
    return made


def test_a_retry_replays_its_parent_and_shows_the_hint_at_its_turn(model, instances):
    parents = play(model, groups_of(instances))
    starts = retries(parents, np.random.default_rng(0))
    again = play(model, starts, seed=1)
    seen_later = 0
    for start, parent, retry in zip(starts, parents, again, strict=True):
        k, hint = start.retry_from, VOCAB * (1 + ACTIONS.index(start.addition))
        assert (retry.is_retry, retry.retry_from, retry.addition) == (True, k, start.addition)
        assert [(t.tokens, t.logprobs, t.info) for t in retry.turns[:k]] == [
            (t.tokens, t.logprobs, t.info) for t in parent.turns[:k]
        ]
        assert len(retry.turns) > k
        if k == 0:
            assert retry.prompt == (*parent.prompt[:-1], parent.prompt[-1] + hint)
            assert (retry.bare_prompt, retry.bare_bridge) == (parent.prompt, None)
        else:
            seen_later += 1
            assert retry.prompt == retry.bare_prompt == parent.prompt
            assert retry.bare_bridge == parent.turns[k - 1].bridge
            assert retry.turns[k - 1].bridge == (parent.turns[k - 1].bridge[0] + hint,)
            assert [t.bridge for t in retry.turns[: k - 1]] == [t.bridge for t in parent.turns[: k - 1]]
        assert sum(i >= VOCAB for i in (*retry.prompt, *retry.tokens())) == 1
    assert seen_later > 20


def test_log_probs_of_a_retry_are_those_in_the_context_with_the_hint(model, instances):
    starts = retries(play(model, groups_of(instances)), np.random.default_rng(1))
    again = play(model, starts, seed=1)
    scored = model.logprobs([(e.prompt, [e.tokens()]) for e in again], 0.8)
    for retry, (logp,) in zip(again, scored, strict=True):
        own = np.array([turn.logprobs[0] for turn in retry.turns])
        np.testing.assert_allclose(own, logp[::2], atol=2e-5)


def test_a_retry_without_an_addition_has_the_same_context(model, instances):
    parent = next(e for e in play(model, groups_of(instances)) if len(e.turns) > 2)
    (retry,) = play(model, [Start(parent.instance, parent, 1)], seed=2)
    assert retry.bare_bridge == retry.turns[0].bridge == parent.turns[0].bridge
    assert retry.is_retry


def test_a_retry_of_a_retry_keeps_the_earlier_hint_in_its_context(model, instances):
    parents = [e for e in play(model, groups_of(instances)) if len(e.turns) > 3]
    first = play(model, [Start(e.instance, e, 1, "Left") for e in parents], seed=1)
    long = [e for e in first if len(e.turns) > 3]
    second = play(model, [Start(e.instance, e, 3, "Up") for e in long], seed=2)
    assert len(long) > 3
    for parent, retry in zip(long, second, strict=True):
        assert retry.turns[0].bridge == parent.turns[0].bridge
        assert [i // VOCAB for i in retry.tokens() if i >= VOCAB] == [3, 1]
        assert retry.bare_bridge == parent.turns[2].bridge


def test_what_cannot_be_replayed_gives_none_and_disturbs_nobody(model, instances):
    episodes = play(model, groups_of(instances))
    ended = next(e for e in episodes if len(e.turns) < TURNS)
    long = next(e for e in episodes if len(e.turns) > 2)
    bent = replace(long.turns[0], info={**long.turns[0].info, "cell": long.turns[0].info["cell"] ^ 1})
    moved = replace(long, turns=(bent, *long.turns[1:]))
    out_of_turns = next(e for e in episodes if len(e.turns) == TURNS)
    good = Start(long.instance, long, 2, "Up")
    got = play(
        model,
        [
            Start(ended.instance, ended, len(ended.turns), "Left"),  # it had ended there
            Start(ended.instance, ended, len(ended.turns) + 1, "Left"),  # beyond its turns
            Start(out_of_turns.instance, out_of_turns, TURNS, "Left"),  # no turn is left
            Start(moved.instance, moved, 1, "Left"),  # the recorded cell is another
            good,
        ],
    )
    assert got[:4] == [None] * 4
    assert got[4].turns[:1] == long.turns[:1]


def test_an_addition_must_be_an_action_word(model, instances):
    with pytest.raises(
        DataError, match=rf"{instances[0].instance_id}: the addition 'left' is none of Up, Down"
    ):
        play(model, [Start(instances[0], addition="left")])


def test_the_hint_changes_what_is_played(model, instances):
    """Same draws, another hint: the prompt's last token decides."""
    plain = play(model, groups_of(instances))
    hinted = play(model, [replace(s, addition="Left") for s in groups_of(instances)])
    changed = Counter(
        a.turns[0].logprobs[0] != b.turns[0].logprobs[0] for a, b in zip(plain, hinted, strict=True)
    )
    assert changed[True] > changed[False]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 40), turns=st.integers(1, TURNS))
def test_any_batch_is_complete_and_in_order(seed, count, turns):
    boards, rng = some_boards(5, sizes=(2, SIDE), seed=4), np.random.default_rng(seed)
    known = [to_instance(boards, i, "train") for i in range(5)]
    starts = [Start(known[int(k)]) for k in rng.integers(0, 5, count)]
    episodes = GridActor(acting_model(), turns).play(starts, SAMPLED, torch.Generator().manual_seed(seed))
    assert [e.instance for e in episodes] == [s.instance for s in starts]
    for e in episodes:
        assert 1 <= len(e.turns) <= turns
        assert e.turn_of_token().tolist() == [
            u // 2 if u % 2 == 0 else -1 for u in range(2 * len(e.turns) - 1)
        ]
        assert all(t.logprobs[0] <= 0 for t in e.turns)
