"""What an RLDS configuration asks for and cannot reach; see `check.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from racelab.configs.findings import Finding, warn
from racelab.configs.schema_rlds import FrozenLakeTask, RldsRunConfig


def rlds_findings(config: RldsRunConfig) -> Iterator[Finding]:
    """All findings for a configuration."""
    rules = (
        _long_paths,
        _no_retries,
        _nothing_to_retry,
        _nothing_to_imitate,
        _scalar_advantages,
        _no_null,
        _short_replies,
        _late_checkpoints,
    )
    for rule in rules:
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


def _nothing_to_retry(config: RldsRunConfig) -> Iterator[Finding]:
    """Keys that only retries give a meaning to."""
    m = config.method
    if m.reflect.max_retries:
        return
    for key, value, usual in (
        ("sdae.phi_eta", m.sdae.phi_eta if m.advantage == "sdae" else 0.0, 0.0),
        ("reflect.placement", m.reflect.placement, "system_prompt"),
        ("reflect.memory", m.reflect.memory, 0),
        ("reflect.contrastive", m.reflect.contrastive, False),
        ("mask_prefix", m.mask_prefix, "retries"),
        ("opmd_baseline", m.opmd_baseline, False),
        ("positive_amplification", m.positive_amplification, 1.0),
        ("prompt_rewrite", m.prompt_rewrite, False),
    ):
        if value != usual:
            reason = "without retries (method.reflect.max_retries=0) it changes nothing"
            yield warn(f"method.{key}", _said(value), reason, _said(usual))


def _scalar_advantages(config: RldsRunConfig) -> Iterator[Finding]:
    """Keys of SDAE that change what is trained, set where it is not used (grades may still be, for the diagnostics)."""
    m = config.method
    if m.advantage != "grpo":
        return
    if m.sdae.phi_eta > 0:
        reason = "advantage=grpo has no subtask weights: what is learnt does not change"
        yield warn("method.sdae.phi_eta", _said(m.sdae.phi_eta), reason, 0)
    if m.sdae.skip_flat:
        reason = "with advantage=grpo a group with equal rewards has no advantage anyway"
        yield warn("method.sdae.skip_flat", "true", reason, "false")
    if m.sdae.kernel == "none":
        reason = "advantage=grpo has no pivots to spread an advantage around: what is learnt does not change"
        yield warn("method.sdae.kernel", "none", reason, "gaussian")


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


def _late_checkpoints(config: RldsRunConfig) -> Iterator[Finding]:
    wanted = config.eval.at_steps
    reached = [step for step in wanted if step <= config.budget]
    if len(reached) < len(wanted):
        reason = f"the run ends with step {config.budget} at the latest"
        yield warn("eval.at_steps", _listed(wanted), reason, _listed(reached))


def _listed(values: Sequence[int]) -> str:
    """As an override writes a list."""
    return f"[{','.join(map(str, values))}]"


def _said(value: object) -> str:
    """As an override writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
