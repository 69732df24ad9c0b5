"""Words of an evaluation that would change nothing: an option that cannot be honoured is an error, never ignored.

Only words can be told so. A value of a config that is read back, or of a file of the user's, may stand there for other
evaluations, as may a word that is shared by several models under test and heard by one of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from racelab.configs.schema import LikelihoodJudgeConfig
from racelab.configs.schema_eval import QUIRK_BENCHMARKS, EvalRunConfig

URL: Final = re.compile(r"https?://", re.IGNORECASE)
"""How the name of a model under test begins that stands behind a server."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the words are about: the config, and where the models under test are."""

    config: EvalRunConfig
    all_served: bool
    none_served: bool

    @property
    def rubric(self) -> bool:
        """Whether answers are rated."""
        return self.config.eval.suite == "rubric"

    @property
    def reward_model(self) -> bool:
        """Whether a scalar head rates them."""
        return self.rubric and self.config.eval.rater == "reward-model"

    @property
    def stock(self) -> bool:
        """Whether lm-eval asks and scores."""
        return self.config.eval.protocol == "lm-eval"

    def asks(self, *benchmarks: str) -> bool:
        """Whether one of them is asked."""
        return not set(benchmarks).isdisjoint(self.config.eval.benchmarks)


@dataclass(frozen=True, slots=True)
class Rule:
    """Keys that say nothing under a condition.

    Attributes:
        keys: each with all that is below it.
        idle: whether they say nothing.
        why: the reason and the mend.
    """

    keys: tuple[str, ...]
    idle: Callable[[Asked], bool]
    why: str


_JUDGING: Final = ("judge", "rubric", "encoder")
_ANSWERING: Final = ("eval.batch", "eval.max_tokens", "eval.budgets", "subject.engine", "subject.thinking")
_LEAVE: Final = "leave it out"
_VALUES: Final = ("eval.budgets",)  # mappings that are one value

RULES: Final = (
    Rule(
        (*_JUDGING, "eval.rater", "eval.judgebench_split"),
        lambda a: not a.rubric,
        "only the rubric suite has judges and rubrics; add --suite rubric, or leave it out",
    ),
    Rule(
        (*_JUDGING, *_ANSWERING),
        lambda a: a.reward_model,
        f"a reward model writes nothing, and asks no judge (eval.rater=reward-model); {_LEAVE}",
    ),
    Rule(
        ("encoder",),
        lambda a: a.rubric and not isinstance(a.config.judge, LikelihoodJudgeConfig),
        f"only judge=likelihood has an encoder; {_LEAVE}",
    ),
    Rule(
        ("rubric.retry_temperatures",),
        lambda a: not a.asks("judgebench"),
        f"only judgebench asks for a rubric again; {_LEAVE}, or add judgebench to --benchmarks",
    ),
    Rule(
        ("rubric.temperature",),
        lambda a: not a.asks("rewardbench2") and bool(a.config.rubric.retry_temperatures),
        "judgebench asks at rubric.retry_temperatures; set those",
    ),
    Rule(
        ("eval.judgebench_split",),
        lambda a: not a.asks("judgebench") or bool(a.config.eval.data.judgebench),
        f"it is a split of judgebench's data on the hub, which are not read here; {_LEAVE}",
    ),
    Rule(
        ("backend.name",),
        lambda a: a.config.backend.name != "local",
        "checkpoints are evaluated on this machine (backend=local), in vLLM with subject.engine=vllm; or serve the "
        "model elsewhere and give its URL",
    ),
    Rule(
        ("subject.compute_dtype", "eval.batch"),
        lambda a: a.all_served,
        f"the model under test stands behind a URL, and its server decides this; {_LEAVE} (server.concurrency bounds "
        "the questions under way)",
    ),
    Rule(
        ("server",),
        lambda a: a.none_served,
        "the model under test is asked on this machine; leave it out, or give the server's URL as the model",
    ),
    Rule(
        ("eval.code",),
        lambda a: not a.asks("mbpp_plus"),
        f"only mbpp_plus runs what the model wrote; {_LEAVE}, or add mbpp_plus to --benchmarks",
    ),
    Rule(
        ("eval.code.workers",),
        lambda a: a.stock,
        f"lm-eval's tasks run one program at a time; {_LEAVE}",
    ),
    Rule(
        ("eval.thinking", "eval.think_end"),
        lambda a: a.rubric,
        f"the rubric suite takes thinking out of rubrics and replies, at <think> and </think>; {_LEAVE}",
    ),
    Rule(
        ("eval.thinking", "eval.think_end", "eval.quirks"),
        lambda a: a.stock,
        f"eval.quirks and eval.thinking are olmo3-adapt's; lm-eval scores as it does; {_LEAVE}",
    ),
)
"""Looked through in order."""


def refuse_idle(
    words: Sequence[str],
    config: EvalRunConfig,
    sources: Sequence[str] = (),
    origins: Mapping[str, str] | None = None,
) -> None:
    """Refuses words that change nothing.

    Args:
        words: `key=value`, as they were composed.
        config: that came of them.
        sources: of all models under test that the words are meant for; (): the config's own.
        origins: word -> the option that it was made from, for the message.

    Raises:
        ConfigError: one line per word.
    """
    from racelab.experiments.errors import ConfigError

    served = [bool(URL.match(source)) for source in sources or (config.subject.source,)]
    asked = Asked(config, all(served), not any(served))
    found: dict[str, None] = {}
    for word in words:
        why = next((why for key in _keys(word) if (why := idle(key, asked))), "")
        if why:
            found[f"{(origins or {}).get(word, word)}: changes nothing here: {why}"] = None
    if found:
        raise ConfigError("\n".join(found))


def idle(key: str, asked: Asked) -> str:
    """Why a key that was typed changes nothing, with the mend; "" if it may change something."""
    for rule in RULES:
        if any(key == mine or key.startswith(f"{mine}.") for mine in rule.keys) and rule.idle(asked):
            return rule.why
    return _of_benchmarks(key, asked)


def _of_benchmarks(key: str, asked: Asked) -> str:
    """The same for keys that name benchmarks, or what belongs to some."""
    e = asked.config.eval
    if key.startswith("eval.data."):
        name = key.rpartition(".")[2]
        return "" if asked.asks(name) else _unasked(name)
    if key == "eval.budgets":
        return next((_unasked(name) for name in e.budgets if not asked.asks(name)), "")
    if key == "eval.quirks":
        for quirk in e.quirks or ():
            if not asked.asks(*QUIRK_BENCHMARKS[quirk]):
                return (
                    f"{quirk} is of {', '.join(QUIRK_BENCHMARKS[quirk])}, not asked here; leave {quirk} out"
                )
    return ""


def _unasked(name: str) -> str:
    return f"{name} is not asked; leave it out, or add {name} to --benchmarks"


def _keys(word: str) -> Iterator[str]:
    """The keys that a word sets: its own, of the choice of a backend its name, of a block `{...}` all inside."""
    import yaml

    key, _, value = word.lstrip("+").partition("=")
    if not value.startswith("{"):
        yield "backend.name" if key == "backend" else key
        return
    try:
        yield from _leaves(key, yaml.safe_load(value))
    except yaml.YAMLError:  # Hydra has read it, as something else; which keys it sets is not known
        yield key


def _leaves(key: str, value: object) -> Iterator[str]:
    if key in _VALUES or not isinstance(value, dict):
        yield key
        return
    for name, inner in value.items():
        yield from _leaves(f"{key}.{name}", inner)
