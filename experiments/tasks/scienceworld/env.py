"""One ScienceWorld episode in words (RLDS App. D.3).

What D.3 leaves open, or says in two ways:

- A turn is one reply, and 30 of them end the episode, counted here. D.3 says that `help` and `objects` are "free". Here
  they (and `task`) are so in that the simulator's clock stands still and they are no executed command for the reward;
  they do use a turn, since a reply was sampled, and the prompt says so. `wait` is one turn although it moves the clock
  by ten.
- `reset task` would set the progress back: it is refused with a notice and does nothing.
- A reply must hold exactly one closed <action> tag with something in it. Another reply uses the turn and changes
  nothing.
- After "Ambiguous request" the simulator would swallow whatever is not the number of an option. The agent may answer
  with a number; before any other command the choice is cancelled (which moves the clock by one), so that the command
  counts. Free commands leave the choice open. The simulator's "(or blank to cancel)" is left out of what the agent
  reads: a blank is no action here.
- "The same action" is compared without case and extra blanks. The third one is still executed; a reply without an
  action breaks the row.
- A score below 0 means a mistake that ends the task (a wrong focus), although the simulator does not say "completed".
- Steps are numbered from 0, as the grader's pivots and `retry_from_step` are.
- The paper names the parts of the terminal observation, not its words; these are ours.
- A simulator that fails ends the episode with reward 0 exactly, unshaped, which can be more than an honest one earns
  (see `result`). A failure while the world is built costs nothing: another simulator builds it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from racelab.experiments.episodes import Instance, Observation, Result, Turn
from racelab.experiments.tasks.common import tagged_actions
from racelab.experiments.tasks.scienceworld.jvm import Simulator, SimulatorFaultError, State
from racelab.experiments.tasks.scienceworld.pool import JvmPool
from racelab.experiments.tasks.scienceworld.reward import SOLVED_FROM, Shaped, Shaping, running_max, shape
from racelab.experiments.tasks.scienceworld.taxonomy import FORMAT_REMINDER

FREE: Final = frozenset({"help", "objects", "task"})
BLOCKED: Final = "reset task"
AMBIGUOUS: Final = "Ambiguous request"
REJECTED: Final = ("No known action matches", "Unknown action", AMBIGUOUS)
"""D.3's markers: an observation that opens with one of them executed nothing."""
_CANCEL: Final = " (or blank to cancel)"

NO_ACTION = "Your reply held no action, so the turn was used up and nothing changed. Give exactly one action."
REFUSED = f"`{BLOCKED}` is not available; nothing changed."
FAULT = "The simulator failed."
_OPTION: Final = re.compile(r"^(\d+):\t(.+)$", re.MULTILINE)
_LOAD_TRIES: Final = 3

Status = Literal["ok", "free", "rejected", "ambiguous", "blocked", "invalid", "fault"]
End = Literal["completed", "failed", "repeated_action", "turns", "response_budget", "environment_error"]

_REASONS: Final[Mapping[str, str]] = {
    "completed": "the task is completed",
    "failed": "a mistake that cannot be undone, mostly a focus on the wrong thing",
    "repeated_action": "the same action too many times in a row",
    "turns": "no turns are left",
    "response_budget": "the response budget is too small for the next observation",
    "environment_error": "the simulator failed",
}


@dataclass(frozen=True, slots=True)
class Rules:
    """What the config says of an episode.

    Attributes:
        simplification: of the world.
        max_turns: replies.
        repeat_limit: the same action so many times in a row ends the episode.
        shaping: of the reward.
    """

    simplification: str
    max_turns: int
    repeat_limit: int
    shaping: Shaping


class ScienceWorldEnv:
    """One episode of one variation, in a simulator that it leases from the pool.

    `info` of an observation: `action` (as it was understood; None if there was none), `status`, `score` (best so far,
    0 to 1) and `moves` (the simulator's clock).
    """

    def __init__(self, instance: Instance, pool: JvmPool, rules: Rules) -> None:
        """Takes a simulator; waits while all are taken.

        Args:
            instance: with `task` and `variation`; see `splits.instances`.
            pool: of simulators.
            rules: of the episode.

        Raises:
            UnreachableError: no simulator can be started.
        """
        self._instance, self._pool, self._rules = instance, pool, rules
        self._task = str(instance.data["task"])
        self._simulator: Simulator | None = pool.lease()
        self._begin()

    def _begin(self) -> None:
        self._scores: list[float] = []
        self._replies: list[str] = []
        self._actions: list[str | None] = []  # as understood, of every turn
        self._executed: list[str | None] = []
        self._statuses: list[Status] = []
        self._options: dict[str, str] = {}  # of an ambiguous request that waits for a number
        self._score, self._moves, self._completed = 0.0, 0, False  # of the simulator, as last read
        self._first: Observation | None = None
        self._said = ""  # last, without the reminder
        self._broken = False
        self._end: End | str = ""
        self._last: Observation | None = None

    def reset(self) -> Observation:
        """The task's instruction and what can be seen.

        Raises:
            UnreachableError: the simulator failed, and no other can be started.
            RuntimeError: the environment is closed.
        """
        self._begin()
        for _ in range(_LOAD_TRIES):
            simulator = self._held()
            data = self._instance.data
            try:
                instruction = simulator.load(self._task, int(data["variation"]), self._rules.simplification)
                state = self._pool.step(simulator, "look around")
            except SimulatorFaultError as fault:
                self._pool.count_fault(fault.kind)
                self._simulator = self._pool.replace(simulator)
            else:
                self._read(state)
                self._scores.append(self._score)
                self._said = state.text
                self._first = Observation(f"{instruction}\n\n{state.text}", info=self._info(None, "ok"))
                return self._first
        self._broken = True  # the first step says so, since an episode has at least one turn
        self._scores.append(0.0)
        self._first = Observation(FAULT, info=self._info(None, "fault"))
        return self._first

    def step(self, reply: str) -> Observation:
        """Plays one reply.

        Raises:
            RuntimeError: the episode is over or has not begun.
        """
        if self._end or self._first is None:
            raise RuntimeError(f"the episode is over ({self._end}) or has not begun; open another")
        found = [_plain(action) for action in tagged_actions(reply)]
        action = found[0] if len(found) == 1 and found[0] else None
        self._replies.append(reply)
        self._actions.append(action)
        self._executed.append(None)
        try:
            if self._broken:
                raise SimulatorFaultError("error", FAULT)
            text, status = self._play(action)
        except SimulatorFaultError as fault:
            if not self._broken:
                self._pool.count_fault(fault.kind)
            text, status = FAULT, "fault"
        self._scores.append(self._score)
        self._statuses.append(status)
        end = self._ended(status)
        self._said = text
        return self._finish(end) if end else self._seen(f"{text}\n\n{FORMAT_REMINDER}")

    def replay(self, turns: Sequence[Turn]) -> Observation | None:
        """Plays the recorded replies in a fresh load of the same world; None where anything reads otherwise."""
        seen = self.reset() if self._first is None or self._replies else self._first
        for turn in turns:
            if seen.done or self._broken:
                return None
            seen = self.step(turn.text)
            if seen.text != turn.observation:
                return None
        return seen

    def stop(self, reason: str) -> Observation:
        """Ends an episode that is not over; one that is over stays as it ended."""
        if self._end and self._last is not None:
            return self._last
        if not self._scores:
            self._scores.append(0.0)
        return self._finish(reason)

    def result(self) -> Result:
        """The shaped reward of D.3; solved means a raw score of 1.

        After a fault of the simulator the reward is 0, unshaped, whatever was earned before. That is above an honest
        episode without a score and with too little reasoning, which gets -0.1, and the others of its group are
        compared with it. The metric `jvm_fault` is 1 for such an episode, else 0.

        Raises:
            RuntimeError: the episode is not over.
        """
        if not self._end:
            raise RuntimeError("the episode is not over")
        shaped, fault = self._shaped(), self._end == "environment_error"
        count = self._statuses.count
        metrics = {
            "raw_score": 0.0 if fault else shaped.raw,
            "turns": float(len(self._replies)),
            "moves": float(self._moves),
            "invalid_turns": float(count("invalid")),
            "rejected_turns": float(count("rejected") + count("ambiguous")),
            "free_turns": float(count("free")),
            "blocked_turns": float(count("blocked")),
            "stagnant": float(shaped.stagnant),
            "no_experiment": float(shaped.no_experiment),
            "no_reasoning": float(shaped.no_reasoning),
            "diversity": shaped.diversity,
            "failed": float(self._end == "failed"),
            "jvm_fault": float(fault),
        }
        solved = not fault and shaped.raw >= SOLVED_FROM
        return Result(0.0 if fault else shaped.reward, solved, str(self._end), metrics)

    def close(self) -> None:
        """Gives the simulator back. May be called twice."""
        simulator, self._simulator = self._simulator, None
        if simulator is not None:
            self._pool.give_back(simulator)

    def _held(self) -> Simulator:
        if self._simulator is None:
            raise RuntimeError("the environment is closed")
        return self._simulator

    def _play(self, action: str | None) -> tuple[str, Status]:
        """What an action leads to: the text without the reminder, and how it went."""
        if action is None:
            return NO_ACTION, "invalid"
        if action.lower() == BLOCKED:
            return REFUSED, "blocked"
        simulator, free = self._held(), action.lower() in FREE
        if self._options and not free and not action.isdecimal():
            self._options = {}
            self._read(self._pool.step(simulator, ""))
        state = self._pool.step(simulator, action)
        self._read(state)
        if free:
            lines = state.text.split("\n")
            return "\n".join(line for line in lines if line.strip() != BLOCKED), "free"
        chosen = self._options.get(action, action)
        self._options = {}
        if state.text.startswith(AMBIGUOUS):
            self._options = dict(_OPTION.findall(state.text))
            asked = state.text.replace(_CANCEL, "", 1).rstrip()
            return f"{asked}\nGive a number as the action; another command cancels the request.", "ambiguous"
        if state.text.startswith(REJECTED):
            return f"{state.text.rstrip()}\n{_matching(action, simulator.templates())}", "rejected"
        self._executed[-1] = chosen
        return state.text, "ok"

    def _read(self, state: State) -> None:
        self._score, self._moves, self._completed = state.score, state.moves, state.completed

    def _ended(self, status: Status) -> End | None:
        """Why the episode is over after this turn; the first that applies."""
        if status == "fault":
            return "environment_error"
        if self._score < 0:
            return "failed"
        if self._completed:
            return "completed"
        limit = self._rules.repeat_limit
        last = [None if action is None else action.lower() for action in self._actions[-limit:]]
        if len(last) == limit and last[0] is not None and len(set(last)) == 1:
            return "repeated_action"
        return "turns" if len(self._replies) >= self._rules.max_turns else None

    def _seen(self, text: str, *, done: bool = False) -> Observation:
        action = self._actions[-1] if self._actions else None
        status: Status = self._statuses[-1] if self._statuses else "ok"
        self._last = Observation(text, done=done, info=self._info(action, status))
        return self._last

    def _info(self, action: str | None, status: Status) -> dict[str, Any]:
        return {
            "action": action,
            "status": status,
            "score": running_max(self._scores)[-1] if self._scores else 0.0,
            "moves": self._moves,
        }

    def _finish(self, reason: End | str) -> Observation:
        """D.3's terminal observation, after what was said last: steps used, score, what each step earned, a label."""
        self._end = reason
        fault = reason == "environment_error"
        best = [0.0] if fault else running_max(self._scores)
        final = _percent(best[-1])
        lines = [
            self._said,
            "",
            f"The episode is over: {_REASONS.get(reason, reason)}.",
            f"Outcome: {_label(final, failed=reason == 'failed')}",
            f"Steps used: {len(self._replies)} of {self._rules.max_turns}",
            f"Final score: {final}/100",
            f"Score by step: {_attribution(best, self._actions)}",
        ]
        return self._seen("\n".join(lines), done=True)

    def _shaped(self) -> Shaped:
        return shape(self._scores, self._executed, self._replies, self._task, self._rules.shaping)


def _plain(action: str) -> str:
    """One line of printable characters without extra blanks."""
    return " ".join("".join(c if c.isprintable() else " " for c in action).split())


def _percent(score: float) -> int:
    return round(100 * min(score, 1.0))


def _label(final: int, *, failed: bool) -> str:
    """A word for the grader: how far the episode came, and whether a mistake ended it."""
    if final >= 100:
        return "task solved"
    how = "most of the task done" if final >= 70 else "part of the task done" if final > 0 else "no progress"
    return f"task failed, {how}" if failed else f"task not solved, {how}"


def _attribution(best: Sequence[float], actions: Sequence[str | None]) -> str:
    """Which steps raised the score, and by how much; whole points that add up to the final score."""
    points = [_percent(score) for score in best]
    earned = [f"start +{points[0]}"] if points[0] else []
    for step, action in enumerate(actions[: len(points) - 1]):
        gain = points[step + 1] - points[step]
        if gain:
            earned.append(f"step {step} +{gain} ({action})")
    return f"{', '.join(earned)}; 0 at all others" if earned else "0 at every step"


def _matching(action: str, templates: Sequence[str]) -> str:
    """The valid commands that an action the simulator does not know may have meant."""
    known = [template for template in templates if template != BLOCKED]
    verb = action.lower().split(" ")[0]
    found = [template for template in known if template.split(" ")[0] == verb]
    if not found:
        near = set(difflib.get_close_matches(verb, [t.split(" ")[0] for t in known], n=3, cutoff=0.6))
        found = [template for template in known if template.split(" ")[0] in near]
    names = "objects lists the names that can stand for OBJ."
    return f"Valid commands{' that match' if found else ''}: {', '.join(found or known)}. {names}"
