"""The shape of an RLDS run's configuration; what it shares with RACE comes from `schema.py`.

The numbers and their reasons stand in `configs/rlds/`: task/*.yaml, method/rlds.yaml, condition/*.yaml and
the presets.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from racelab.configs.refusals_rlds import refuse_what_grid_cannot, refuse_what_the_reflector_cannot
from racelab.configs.schema import (
    ApiConfig,
    BackendConfig,
    CheckpointConfig,
    Config,
    EvalConfig,
    LauncherConfig,
    LearnerConfig,
    ModelConfig,
    RunBase,
    TrackingConfig,
    refuse_what_launcher_cannot,
    refuse_what_local_cannot,
)
from racelab.configs.schema_eval import EvalRunConfig
from racelab.configs.section import Count, Fraction, NonNegative, Positive, Section

TASKS = ("frozenlake", "hotpotqa", "scienceworld", "deepresearch")
"""In the order of the paper's tables."""

TopP = Annotated[float, Field(gt=0.0, le=1.0)]


class RldsRunSection(RunBase):
    """What to run, how long, where it lands."""

    updates: Count = Field(description="Budget: updates of the policy.")
    epochs: Count | None = Field(
        description="Passes over the training examples: the run ends there if that comes before `updates`."
    )
    transcripts_every: Count = Field(description="Keep whole transcripts of every n-th step.")


class GridConfig(Section):
    """The small FrozenLake transformer over grid tokens (engine=grid), and its warm-up on random walks."""

    width: Count
    layers: Count
    heads: Count
    warmup_steps: int = Field(ge=0, description="Updates of supervised warm-up; 0: random weights.")
    warmup_batch: Count
    warmup_lr: Positive

    @model_validator(mode="after")
    def _divides(self) -> GridConfig:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        return self


class RldsModelConfig(ModelConfig):
    """The trained model: actor, grader and reflector share its weights (RLDS §3.2)."""

    engine: Literal["auto", "fast", "plain", "grid"]  # type: ignore[assignment]
    grid: GridConfig | None = Field(default=None, description="engine=grid only.")

    @model_validator(mode="after")
    def _grid(self) -> RldsModelConfig:
        if (self.engine == "grid") != (self.grid is not None):
            raise ValueError("model.engine=grid and the block model.grid go together; choose model=grid")
        return self


class GroupSizes(Section):
    """G, so that both kinds of condition have the same token budget a step (RLDS §4)."""

    scalar: int = Field(ge=2, description="Rollouts without retries (rlvr).")
    reflect: int = Field(ge=2, description="Originals where retries come on top.")


class TaskCommon(Section):
    """What every task has."""

    train_examples: Count
    validation_examples: Count
    data_seed: int = Field(ge=0, description="Of the examples; the same for every run.seed.")
    prompts_per_step: Count = Field(description="Task instances (groups) of an update.")
    group_sizes: GroupSizes
    max_turns: Count
    max_prompt_tokens: Count = Field(
        description="Of the conversation before the first reply. This and the next two say nothing to model=grid: its "
        "prompt is the board, its turn one token."
    )
    max_response_tokens: Count = Field(
        description="Of a whole episode after the prompt, observations included."
    )
    max_turn_tokens: Count = Field(description="Of one reply.")
    temperature: Positive
    top_p: TopP
    demonstration: bool = Field(
        description="Worked examples as turns of the conversation before the first observation (ours; none in the "
        "paper), for models too small to follow a format from its description."
    )


class FrozenLakeTask(TaskCommon):
    """RLDS App. D.1."""

    name: Literal["frozenlake"]
    sizes: tuple[Annotated[int, Field(ge=2, le=16)], ...] = Field(min_length=1)
    frozen_probability: tuple[Fraction, Fraction]
    min_path: Count
    max_path: Count
    slippery: Literal[False] = Field(description="The paper's boards are not.")
    boards: str = Field(description="Empty: generated; or a .jsonl file of boards (fixed evaluation).")

    @model_validator(mode="after")
    def _ranges(self) -> FrozenLakeTask:
        if self.min_path > self.max_path:
            raise ValueError(f"min_path {self.min_path} is above max_path {self.max_path}")
        low, high = self.frozen_probability
        if low > high:
            raise ValueError(f"frozen_probability [{low}, {high}] is empty")
        return self


class RetrieverConfig(Section):
    """Where passages come from."""

    url: str = Field(description="A server that speaks Search-R1's API; empty: in this process.")
    corpus: str = Field(description="In this process: `package`, or a .jsonl file in Search-R1's format.")
    engine: Literal["bm25", "dense"]
    encoder: str = Field(min_length=1, description="dense: minilm, a folder or a hub name.")
    timeout_s: Positive
    max_retries: int = Field(ge=0)
    concurrency: Count


class HotpotQaTask(TaskCommon):
    """RLDS App. D.2."""

    name: Literal["hotpotqa"]
    data: str = Field(
        min_length=1, description="`package`, a .json/.jsonl file (either schema), or a hub name."
    )
    question_types: tuple[Literal["bridge", "comparison"], ...] = Field(
        description="Only questions of these types (HotpotQA's field `type`); empty: all."
    )
    default_top_k: Count
    max_top_k: Count
    result_chars: Count = Field(description="Cap of one passage.")
    total_chars: Count = Field(description="Cap of one call.")
    f1_threshold: Fraction
    official_yes_no: bool = Field(
        description="The official rule: yes, no and noanswer match exactly or not at all."
    )
    retriever: RetrieverConfig


class ScienceWorldTask(TaskCommon):
    """RLDS App. D.3."""

    name: Literal["scienceworld"]
    split: Literal["variations", "tasks"] = Field(
        description="variations: per-task train/dev; tasks: 17/13 tasks."
    )
    variation_share: Annotated[float, Field(gt=0.0, le=1.0)]
    train_tasks: tuple[str, ...] = Field(description="split=tasks: trained on; the others are held out.")
    simplification: str
    jvms: Count = Field(description="Simulators that run at once, one episode each.")
    heap_mb: Annotated[int, Field(ge=128)]
    step_timeout_s: Positive
    repeat_limit: Annotated[int, Field(ge=2)] = Field(
        description="The same action so many times ends the episode."
    )
    stagnant_factor: Fraction
    no_experiment_factor: Fraction
    no_experiment_from: Fraction
    reasoning_penalty: NonNegative
    diversity_bonus: NonNegative


class ToolServerConfig(Section):
    """The Serper-compatible service."""

    url: str = Field(description="Empty: `replay` in this process; else the base URL.")
    scrape_url: str = Field(description="Host of the scrape endpoint; empty: `url`.")
    key_env: str = Field(description="Environment variable that holds the key; empty: none.")
    concurrency: Count
    fetch_concurrency: Count = Field(description="read_paper runs here, under a semaphore of its own.")
    timeout_s: Positive
    max_retries: int = Field(ge=0)
    backoff_s: Positive
    cache_entries: Count
    page_chars: Count
    pdf_mb: Positive
    allow_hosts: tuple[str, ...] = Field(
        description="Hosts (or host:port) that pages may be fetched from although they are private or at other ports."
    )


class DeepResearchTask(TaskCommon):
    """RLDS App. D.4."""

    name: Literal["deepresearch"]
    data: str = Field(min_length=1, description="`package`, `hub` (the five sources), or a .jsonl file.")
    tools: ToolServerConfig
    judge: ApiConfig = Field(
        description="The rubric judge; base_url=replay: a stand-in in this process, without model, key and cache."
    )
    judge_timeout_s: Positive
    reward_weights: tuple[NonNegative, NonNegative, NonNegative, NonNegative] = Field(
        description="rubric, citation, format, search"
    )
    citation_f1: bool
    solved_from: Fraction = Field(description="r_rubric from which an episode counts as solved (ours).")
    length_penalty: NonNegative = Field(description="Largest penalty; 0: off.")
    length_soft: Count
    length_hard: Count


TaskConfig = Annotated[
    FrozenLakeTask | HotpotQaTask | ScienceWorldTask | DeepResearchTask, Field(discriminator="name")
]


class SdaeConfig(Section):
    """Subtask-Decomposed Advantage Estimation (RLDS §3.3)."""

    kernel: Literal["gaussian", "none"] = Field(description="none: stage 2's broadcast.")
    kernel_sigma: Positive = Field(description="In turns.")
    eps: Positive
    skip_flat: bool = Field(description="Groups with equal rewards get no advantage (in GRPO they never do).")
    phi_eta: Fraction = Field(description="Step of the dynamic φ (§6); 0: the static weights exactly.")
    phi_prior: Positive = Field(description="Strength of its Dirichlet prior, in observations.")
    null_draws: int = Field(ge=0, description="Permutations of the null of the diagnostics; 0: none.")
    null_every: Count = Field(description="Steps between two nulls.")


class ReflectConfig(Section):
    """Self-grading, reflection and retries (RLDS §3.2, App. B and E)."""

    max_retries: int = Field(ge=0, description="The paper's R; 0: no retries.")
    failure_share: Fraction = Field(description="Share of a group's failures that are retried, rounded up.")
    placement: Literal["system_prompt", "user_turn"]
    memory: int = Field(ge=0, description="Earlier suggestions shown to the reflector.")
    contrastive: bool = Field(description="Show the best sibling to the reflector.")
    max_tokens: Count = Field(
        description="Of a grading or a reflection; in a form, of its suggestion alone (48 at most). What is scripted "
        "or random writes nothing: this and the next two do not matter to it."
    )
    temperature: Positive
    top_p: TopP


class AuxiliaryConfig(Section):
    """L_aux: weighted negative log-likelihoods of good reflections and retries (RLDS §3.2, App. B)."""

    reflect_coef: NonNegative
    retry_coef: NonNegative
    max_pairs: Count = Field(description="Of each kind a step, by reward delta.")


class RldsMethodConfig(Section):
    """RLDS and what it is compared with. `condition` only names what the other keys do (configs/rlds/condition)."""

    name: Literal["rlds"]
    condition: Literal[
        "rlvr", "base-reflection", "rlds", "rlds-random-grades", "rlds-no-kernel", "rlds-no-aux"
    ]
    group_size: int = Field(ge=2)
    advantage: Literal["grpo", "sdae"]
    advantage_eps: Positive
    grading: Literal["off", "two_pass", "single_pass"] = Field(
        description="two_pass: grades, then a reflection that reads them; single_pass: a reflection without grades."
    )
    grader: Literal["policy", "form", "scripted", "random"] = Field(
        description="policy: the trained model itself; form: the trained model fills in a form (one too small to write "
        "JSON); scripted: a program that knows the solution (frozenlake); random: uniform grades and pivots, the "
        "reflector stays that of `reflector`."
    )
    reflector: Literal["policy", "form", "scripted"] = Field(description="As for `grader`.")
    loss_aggregation: Literal["token_mean", "sequence_mean"]
    mask_prefix: Literal["retries", "both"] = Field(
        description="Whose shared prefix is masked: the retry's, or the failed original's too (R3L's code)."
    )
    sdae: SdaeConfig
    reflect: ReflectConfig
    auxiliary: AuxiliaryConfig
    opmd_baseline: bool = Field(
        description="As RLDS §2.1 has R3L's: the baseline of a group is the mean of its originals."
    )
    positive_amplification: Annotated[float, Field(ge=1.0)] = Field(
        description="As RLDS §2.1 has R3L's: positive advantages of retries are multiplied by it; 1: off."
    )
    prompt_rewrite: bool = Field(
        description="ERL: the reflection replaces the system prompt; retries start at turn 0."
    )

    @property
    def variant_name(self) -> str:
        """RLDS has conditions instead."""
        return ""

    @property
    def grades(self) -> bool:
        """Whether rollouts are graded."""
        return self.grading == "two_pass"

    @property
    def shows_grades(self) -> bool:
        """Whether the reflector reads the grades: random ones would spoil its report, and the retry with it."""
        return self.grades and self.grader != "random"

    @model_validator(mode="after")
    def _fits(self) -> RldsMethodConfig:
        if self.advantage == "sdae" and self.grading != "two_pass":
            raise ValueError(
                f"advantage=sdae needs grades, which grading={self.grading} does not give; set grading=two_pass"
            )
        if self.reflect.max_retries and self.grading == "off":
            raise ValueError(
                "reflect.max_retries is above 0, but grading=off writes no reflections; set grading=two_pass or "
                "single_pass"
            )
        if self.prompt_rewrite and self.reflector != "policy":
            raise ValueError("prompt_rewrite needs a model that writes prompts; set reflector=policy")
        return self


class RldsValidation(Section):
    """The fixed validation slice, before, during and after training."""

    every: int = Field(ge=0, description="Updates between two; 0: only before and after.")
    examples: Count | None = Field(description="The first n of the slice; null: all.")
    temperature: NonNegative = Field(description="0: greedy.")
    bootstrap: Count


class RldsRunConfig(Section):
    """A whole RLDS run."""

    preset: str
    run: RldsRunSection
    task: TaskConfig
    method: RldsMethodConfig
    model: RldsModelConfig
    learner: LearnerConfig
    validation: RldsValidation
    eval: EvalConfig
    backend: BackendConfig
    launcher: LauncherConfig
    tracking: TrackingConfig
    checkpoint: CheckpointConfig

    @property
    def budget(self) -> int:
        """Updates of the policy: `run.updates`, or fewer where `run.epochs` ends before."""
        if self.run.epochs is None:
            return self.run.updates
        whole = self.run.epochs * self.task.train_examples // self.task.prompts_per_step
        return min(self.run.updates, max(1, whole))

    def facts(self) -> dict[str, object]:
        """What a list of runs tells them apart by."""
        return {
            "paper": "rlds",
            "method": self.method.name,
            "variant": "",
            "task": self.task.name,
            "condition": self.method.condition,
            "preset": self.preset,
            "seed": self.run.seed,
            "policy_updates": self.budget,
        }

    @property
    def title(self) -> str:
        """Of a run that nobody has named; without the seed."""
        return f"{self.task.name}-{self.method.condition}-{self.preset}"

    @model_validator(mode="after")
    def _cross(self) -> RldsRunConfig:
        refuse_what_local_cannot(self.backend)
        refuse_what_launcher_cannot(self.launcher, self.backend)
        t, m = self.task, self.method
        if t.prompts_per_step > t.train_examples:
            raise ValueError(
                f"task.prompts_per_step={t.prompts_per_step} is above task.train_examples={t.train_examples}"
            )
        reads = not {"policy", "form"}.isdisjoint((m.grader, m.reflector))
        if self.model.engine == "grid" and (t.name != "frozenlake" or reads):
            raise ValueError(
                "model=grid plays FrozenLake only, and cannot write: set task=frozenlake, method.grader=scripted and "
                "method.reflector=scripted, or choose model=smollm2-135m"
            )
        if self.model.engine == "grid":
            refuse_what_grid_cannot(self)
        refuse_what_the_reflector_cannot(m)
        if "scripted" in (m.grader, m.reflector) and t.name != "frozenlake":
            raise ValueError(
                f"the scripted grader and reflector know FrozenLake only, not task={t.name}; set method.grader=policy "
                "and method.reflector=policy, or both to form"
            )
        if self.learner.minibatches > t.prompts_per_step:
            raise ValueError("learner.minibatches is above the number of groups of a step")
        return self


TrainConfig = Config | RldsRunConfig
"""Of a run that trains."""
AnyConfig = TrainConfig | EvalRunConfig
"""Of any family of runs."""
