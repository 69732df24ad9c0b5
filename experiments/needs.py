"""What only some methods need: found before a run folder exists, made once the judge has its scales.

One finder and one maker per block of the config that asks for something; a method that asks for nothing has neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from racelab.configs import schema
from racelab.configs.schema import Config
from racelab.experiments.data.pairs import load_pairs
from racelab.experiments.data.sources import PromptData
from racelab.experiments.errors import ConfigError
from racelab.experiments.methods.baselines.rubric_arm import fitting_pairs
from racelab.experiments.methods.baselines.scalar_rm import make_reward_model
from racelab.experiments.models.api import ApiModel, api_settings, check
from racelab.experiments.models.assets import resolve_model
from racelab.experiments.models.chat import ChatModel, LocalChat
from racelab.experiments.models.configured import json_settings
from racelab.experiments.models.judge_api import ApiJudge
from racelab.experiments.models.prompts import rar as prompts_rar
from racelab.experiments.models.prompts import rrd as prompts_rrd
from racelab.experiments.models.prompts.template import RoleTemplate
from racelab.experiments.models.proposals import proposal_sampling
from racelab.experiments.models.verifier import make_verifier
from racelab.experiments.parts import Parts
from racelab.experiments.types import Pair

FIT = "fit"
"""`method.source` of a reward model that is fitted at the start of the run."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Found, not yet loaded.

    Attributes:
        pairs: preference pairs, all of them.
        reward_model: folder of a sequence-classification model; None: fitted, or not needed.
        lines: what the loaders have to say.
    """

    pairs: tuple[Pair, ...] = ()
    reward_model: Path | None = None
    lines: tuple[str, ...] = ()


def find_needs(config: Config, data: PromptData) -> Needs:
    """Everything of this kind that can be wrong with the outside.

    Raises:
        RacelabError: one line naming the key, file, variable or package that is missing or wrong.
    """
    if asks_api(config):
        check(api_settings(config.api))
    find = _FINDERS.get(type(config.method))
    return Needs() if find is None else find(config, data)


def torch_device(device: str) -> str:
    """`auto` takes a GPU where there is one."""
    import torch

    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def asks_api(config: Config) -> bool:
    """Whether the run talks to the model of `api`."""
    return _proposer(config.method) == "api" or config.probe.redundancy == "api"


def _proposer(method: object) -> str | None:
    """`method.proposer` of a method that asks it for rubrics; RaR's predefined items are nobody's."""
    asks = getattr(method, "aggregation", None) != "predefined"
    return getattr(method, "proposer", None) if asks else None


def _no_rules(config: Config, data: PromptData) -> Needs:
    """RLCER asks every prompt's own rule whether an answer is right."""
    without = sum(p.check is None for p in data.train)
    if without == len(data.train):
        raise ConfigError(
            "method=rlcer needs prompts with a rule that decides what is right, and none of the training prompts has "
            "one; take data=package, data=reasoning-gym, or a file with data.check_field"
        )
    line = f"{without} of {len(data.train)} training prompts have no rule: their answers count neither right nor wrong"
    return Needs(lines=(line,) if without else ())


def _pairs(source: str, config: Config) -> tuple[Pair, ...]:
    """Packaged pairs are of the difficulty that the run trains on."""
    data = config.data
    if isinstance(data, schema.PackageData):
        return tuple(load_pairs(source, difficulty=data.difficulty, categories=data.categories))
    return tuple(load_pairs(source))


def _rubric_arm(config: Config, data: PromptData) -> Needs:
    method = config.method
    assert isinstance(method, schema.RubricArmConfig)
    pairs = _pairs(method.pairs, config)
    if len(pairs) < method.pairs_per_step:
        raise ConfigError(
            f"{len(pairs)} preference pairs are fewer than method.pairs_per_step={method.pairs_per_step}; "
            "lower it or give more pairs"
        )
    return Needs(pairs=pairs, lines=(f"{len(pairs)} preference pairs from {method.pairs}",))


def _scalar_rm(config: Config, data: PromptData) -> Needs:
    method = config.method
    assert isinstance(method, schema.ScalarRmConfig)
    if method.source != FIT:
        folder = resolve_model(method.source, sha256=method.sha256, revision=method.revision)
        return Needs(reward_model=folder)
    pairs = _pairs(method.pairs, config)
    return Needs(pairs=pairs, lines=(f"{len(pairs)} preference pairs from {method.pairs}",))


_FINDERS: dict[type, Callable[[Config, PromptData], Needs]] = {
    schema.RlcerConfig: _no_rules,
    schema.RubricArmConfig: _rubric_arm,
    schema.ScalarRmConfig: _scalar_rm,
}


def equip(parts: Parts, config: Config, needs: Needs, folder: Path) -> tuple[Parts, tuple[str, ...]]:
    """The parts with what the method asks for beside them, and lines about it.

    Args:
        parts: judge calibrated.
        config: of the run.
        needs: from `find_needs`.
        folder: of the run, for what is made once and kept with it.
    """
    make = _MAKERS.get(type(config.method))
    return (parts, ()) if make is None else make(parts, config, needs, folder)


def describe(parts: Parts, config: Config) -> dict[str, object]:
    """What `equip` made that scores or writes rubrics, and the templates that it is asked with (JSON values)."""
    made = {"proposer": parts.proposer, "verifier": parts.verifier, "reward_model": parts.reward_model}
    found: dict[str, object] = {
        k: v.describe() for k, v in made.items() if v is not None and hasattr(v, "describe")
    }
    if parts.proposer is not None and type(config.method) in _TEMPLATES:
        found["templates"] = {f"{t.name}/{t.version}": t.sha for t in _TEMPLATES[type(config.method)]}
    return found


def redundancy_chat(parts: Parts, config: Config) -> ChatModel | None:
    """The model that `probe.redundancy` asks, or None if it asks nobody."""
    if config.probe.redundancy == "api":
        return ApiModel(api_settings(config.api))
    if config.probe.redundancy == "judge" and isinstance(parts.judge, ApiJudge):
        return parts.judge.chat
    if config.probe.redundancy == "judge" and parts.judge_model is not None:
        return LocalChat(parts.judge_model, seed=config.run.seed, model_id="judge")
    return None


def _static(parts: Parts, config: Config, needs: Needs, folder: Path) -> tuple[Parts, tuple[str, ...]]:
    method = config.method
    assert isinstance(method, schema.StaticRubricCommon)
    proposers: dict[str, Callable[[], ChatModel]] = {
        "api": lambda: ApiModel(api_settings(config.api)),
        "untrained": lambda: LocalChat(parts.untrained.model, seed=config.run.seed, model_id="untrained"),
    }
    who = _proposer(method)
    if who is None:
        return parts, ()
    proposer = proposers[who]()
    return replace(parts, proposer=proposer, proposal=proposal_sampling(method, config.api)), ()


def _rlcer(parts: Parts, config: Config, needs: Needs, folder: Path) -> tuple[Parts, tuple[str, ...]]:
    method, judge = config.method, config.judge
    assert isinstance(method, schema.RlcerConfig)
    verifier = make_verifier(
        method.verifier,
        model=parts.judge_model,
        judge=parts.judge,
        threshold=method.item_threshold,
        settings=json_settings(judge, config.run.seed) if isinstance(judge, schema.JsonJudgeConfig) else None,
    )
    return replace(parts, verifier=verifier), ()


def _rubric_arm_parts(
    parts: Parts, config: Config, needs: Needs, folder: Path
) -> tuple[Parts, tuple[str, ...]]:
    from racelab.experiments.backends.roles import RoleBackend

    method = config.method
    assert isinstance(method, schema.RubricArmConfig)
    pairs, dropped = fitting_pairs(needs.pairs, parts.generator)
    lines = (f"{dropped} pairs dropped: no room for a rubric",) if dropped else ()
    return replace(parts, pairs=pairs, backend=RoleBackend(parts.backend, method.roles)), lines


def _scalar_rm_parts(
    parts: Parts, config: Config, needs: Needs, folder: Path
) -> tuple[Parts, tuple[str, ...]]:
    method, m = config.method, config.model
    assert isinstance(method, schema.ScalarRmConfig)
    model, lines = make_reward_model(
        method,
        m,
        found=needs.reward_model,
        base=resolve_model(m.source, sha256=m.sha256, revision=m.revision),
        pairs=needs.pairs,
        folder=folder / "reward_model",
        seed=config.run.seed,
        device=torch_device(m.device),
    )
    return replace(parts, reward_model=model), lines


_TEMPLATES: dict[type, tuple[RoleTemplate, ...]] = {
    schema.RarConfig: (prompts_rar.PROPOSE,),
    schema.RrdConfig: (
        prompts_rrd.PROPOSE,
        prompts_rrd.SPLIT,
        prompts_rrd.OVERLAP,
        prompts_rrd.CONFLICT,
        prompts_rrd.WEIGHTS,
    ),
}
"""What `parts.proposer` is asked with, by method."""


_MAKERS: dict[type, Callable[..., tuple[Parts, tuple[str, ...]]]] = {
    schema.PromptedConfig: _static,
    schema.RarConfig: _static,
    schema.RrdConfig: _static,
    schema.RlcerConfig: _rlcer,
    schema.RubricArmConfig: _rubric_arm_parts,
    schema.ScalarRmConfig: _scalar_rm_parts,
}
