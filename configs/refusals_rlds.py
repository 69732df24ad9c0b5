"""Options that an RLDS run's model or reflector cannot honour: an error each, never ignored.

What merely has no effect on a condition that shares its keys with others is a warning: `check_rlds.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from racelab.configs.schema_rlds import RldsMethodConfig, RldsRunConfig


def refuse_what_grid_cannot(config: RldsRunConfig) -> None:
    """As `refuse_what_local_cannot`, for the small transformer over grid tokens; the first value is the one to set.

    Raises:
        ValueError: one line with key, value, reason and mend.
    """
    m = config.model
    for key, value, allowed, why in (
        ("model.source", m.source, ("grid",), "is made here, not read"),
        ("model.sha256", m.sha256, (None,), "is made here, not read"),
        ("model.revision", m.revision, (None,), "is made here, not read"),
        ("model.compute_dtype", m.compute_dtype, ("float32",), "computes in float32"),
        ("model.device", m.device, ("cpu", "auto"), "computes on the CPU"),
        ("model.train_from_layer", m.train_from_layer, (0,), "is trained as a whole"),
        ("task.demonstration", config.task.demonstration, (False,), "does not read"),
        (
            "method.reflect.placement",
            config.method.reflect.placement,
            ("system_prompt",),
            "has one place for a hint, the token of the turn",
        ),
    ):
        if value not in allowed:
            raise ValueError(f"{key}={_said(value)}: model=grid {why}; set {key}={_said(allowed[0])}")


def refuse_what_the_reflector_cannot(m: RldsMethodConfig) -> None:
    """What the chosen kind of reflection has no use for.

    Raises:
        ValueError: one line with key, value, reason and mend.
    """
    r = m.reflect
    scripted = "method.reflector=scripted knows the solution and reads nothing"
    for key, value, allowed, on, why in (
        ("memory", r.memory, 0, m.reflector == "scripted", scripted),
        ("contrastive", r.contrastive, False, m.reflector == "scripted", scripted),
        (
            "placement",
            r.placement,
            "system_prompt",
            m.prompt_rewrite,
            "method.prompt_rewrite=true replaces the system prompt",
        ),
    ):
        if on and value != allowed:
            raise ValueError(
                f"method.reflect.{key}={_said(value)}: {why}; set method.reflect.{key}={_said(allowed)}"
            )


def _said(value: object) -> str:
    """As an override writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
