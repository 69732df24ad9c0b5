"""Plays FrozenLake with the small grid transformer: one token a turn, all episodes at once (implements `ports.Actor`).

Episodes of one board share its header, and those that have done the same share everything up to where they part. The
hint of a reflection is one action word, shown on the position token of the turn from which the retry is sampled.

Differences from playing with a language model: the policy reads grid tokens instead of the board's text, a reply is
one token, and the texts of `Episode` are empty except each turn's action word. The text environment can say the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from racelab.experiments.episodes import (
    AgentSampling,
    Episode,
    Instance,
    IntArray,
    Result,
    Start,
    Turn,
)
from racelab.experiments.errors import DataError
from racelab.experiments.models.grid_tokens import ACT, HEAD, N_ACTIONS, POS, GridTokens
from racelab.experiments.tasks.frozenlake.boards import ACTIONS, FROZEN, GOAL, HOLE, Boards, from_instances
from racelab.experiments.tasks.frozenlake.grid_play import Played, Walkers

if TYPE_CHECKING:
    import torch

_ROWS = 16  # episodes of one tree; attention is quadratic in a tree's nodes
_WORDS = (*ACTIONS, "invalid")  # the last one is that of action -1
_ENDS = {GOAL: "goal", HOLE: "hole", FROZEN: "turns"}


class Decoder(Protocol):
    """Trees of episodes that grow turn by turn (the local backend's `GridDecoder`)."""

    def extend(self, leaf: IntArray, tokens: IntArray) -> torch.Tensor:
        """Logits after (leaf[j], tokens[j]); the new leaf j."""


class GridPolicy(Protocol):
    """What the actor asks of the model (the local backend's `GridModel`)."""

    @property
    def tokens(self) -> GridTokens:
        """The vocabulary."""

    def decoder(self, cells_BC: IntArray, capacity: int) -> Decoder:
        """Starts episodes on B boards."""


class GridActor:
    """Plays many episodes at once with a grid transformer."""

    def __init__(self, policy: GridPolicy, max_turns: int) -> None:
        """The weights are read at every call of `play`.

        Args:
            policy: the model that is trained.
            max_turns: an episode ends after so many.
        """
        self._policy, self._max_turns = policy, max_turns
        self._tokens = policy.tokens

    def play(
        self, starts: Sequence[Start], sampling: AgentSampling, rng: torch.Generator
    ) -> list[Episode | None]:
        """See the port. None where a parent's turns lead elsewhere, end earlier, or are fewer than `retry_from`.

        One uniform number per start and turn is drawn from `rng`, so an episode's draws do not depend on the others'.
        Temperature 0 takes the likeliest token; log-probs are then those at temperature 1, as everywhere here.

        Raises:
            DataError: a board that does not fit the model's canvas, or an addition that is no action word.
        """
        if not starts:
            return []
        plan = _Plan(starts, self._tokens, self._max_turns)
        played = self._roll(plan, sampling, rng)
        return _episodes(starts, plan, played)

    def _roll(self, plan: _Plan, sampling: AgentSampling, rng: torch.Generator) -> Played:
        """All turns of all rows. Rows that have ended leave the batch."""
        import torch

        n, turns = len(plan.board_R), self._max_turns
        draw_RT = torch.rand(n, turns, generator=rng, dtype=torch.float64).numpy()
        out, walkers = Played.empty(n, turns), Walkers(plan.boards, plan.board_R)
        decoder = self._policy.decoder(
            plan.boards.cells_MC[plan.board_B].astype(np.int64), plan.most_rows * (2 * turns - 1)
        )
        live, leaf = plan.order, plan.tree_R[plan.order]
        for t in range(turns):
            seen = POS + walkers.cell_R[live] + self._tokens.vocab * plan.hint_RT[live, t]
            new = seen[:, None] if t == 0 else np.stack([out.token_RT[live, t - 1], seen], axis=1)
            # Rows that continue the same leaf with the same tokens are one new leaf.
            key = (leaf * self._tokens.ids + new[:, 0]) * self._tokens.ids + seen
            _, some, of_row = np.unique(key, return_index=True, return_inverse=True)
            logits = decoder.extend(leaf[some], new[some])
            token, logprob = _sample(logits, of_row, draw_RT[live, t], sampling)
            token = np.where(plan.forced_RT[live, t] >= 0, plan.forced_RT[live, t], token)
            action = np.where((token >= ACT) & (token < ACT + N_ACTIONS), token - ACT, -1)
            kind = walkers.step(live, action)
            out.token_RT[live, t], out.action_RT[live, t] = token, action
            out.logprob_RT[live, t], out.cell_RT[live, t] = logprob, walkers.cell_R[live]
            on = kind == FROZEN
            out.turns_R[live[~on]], out.kind_R[live[~on]] = t + 1, kind[~on]
            live, leaf = live[on], of_row[on]
            if not len(live):
                break
        plan.verify(out)
        return out


class _Plan:
    """What is played: arrays over the R starts, and the trees in which they are computed."""

    def __init__(self, starts: Sequence[Start], tokens: GridTokens, turns: int) -> None:
        n = len(starts)
        number: dict[str, int] = {}
        instances: list[Instance] = []
        self.board_R = np.empty(n, dtype=np.int64)
        for i, start in enumerate(starts):
            name = start.instance.instance_id
            if name not in number:
                number[name] = len(instances)
                instances.append(start.instance)
            self.board_R[i] = number[name]
        self.boards: Boards = from_instances(instances, tokens.side)
        self.vocab = tokens.vocab
        self._trees()
        self.hint_RT = np.zeros((n, turns), dtype=np.int64)
        self.forced_RT = np.full((n, turns), -1, dtype=np.int64)
        self._expected_RT = np.full((n, turns), -1, dtype=np.int64)
        self.first_R = np.array([s.retry_from for s in starts], dtype=np.int64)
        self._possible_R = np.ones(n, dtype=bool)
        size_R = self.boards.size_M[self.board_R]
        self._side, self._size_R = tokens.side, size_R
        for i, start in enumerate(starts):
            if start.parent is not None or start.retry_from or start.addition:
                self._retry(i, start, turns)

    def _trees(self) -> None:
        """Deals the rows of each board to trees of at most `_ROWS`."""
        self.order = np.argsort(self.board_R, kind="stable")
        counts = np.bincount(self.board_R)
        rank = np.arange(len(self.order)) - (np.cumsum(counts) - counts)[self.board_R[self.order]]
        trees_of_board = -(-counts // _ROWS)
        first = np.cumsum(trees_of_board) - trees_of_board
        self.tree_R = np.empty(len(self.order), dtype=np.int64)
        self.tree_R[self.order] = first[self.board_R[self.order]] + rank // _ROWS
        self.board_B = np.repeat(np.arange(len(counts)), trees_of_board)
        self.most_rows = int(min(counts.max(), _ROWS))

    def _retry(self, i: int, start: Start, turns: int) -> None:
        """The parent's turns and hints, and this one's own hint."""
        parent, first = start.parent, start.retry_from
        before = () if parent is None else parent.turns[:first]
        if len(before) < first or first >= turns:
            self._possible_R[i] = False
            return
        for u, turn in enumerate(before):
            self.forced_RT[i, u] = turn.tokens[0]
            self._expected_RT[i, u] = int(turn.info["cell"])
            self.hint_RT[i, u] = _seen_before(parent, u) // self.vocab
        if start.addition:
            if start.addition not in ACTIONS:
                raise DataError(
                    f"{start.instance.instance_id}: the addition {start.addition!r} is none of {', '.join(ACTIONS)}, "
                    "which is all that model=grid reads; set method.reflector=scripted"
                )
            self.hint_RT[i, first] = 1 + ACTIONS.index(start.addition)

    def verify(self, played: Played) -> None:
        """Marks rows whose replayed turns ended early or went elsewhere."""
        replayed = self._expected_RT >= 0
        same = ~replayed | (self.own(played.cell_RT) == self._expected_RT)
        late = (played.kind_R == FROZEN) | (played.turns_R > self.first_R)
        played.exact_R = self._possible_R & same.all(axis=1) & late

    def own(self, cell_RT: IntArray) -> IntArray:
        """Cells of the canvas as cells of each row's board."""
        row, column = np.divmod(cell_RT, self._side)
        own: IntArray = row * self._size_R[:, None] + column
        return own


def _seen_before(episode: Episode | None, turn: int) -> int:
    """The position token that stands before a turn."""
    assert episode is not None
    return episode.prompt[-1] if turn == 0 else episode.turns[turn - 1].bridge[-1]


def _sample(
    logits: torch.Tensor, leaf: IntArray, draw: npt.NDArray[np.float64], sampling: AgentSampling
) -> tuple[IntArray, npt.NDArray[np.float64]]:
    """A token and its log-prob for every row: leaf [r] says which of the distributions, draw [r] which point of it."""
    import torch

    z = logits.double()
    if sampling.temperature == 0:
        log_share = torch.log_softmax(z, -1).numpy()
        token = log_share.argmax(1)[leaf]
        return token, log_share[leaf, token]
    log_share = torch.log_softmax(z / sampling.temperature, -1).numpy()
    if sampling.top_p < 1:
        log_share = _nucleus(log_share, sampling.top_p)
    edges = np.exp(log_share).cumsum(1)
    aim = np.minimum(draw * edges[leaf, -1], edges[leaf, -1] * (1 - 1e-12))
    token = (edges[leaf] <= aim[:, None]).sum(1)
    return token, log_share[leaf, token]


def _nucleus(log_share: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.float64]:
    """The smallest set of likeliest tokens that holds at least `top_p`, scaled to 1; the rest gets -inf."""
    order = np.argsort(-log_share, axis=1, kind="stable")
    ordered = np.exp(np.take_along_axis(log_share, order, axis=1))
    before = ordered.cumsum(1) - ordered
    keep = np.empty_like(before, dtype=bool)
    np.put_along_axis(keep, order, before < top_p, axis=1)
    kept = np.where(keep, log_share, -np.inf)
    scaled: npt.NDArray[np.float64] = kept - np.log(np.exp(kept).sum(1, keepdims=True))
    return scaled


def _episodes(starts: Sequence[Start], plan: _Plan, played: Played) -> list[Episode | None]:
    """The rows as episodes. Plain lists throughout: this is the only part that works row by row."""
    vocab, cells = plan.vocab, plan.boards.cells_MC.tolist()
    heads = [(HEAD, *c) for c in cells]
    begin = plan.boards.start_M.tolist()
    seen = (POS + played.cell_RT[:, :-1] + vocab * plan.hint_RT[:, 1:]).tolist()
    own, token, action = (
        plan.own(played.cell_RT).tolist(),
        played.token_RT.tolist(),
        played.action_RT.tolist(),
    )
    logprob, turns, kind = played.logprob_RT.tolist(), played.turns_R.tolist(), played.kind_R.tolist()
    board, exact, hint = plan.board_R.tolist(), played.exact_R.tolist(), plan.hint_RT[:, 0].tolist()
    lost, bumps = (count.tolist() for count in _wasted(plan, played))
    out: list[Episode | None] = []
    for i, start in enumerate(starts):
        if not exact[i]:
            out.append(None)
            continue
        n = turns[i]
        made = tuple(
            Turn(
                text=_WORDS[a],
                tokens=(tok,),
                logprobs=(lp,),
                finished=True,
                observation="",
                bridge=(next_seen,) if u < n - 1 else (),
                info={"action": a, "cell": cell},
            )
            for u, (a, tok, lp, next_seen, cell) in enumerate(
                zip(action[i][:n], token[i], logprob[i], [*seen[i], 0], own[i], strict=False)
            )
        )
        bare = (*heads[board[i]], POS + begin[board[i]])
        goal = kind[i] == GOAL
        episode = Episode(
            instance=start.instance,
            prompt=(*bare[:-1], bare[-1] + vocab * hint[i]),
            system="",
            first_observation="",
            turns=made,
            result=Result(
                1.0 if goal else 0.0,
                goal,
                _ENDS[kind[i]],
                {
                    "turns": float(n),
                    "invalid_turns": float(lost[i]),
                    "bumps": float(bumps[i]),
                    "fell": float(kind[i] == HOLE),
                },
            ),
            bare_prompt=bare,
        )
        out.append(episode if start.parent is None else _as_retry(episode, start, vocab))
    return out


def _wasted(plan: _Plan, played: Played) -> tuple[IntArray, IntArray]:
    """Turns without an action, and moves against the edge [R]."""
    before_RT = np.concatenate([plan.boards.start_M[plan.board_R][:, None], played.cell_RT[:, :-1]], axis=1)
    done_RT = np.arange(before_RT.shape[1]) < played.turns_R[:, None]
    invalid_RT = done_RT & (played.action_RT < 0)
    still_RT = done_RT & ~invalid_RT & (before_RT == played.cell_RT)
    return invalid_RT.sum(axis=1), still_RT.sum(axis=1)


def _as_retry(episode: Episode, start: Start, vocab: int) -> Episode:
    """With the parent's own turns before `retry_from`, and the context without the addition."""
    parent, first = start.parent, start.retry_from
    assert parent is not None
    turns, bare_bridge = episode.turns, None
    if first:
        last = parent.turns[first - 1]
        bare_bridge = (last.bridge[-1] % vocab,)
        turns = (
            *parent.turns[: first - 1],
            replace(last, bridge=turns[first - 1].bridge),
            *turns[first:],
        )
    return replace(
        episode,
        turns=turns,
        retry_from=first,
        addition=start.addition,
        is_retry=True,
        bare_prompt=episode.prompt if first else episode.bare_prompt,
        bare_bridge=bare_bridge,
    )
