"""The shape of an evaluation's configuration; the numbers and their reasons stand in `configs/evaluation/`."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from racelab.configs.schema import (
    BackendConfig,
    EncoderConfig,
    JudgeConfig,
    LauncherConfig,
    RunBase,
    ServerConfig,
    TrackingConfig,
    refuse_what_launcher_cannot,
    refuse_what_local_cannot,
)
from racelab.configs.section import Count, Section

RACE_SUITE = ("gsm8k", "mbpp_plus", "bbh", "mmlu", "popqa", "gpqa", "zebralogic", "agieval")
"""The eight of RACE Table 4, in the order of its columns."""
RUBRIC_SUITE = ("rewardbench2", "judgebench")
"""RACE Table 5."""
BENCHMARKS = (*RACE_SUITE, "ifeval", *RUBRIC_SUITE)
"""All that there are."""

BenchmarkName = Literal[
    "gsm8k",
    "mbpp_plus",
    "bbh",
    "mmlu",
    "popqa",
    "gpqa",
    "zebralogic",
    "agieval",
    "ifeval",
    "rewardbench2",
    "judgebench",
]
Quirk = Literal[
    "gsm8k-unsigned",
    "article-a",
    "bbh-bare-letter",
    "zebralogic-number-cell",
    "token-override",
    "rewardbench2-any-credit",
    "judgebench-system-twice",
]
PROTOCOL_QUIRKS: tuple[Quirk, ...] = (
    "gsm8k-unsigned",
    "article-a",
    "bbh-bare-letter",
    "zebralogic-number-cell",
)
"""Those that are part of olmo3-adapt: its published scores have them. The others are accidents of one launcher."""
QUIRK_BENCHMARKS: dict[Quirk, tuple[BenchmarkName, ...]] = {
    "gsm8k-unsigned": ("gsm8k",),
    "article-a": ("mmlu", "gpqa", "agieval"),
    "bbh-bare-letter": ("bbh",),
    "zebralogic-number-cell": ("zebralogic",),
    "token-override": ("gsm8k", "gpqa", "bbh", "mmlu", "agieval"),
    "rewardbench2-any-credit": ("rewardbench2",),
    "judgebench-system-twice": ("judgebench",),
}
"""Quirk -> the benchmarks whose scores it changes."""


class SubjectConfig(Section):
    """The model under test."""

    source: str = Field(
        min_length=1,
        description="`embedded`, a model folder, a hub name, http://host/v1, or a run (id, name, path, `latest`).",
    )
    sha256: str | None
    revision: str | None
    checkpoint: int | None = Field(ge=0, description="A run's global step; null: its last checkpoint.")
    engine: Literal["auto", "fast", "plain", "vllm"]
    compute_dtype: Literal["bfloat16", "float32"]
    device: Literal["auto", "cpu", "cuda"]
    thinking: bool | None = Field(
        description="Let a model that can think do so; null: as its chat template has it."
    )
    max_length: Count | None = Field(description="Longest sequence; null: the model's own window.")


class DataPaths(Section):
    """A file or folder (.jsonl, .parquet, .csv) per benchmark; empty: from the hub."""

    gsm8k: str
    mbpp_plus: str
    bbh: str
    mmlu: str
    popqa: str
    gpqa: str
    zebralogic: str
    agieval: str
    ifeval: str
    rewardbench2: str
    judgebench: str


class CodeConfig(Section):
    """Limits of model-written code (MBPP+)."""

    timeout_s: Annotated[float, Field(gt=0.0)] = Field(description="Wall time.")
    cpu_s: Count
    memory_mb: Annotated[int, Field(ge=64)]
    file_mb: Count = Field(description="Of one file that it writes.")
    processes: Count
    workers: int = Field(ge=0, description="Programs at a time; 0: one per core.")


class SuiteConfig(Section):
    """What is asked, of how many examples, under which protocol."""

    suite: Literal["race", "ifeval", "rubric"]
    protocol: Literal["olmo3-adapt", "lm-eval"]
    benchmarks: tuple[BenchmarkName, ...] = Field(min_length=1)
    limit: Count | None = Field(
        description="Examples of each benchmark, from its domains in turns; null: all."
    )
    batch: Count = Field(description="Examples decoded together on this machine.")
    max_tokens: Count | None = Field(
        description="No answer is longer, whatever the task; null: no further bound."
    )
    budgets: dict[BenchmarkName, Count] = Field(description="The same for single benchmarks.")
    thinking: Literal["protocol", "strip", "keep"] = Field(
        description="What is scored: as each task has it, after the thinking block everywhere, or with it everywhere."
    )
    think_end: str = Field(min_length=1, description="The tag that closes a thinking block.")
    quirks: tuple[Quirk, ...] | None = Field(description="null: those that are the protocol's own.")
    rater: Literal["rubric", "reward-model"] = Field(
        description="rubric suite: the model writes a rubric and the judge scores under it, or is a reward model."
    )
    judgebench_split: Literal["gpt", "claude"] = Field(
        description="Whose answers JudgeBench's pairs are: of GPT-4o (RACE Table 5), or of Claude 3.5 Sonnet."
    )
    code: CodeConfig
    data: DataPaths

    @property
    def in_force(self) -> frozenset[Quirk]:
        """The quirks that hold."""
        own = PROTOCOL_QUIRKS if self.protocol == "olmo3-adapt" else ()
        return frozenset(own if self.quirks is None else self.quirks)

    def budget(self, benchmark: BenchmarkName) -> int | None:
        """Tokens of an answer; None: as the task has it."""
        found = [n for n in (self.max_tokens, self.budgets.get(benchmark)) if n is not None]
        return min(found, default=None)


class EvalRubricConfig(Section):
    """How the model under test writes a rubric (rubric suite).

    `auto`: as the run was trained, else lines for the embedded model and json for others.
    """

    format: Literal["auto", "lines", "json"]
    max_tokens: Count
    temperature: Annotated[float, Field(ge=0.0)]
    top_p: Annotated[float, Field(gt=0.0, le=1.0)]
    retry_temperatures: tuple[Annotated[float, Field(ge=0.0)], ...] = Field(
        description="JudgeBench asks at these in turn until a rubric is valid; the last one is used anyway."
    )


class EvalRunConfig(Section):
    """A whole evaluation."""

    run: RunBase
    subject: SubjectConfig
    eval: SuiteConfig
    rubric: EvalRubricConfig
    judge: JudgeConfig
    encoder: EncoderConfig
    server: ServerConfig = Field(description="How a model under test behind a URL is asked.")
    backend: BackendConfig
    launcher: LauncherConfig
    tracking: TrackingConfig

    @property
    def budget(self) -> int:
        """Benchmarks."""
        return len(self.eval.benchmarks)

    def facts(self) -> dict[str, object]:
        """What a list of runs tells them apart by."""
        return {
            "paper": "race",
            "method": "eval",
            "variant": self.eval.suite,
            "preset": "",
            "suite": self.eval.suite,
            "protocol": self.eval.protocol,
            "subject": self.subject.source,
            "seed": self.run.seed,
            "policy_updates": None,
        }

    @property
    def title(self) -> str:
        """Of an evaluation that nobody has named; without the seed."""
        return (
            f"eval-{self.eval.suite}-{re.sub('[^A-Za-z0-9.]+', '-', self.subject.source)[-40:].strip('-.')}"
        )

    @model_validator(mode="after")
    def _cross(self) -> EvalRunConfig:
        refuse_what_local_cannot(self.backend)
        refuse_what_launcher_cannot(self.launcher, self.backend)
        e = self.eval
        rated = [name for name in e.benchmarks if name in RUBRIC_SUITE]
        if rated and e.suite != "rubric":
            raise ValueError(f"{', '.join(rated)} rates answers: it belongs to --suite rubric, not {e.suite}")
        if e.suite == "rubric" and len(rated) < len(e.benchmarks):
            other = next(name for name in e.benchmarks if name not in rated)
            raise ValueError(f"{other} asks for answers: it does not belong to --suite rubric")
        if len(set(e.benchmarks)) < len(e.benchmarks):
            raise ValueError(f"eval.benchmarks {', '.join(e.benchmarks)} names one twice")
        if e.rater == "reward-model" and e.suite != "rubric":
            raise ValueError("eval.rater=reward-model is for --suite rubric; a reward model answers nothing")
        if e.protocol == "lm-eval" and e.suite == "rubric":
            raise ValueError("eval.protocol=lm-eval has no rubric suite; leave it out")
        if e.protocol == "lm-eval" and (e.quirks or e.thinking != "protocol"):
            raise ValueError("eval.quirks and eval.thinking are olmo3-adapt's; lm-eval scores as it does")
        return self
