"""DeepResearch as a task: prompts with rubrics, tools, judge, texts, environment (RLDS App. C.4 and D.4).

With `tools.url: ""` the search service, and with `judge.base_url: replay` the judge too, is a replay server of this
process (`replay_server.py`), started here and stopped by `close`. Then nothing beyond this machine is asked.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from racelab.configs.schema import ApiConfig
from racelab.configs.schema_rlds import DeepResearchTask, ToolServerConfig
from racelab.experiments.data.instances import instances_digest
from racelab.experiments.episodes import Instance, Subtask
from racelab.experiments.errors import ConfigError, MissingDependencyError, UnreachableError
from racelab.experiments.models.api import ApiModel, api_settings
from racelab.experiments.models.chat import Calls
from racelab.experiments.tasks.deepresearch import texts
from racelab.experiments.tasks.deepresearch.data import TASK, load_pool, split
from racelab.experiments.tasks.deepresearch.env import DeepResearchEnv, Rules
from racelab.experiments.tasks.deepresearch.faults import Deadline, FaultError, Patience, new_counter
from racelab.experiments.tasks.deepresearch.guard import Guard, literals_only
from racelab.experiments.tasks.deepresearch.recordings import HOST, PACKAGE_FILE
from racelab.experiments.tasks.deepresearch.replay_judge import NAME as REPLAY_JUDGE
from racelab.experiments.tasks.deepresearch.replay_server import ReplayServer
from racelab.experiments.tasks.deepresearch.rubric_judge import RubricJudge
from racelab.experiments.tasks.deepresearch.schemas import TOOLS
from racelab.experiments.tasks.deepresearch.taxonomy import SUBTASKS
from racelab.experiments.tasks.hermes import STOP

REPLAY: Final = "replay"
_PACKAGES: Final = ("httpx", "openai", "pypdf", "trafilatura", "lxml_html_clean", "markdownify")


class DeepResearch:
    """Implements `ports.Task`."""

    def __init__(self, config: DeepResearchTask) -> None:
        """Reads the prompts, opens client and judge, and asks each of them once.

        Args:
            config: the section `task`.

        Raises:
            ConfigError: too few prompts, or something in the sections `tools` and `judge` that cannot work.
            DataError: of the prompts.
            MissingDependencyError: a package is not installed.
            UnreachableError: no key, or the search service, the judge or the hub does not answer or refuses it.
        """
        self.name = TASK
        self.subtasks: tuple[Subtask, ...] = SUBTASKS
        self.tools: tuple[Mapping[str, Any], ...] = TOOLS
        self.concurrency: int | None = None
        self.stops: tuple[str, ...] = (STOP, "</answer>")
        self._config = config
        _check_packages()
        pool = load_pool(config.data)
        self._train, self._validation = split(
            pool, train=config.train_examples, validation=config.validation_examples, seed=config.data_seed
        )
        self._left_out = pool.left_out
        self._seen = Calls()
        self._rules = _rules(config)
        _check_urls(config.tools)
        key = _key(config.tools)
        self.server: ReplayServer | None = None
        """The replay server, where there is one; tests make it misbehave."""
        try:
            self._open(config, key)
        except BaseException:
            self.close()
            raise

    @property
    def demonstration(self) -> tuple[tuple[str, str], ...]:
        """One search and a cited answer, if the config asks for it."""
        return texts.DEMONSTRATION if self._config.demonstration else ()

    def train(self) -> Sequence[Instance]:
        """`task.train_examples` prompts."""
        return self._train

    def validation(self) -> Sequence[Instance]:
        """`task.validation_examples` prompts, none of which is trained on."""
        return self._validation

    def system_prompt(self, addition: str = "") -> str:
        """Ours; the addition, if there is one, ends it."""
        return texts.system_prompt(addition)

    def open(self, instance: Instance) -> DeepResearchEnv:
        """A fresh episode.

        Raises:
            UnreachableError: the judge answers nobody any more; without it every reward would be wrong.
        """
        if self._judge.gone:
            raise UnreachableError(f"the rubric judge is gone: {self._judge.gone}")
        return DeepResearchEnv(instance, self._toolbox, self._judge, self._rules)

    def metrics(self) -> Mapping[str, float]:
        """Calls by tool, faults by kind, the cache, and the judge's calls since the last time."""
        calls = self._judge.model.calls
        new, self._seen = calls - self._seen, calls
        judge = {
            "judge/made": new.made,
            "judge/failed": new.failed,
            "judge/retried": new.retried,
            "judge/cached": new.cached,
        }
        return self._toolbox.metrics() | {name: float(n) for name, n in judge.items()}

    def describe(self) -> dict[str, object]:
        """Data, services and settings that decide the scores (JSON values); no key is in it."""
        tools = self._config.tools
        replay = {"recordings": _digest(PACKAGE_FILE)} if self.server is not None else {}
        judge: dict[str, object] = self._judge.describe()
        if self._config.judge.base_url == REPLAY:
            judge["model"] = {
                "kind": REPLAY_JUDGE,
                "stand_in": "compares words with the rubric; not a language model",
            }
        return {
            "task": self.name,
            "data": self._config.data,
            "data_digest": instances_digest([*self._validation, *self._train]),
            "left_out": dict(self._left_out),
            "tools": {"url": tools.url or REPLAY, "page_chars": tools.page_chars, "pdf_mb": tools.pdf_mb}
            | replay,
            "judge": judge,
            "reward_weights": list(self._config.reward_weights),
        }

    def close(self) -> None:
        """Closes the connections and stops the replay server. May be called twice."""
        toolbox = getattr(self, "_toolbox", None)
        if toolbox is not None:
            toolbox.close()
        if self.server is not None:
            self.server.close()

    def _open(self, config: DeepResearchTask, key: str) -> None:
        from racelab.experiments.tasks.deepresearch.fetch import Fetcher
        from racelab.experiments.tasks.deepresearch.serper import Serper
        from racelab.experiments.tasks.deepresearch.tools import Toolbox

        c = config.tools
        if not c.url or config.judge.base_url == REPLAY:
            self.server = ReplayServer()
        patience = Patience(c.max_retries, c.backoff_s)
        url = c.url or (self.server.url if self.server else "")
        serper = Serper(url, c.scrape_url, key, patience, timeout_s=c.timeout_s, concurrency=c.concurrency)
        if c.url or self.server is None:
            guard = Guard(c.allow_hosts)
        else:  # the recorded papers have a host name of their own; no other name is looked up
            guard = Guard(c.allow_hosts, {HOST: self.server.address}, literals_only)
        fetcher = Fetcher(guard, patience, timeout_s=c.timeout_s, pdf_bytes=int(c.pdf_mb * (1 << 20)))
        self._serper = serper
        self._toolbox = Toolbox(c, serper=serper, fetcher=fetcher, guard=guard)
        self._judge = _open_judge(config, self.server)
        self._preflight(url, key)
        self._seen = self._judge.model.calls

    def _preflight(self, url: str, key: str) -> None:
        """One search and one request to the judge: what would go wrong with every call is found before the run."""
        c = self._config.tools
        try:
            self._serper.search("test", "", "", Deadline.after(c.timeout_s), new_counter())
        except FaultError as fault:
            mend = (
                f"put a valid key into {c.key_env or 'a variable and name it in task.tools.key_env'}"
                if fault.kind == "4xx"
                else "correct task.tools.url, see to the server, or set task.tools.url= for the recorded one"
            )
            raise UnreachableError(f"{url}/search: {fault}; {mend}") from None
        self._judge.preflight()


def _check_packages() -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"task=deepresearch needs {', '.join(missing)}: pip install 'racelab[tasks]'"
        )


def _rules(config: DeepResearchTask) -> Rules:
    if config.length_penalty and config.length_soft >= config.length_hard:
        raise ConfigError(
            f"task.length_soft={config.length_soft} is not below task.length_hard={config.length_hard}; lower it"
        )
    return Rules(
        max_turns=config.max_turns,
        weights=config.reward_weights,
        solved_from=config.solved_from,
        length_penalty=config.length_penalty,
        length_soft=config.length_soft,
        length_hard=config.length_hard,
    )


def _check_urls(tools: ToolServerConfig) -> None:
    """Addresses are written into descriptions and logs, so no secret may stand in them."""
    for name, url in (("url", tools.url), ("scrape_url", tools.scrape_url)):
        try:
            parts = urllib.parse.urlsplit(url)
            good = not url or (parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0)
        except ValueError:  # a port that is no number, half a pair of brackets
            good = False
        if not good:
            raise ConfigError(f"task.tools.{name} is no http address; give one as https://google.serper.dev")
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigError(
                f"task.tools.{name} holds a user, a password or a query; leave them out, the key comes from "
                "task.tools.key_env"
            )


def _key(tools: ToolServerConfig) -> str:
    """The search service's key; "" where it wants none."""
    if not tools.key_env:
        return ""
    key = os.environ.get(tools.key_env, "").strip()
    if not key:
        raise UnreachableError(
            f"{tools.key_env} is not set, so the search service cannot be asked; export its key, set "
            "task.tools.key_env= if it wants none, or task.tools.url= for the recorded one"
        )
    if not re.fullmatch(r"[!-~]+", key):  # it goes into an HTTP header
        raise ConfigError(f"{tools.key_env} holds spaces or signs that no key has; export it again")
    return key


def _open_judge(config: DeepResearchTask, server: ReplayServer | None) -> RubricJudge:
    judge: ApiConfig = config.judge
    settings = api_settings(judge)
    if judge.base_url == REPLAY and server is not None:
        settings = replace(
            settings, base_url=f"{server.url}/v1", model=REPLAY_JUDGE, key_env="", cache_dir=None
        )
    return RubricJudge(
        ApiModel(settings),
        max_tokens=judge.max_tokens,
        temperature=judge.temperature,
        timeout_s=config.judge_timeout_s,
        citation_f1=config.citation_f1,
        places=max(1, judge.concurrency // 2),  # an episode has two requests
    )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
