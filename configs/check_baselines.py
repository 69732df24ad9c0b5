"""What the baselines are asked for and cannot reach; `check.py` does the same for RACE."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from racelab.configs.findings import (
    Finding,
    error,
    late_steps,
    most_policy_steps,
    planned_phases,
    planned_steps,
    warn,
)
from racelab.configs.schema import (
    Config,
    EvolmConfig,
    FileData,
    HubData,
    RarConfig,
    RlcerConfig,
    RrdConfig,
    RubricArmConfig,
    ScalarRmConfig,
    StaticRubricCommon,
)

_EVERYTHING_HOLDS = "every score is at least 0, so every item holds for every answer"


def baseline_findings(config: Config) -> Iterator[Finding]:
    """The findings of all rules for the configured method."""
    for kind, rule in _RULES:
        if isinstance(config.method, kind):
            yield from rule(config, config.method)


def _alternation(config: Config, m: EvolmConfig) -> Iterator[Finding]:
    yield from planned_phases(config, "method.fixed", *m.fixed, closing=True)
    yield from late_steps(config, planned_steps(config, *m.fixed, closing=True))


def _buffer(config: Config, m: EvolmConfig) -> Iterator[Finding]:
    """Answers that are never there, or never old enough."""
    if m.entries_per_rubric_step > m.buffer.capacity:
        yield warn(
            "method.entries_per_rubric_step",
            m.entries_per_rubric_step,
            f"the buffer holds {m.buffer.capacity} answers at most, so no rubric step ever has as many",
            m.buffer.capacity,
        )
    steps = most_policy_steps(config)
    if m.buffer.min_age >= steps > 1:
        yield warn(
            "method.buffer.min_age",
            m.buffer.min_age,
            f"no answer of a run of {steps} policy steps gets that old, so the limit gives way every time",
            steps // 4,
        )


def _rlcer(config: Config, m: RlcerConfig) -> Iterator[Finding]:
    """Rewards that are always equal, and items that are never valid."""
    if m.outcome_weight + m.cot_weight == 0:
        reason = "with cot_weight=0 too every answer has the reward 0 and the policy cannot learn"
        yield error("method.outcome_weight", "0", reason, 1.0)
    if m.correlation_threshold >= 1:
        reason = "an item is valid above it, and no correlation is above 1: no item ever counts"
        yield warn("method.correlation_threshold", f"{m.correlation_threshold:g}", reason, 0.2)
    if m.verifier == "items" and m.item_threshold <= 0:
        reason = f"{_EVERYTHING_HOLDS}, and an item that never varies correlates with nothing"
        yield warn("method.item_threshold", f"{m.item_threshold:g}", reason, 0.5)


def _joint(config: Config, m: RlcerConfig) -> Iterator[Finding]:
    """Every policy step is followed by its rubric step."""
    last, limit = 2 * config.run.policy_updates, config.run.max_steps
    yield from late_steps(config, last if limit is None else min(last, limit))


def _rules(config: Config, m: RlcerConfig) -> Iterator[Finding]:
    """Prompts that no rule comes with: nothing says which answers are right."""
    reason = "RLCER asks a prompt's own rule whether an answer is right, and no prompt has one: the run stops at once"
    if isinstance(config.data, HubData):
        yield Finding("error", "data.source", "hub", reason, "data=package")
    elif isinstance(config.data, FileData) and config.data.check_field is None:
        yield error("data.check_field", "null", reason, "check")


def _roles_first(config: Config, m: RubricArmConfig) -> Iterator[Finding]:
    """Generator and judge come first; a limit on all steps may leave none for the policy."""
    before, limit = m.cycles * (m.generator_steps + m.judge_steps), config.run.max_steps
    if limit is not None and limit <= before:
        reason = f"generator and judge take the first {before} steps, so the policy is never trained"
        yield error("run.max_steps", limit, reason, before + config.run.policy_updates)
    else:
        last = before + config.run.policy_updates
        yield from late_steps(config, last if limit is None else min(last, limit))


def _splits(config: Config, m: RrdConfig) -> Iterator[Finding]:
    if m.decomposition_trigger > m.group_size:
        yield warn(
            "method.decomposition_trigger",
            m.decomposition_trigger,
            f"an item is satisfied by G = {m.group_size} answers at most, so none is ever split",
            m.group_size,
        )


def _items(config: Config, m: RarConfig | RrdConfig) -> Iterator[Finding]:
    """Where answers are scored by their items, items that always hold make all rewards equal."""
    by_item = isinstance(m, RrdConfig) or m.aggregation != "implicit"
    if by_item and m.item_threshold <= 0:
        reason = f"{_EVERYTHING_HOLDS}: all rewards are equal and the policy cannot learn"
        yield error("method.item_threshold", f"{m.item_threshold:g}", reason, 0.5)


def _policy_only(config: Config, m: StaticRubricCommon | ScalarRmConfig) -> Iterator[Finding]:
    yield from late_steps(config, most_policy_steps(config))


_RULES: tuple[tuple[type | tuple[type, ...], Callable[[Config, Any], Iterator[Finding]]], ...] = (
    (EvolmConfig, _alternation),
    (EvolmConfig, _buffer),
    (RlcerConfig, _rlcer),
    (RlcerConfig, _joint),
    (RlcerConfig, _rules),
    (RubricArmConfig, _roles_first),
    (RrdConfig, _splits),
    ((RarConfig, RrdConfig), _items),
    ((StaticRubricCommon, ScalarRmConfig), _policy_only),
)
