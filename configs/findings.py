"""What a configuration asks for and cannot reach: the form of a finding, and rules that several methods share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from racelab.configs.schema import Config


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that cannot be reached.

    Attributes:
        severity: `error` if the run could not train at all, else `warning`.
        key: dotted config key.
        value: as configured, as text.
        reason: why it cannot be reached.
        works: an override that works, `key=value`.
    """

    severity: Literal["warning", "error"]
    key: str
    value: str
    reason: str
    works: str

    def line(self) -> str:
        """All of it in one line."""
        return f"{self.severity}: {self.key}={self.value}: {self.reason}; works: {self.works}"

    def as_dict(self) -> dict[str, str]:
        """JSON values."""
        return asdict(self)


def warn(key: str, value: object, reason: str, works: object, works_key: str | None = None) -> Finding:
    """What will not happen; `works` is a value of `works_key`, else of `key`."""
    return Finding("warning", key, str(value), reason, f"{works_key or key}={works}")


def error(key: str, value: object, reason: str, works: object) -> Finding:
    """What cannot train at all."""
    return Finding("error", key, str(value), reason, f"{key}={works}")


def most_policy_steps(config: Config) -> int:
    """Policy steps that the budget and the limit on all steps allow."""
    run = config.run
    return run.policy_updates if run.max_steps is None else min(run.policy_updates, run.max_steps)


def planned_phases(
    config: Config, key: str, policy: int, rubric: int, *, closing: bool = False
) -> Iterator[Finding]:
    """Phases of fixed length that the run is too short for.

    Args:
        config: the whole configuration.
        key: the key that holds both lengths.
        policy: steps of a policy phase.
        rubric: steps of a rubric phase.
        closing: a full last policy phase is followed by its rubric phase.
    """
    steps, limit = most_policy_steps(config), config.run.max_steps
    if policy >= steps:
        late = policy > steps or not closing or limit == policy
        what = (
            "ends in its first policy phase: no rubric is updated"
            if late
            else "none comes after a rubric phase"
        )
        reason = f"the run has {steps} policy steps at most and {what}"
    elif limit is not None and policy + rubric >= limit:
        reason = f"run.max_steps={limit} ends the run in its first rubric phase: no policy step uses what was learnt"
    else:
        return
    shorter = min(policy, steps // 2)
    rest = rubric if limit is None else min(rubric, limit - 1 - shorter)
    value = f"[{policy},{rubric}]"
    if shorter >= 1 and rest >= 1:
        yield warn(key, value, reason, f"[{shorter},{rest}]")
    elif limit is None:
        yield warn(key, value, reason, policy + 1, "run.policy_updates")
    else:
        yield warn(key, value, reason, "null", "run.max_steps")


def planned_steps(config: Config, policy: int, rubric: int, *, closing: bool = False) -> int:
    """Steps of a run whose phases have fixed lengths; `closing` as in `planned_phases`, else a policy step ends it."""
    updates, limit = config.run.policy_updates, config.run.max_steps
    steps = updates + (updates if closing else updates - 1) // policy * rubric
    return steps if limit is None else min(steps, limit)


def late_steps(config: Config, last: int) -> Iterator[Finding]:
    """Probes and kept checkpoints of steps that a run of at most `last` steps cannot come to."""
    for key, wanted in (("probe.at_steps", config.probe.at_steps), ("eval.at_steps", config.eval.at_steps)):
        reached = [step for step in wanted if isinstance(step, str) or step <= last]
        if len(reached) < len(wanted):
            reason = f"the run ends with step {last} at the latest"
            yield warn(key, _listed(wanted), reason, _listed(reached))


def _listed(values: Sequence[object]) -> str:
    """As an override writes a list."""
    return f"[{','.join(map(str, values))}]"
