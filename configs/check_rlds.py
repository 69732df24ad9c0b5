"""What an RLDS configuration asks for and cannot reach; see `check.py`."""

from __future__ import annotations

from collections.abc import Iterator

from racelab.configs.findings import Finding, warn
from racelab.configs.schema_rlds import FrozenLakeTask, RldsRunConfig


def rlds_findings(config: RldsRunConfig) -> Iterator[Finding]:
    """All findings for a configuration."""
    for rule in (_long_paths, _no_retries, _nothing_to_imitate, _no_null, _short_replies):
        yield from rule(config)


def _long_paths(config: RldsRunConfig) -> Iterator[Finding]:
    task = config.task
    if isinstance(task, FrozenLakeTask) and not task.boards and task.max_path > task.max_turns:
        yield warn(
            "task.max_path",
            task.max_path,
            f"boards whose shortest path is longer than task.max_turns={task.max_turns} cannot be solved",
            task.max_turns,
        )


def _no_retries(config: RldsRunConfig) -> Iterator[Finding]:
    reflect = config.method.reflect
    if reflect.max_retries and reflect.failure_share == 0:
        yield warn("method.reflect.failure_share", 0, "no failure is ever retried", 0.5)


def _nothing_to_imitate(config: RldsRunConfig) -> Iterator[Finding]:
    auxiliary, reflect = config.method.auxiliary, config.method.reflect
    for key, value in (("reflect_coef", auxiliary.reflect_coef), ("retry_coef", auxiliary.retry_coef)):
        if value and not reflect.max_retries:
            yield warn(
                f"method.auxiliary.{key}", f"{value:g}", "without retries there are no pairs to learn from", 0
            )
    if auxiliary.reflect_coef and reflect.max_retries and config.method.reflector == "scripted":
        yield warn(
            "method.auxiliary.reflect_coef",
            f"{auxiliary.reflect_coef:g}",
            "a scripted reflector writes no text, so this part of the auxiliary loss is empty",
            0,
        )


def _no_null(config: RldsRunConfig) -> Iterator[Finding]:
    sdae = config.method.sdae
    if config.method.advantage == "sdae" and sdae.null_draws and sdae.null_every > config.budget:
        yield warn(
            "method.sdae.null_every",
            sdae.null_every,
            f"a run of {config.budget} updates never takes the permutation null of the diagnostics",
            config.budget,
        )


def _short_replies(config: RldsRunConfig) -> Iterator[Finding]:
    task = config.task
    if task.max_turn_tokens > task.max_response_tokens:
        yield warn(
            "task.max_turn_tokens",
            task.max_turn_tokens,
            f"a whole episode has task.max_response_tokens={task.max_response_tokens}",
            task.max_response_tokens,
        )
