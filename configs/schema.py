"""The shape of every run's configuration, checked before anything heavy is imported.

Values come from the YAML files beside this module; the reason for each value stands there. Fields without a
default must be given by a YAML file, so that no number hides in code. All models are frozen and refuse unknown
keys. Rules that tie keys together stand in the validators; what cannot be reached at run time (targets, thresholds)
is judged by `check.py`.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=1)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """A frozen block of keys; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class RunConfig(Section):
    """What to run, how long, where it lands."""

    name: str = Field(
        description="Name of the run; empty: made from method, variant and seed.", max_length=80
    )
    root: str = Field(description="Folder of all runs; empty: $RACELAB_HOME/runs, else ./runs.")
    seed: int = Field(ge=0, lt=2**31)
    policy_updates: Count = Field(description="Budget: policy steps. Rubric steps come on top (RACE App. D).")
    max_steps: int | None = Field(
        ge=1, description="Hard limit on policy and rubric steps together; null: none."
    )
    threads: int = Field(ge=0, description="CPU threads of the compute library; 0: all cores.")
    samples_every: Count = Field(
        description="Keep generated texts of every n-th step in the `samples` table."
    )

    @field_validator("name")
    @classmethod
    def _file_name(cls, name: str) -> str:
        """The rule of run folders, said before anything is loaded."""
        if name and (".." in name or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._=+@,-]*", name)):
            raise ValueError(
                f"{name!r} cannot be used; take letters, digits and . _ = + @ , - without '..', "
                "starting with a letter or digit"
            )
        return name


class ModelConfig(Section):
    """The trained model: policy and rubric generator share its weights (RACE §5)."""

    source: str = Field(
        min_length=1, description="smollm2-135m (ships with the setup), a folder, or a hub name."
    )
    sha256: str | None = Field(
        description="Expected SHA-256 of the weights; null: whatever is found is recorded."
    )
    revision: str | None = Field(description="Hub revision; null: the default branch.")
    engine: Literal["auto", "fast", "plain"]
    compute_dtype: Literal["bfloat16", "float32"]
    device: Literal["auto", "cpu", "cuda"]
    train_from_layer: int = Field(ge=0, description="Layers below it stay frozen; 0 trains everything.")


class JudgeCommon(Section):
    """The frozen judge J of Eq 2."""

    source: str = Field(
        min_length=1, description="`policy`: the untrained policy, frozen; or as model.source."
    )
    sha256: str | None
    revision: str | None


class LikelihoodJudgeConfig(JudgeCommon):
    """Likelihood under the rubric and relevance to it (experiments/models/judge_likelihood.py)."""

    kind: Literal["likelihood"]
    calibration_prompts: Count = Field(description="Prompts whose base samples set the scales.")
    calibration_samples: Count
    slope: Positive
    floor: Annotated[float, Field(lt=0.0)]
    likelihood_weight: NonNegative
    relevance_weight: NonNegative
    cap: Positive
    topic_share: Fraction
    unfinished_factor: Fraction
    copy_free: Annotated[float, Field(ge=0.0, lt=1.0)]
    min_words: Count
    known_free: Count
    nothing_new: Fraction

    @model_validator(mode="after")
    def _weights(self) -> LikelihoodJudgeConfig:
        if self.likelihood_weight + self.relevance_weight == 0.0:
            raise ValueError(
                "likelihood_weight and relevance_weight are both 0: every response would score the same"
            )
        return self


class DigitJudgeConfig(JudgeCommon):
    """The expected digit of the model's next token, for models of 1 B parameters and more."""

    kind: Literal["digit"]
    low: int = Field(ge=0)
    high: int = Field(le=100)

    @model_validator(mode="after")
    def _order(self) -> DigitJudgeConfig:
        if self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}")
        return self


class JsonJudgeConfig(JudgeCommon):
    """A generated reply with a JSON score, for models of 1 B parameters and more."""

    kind: Literal["json"]
    high: Positive
    temperature: NonNegative
    top_p: Annotated[float, Field(gt=0.0, le=1.0)]
    thinking: bool
    max_tokens: Count


JudgeConfig = Annotated[
    LikelihoodJudgeConfig | DigitJudgeConfig | JsonJudgeConfig, Field(discriminator="kind")
]


class EncoderConfig(Section):
    """The frozen encoder of Eq 7."""

    source: str = Field(min_length=1)
    sha256: str | None
    revision: str | None
    pooling: Literal["mean", "last_token"]
    max_length: Count


class SamplingConfig(Section):
    """How one role samples."""

    max_tokens: Count
    temperature: Positive
    top_p: Annotated[float, Field(gt=0.0, le=1.0)]


class RubricConfig(SamplingConfig):
    """How the rubric role samples and what counts as a usable rubric (Eq 1)."""

    format: Literal["lines", "json"]
    min_criteria: Count
    max_criteria: Count
    on_parse_failure: Literal["nan", "raw_text"]
    drop_copied_examples: bool

    @model_validator(mode="after")
    def _order(self) -> RubricConfig:
        if self.min_criteria > self.max_criteria:
            raise ValueError(f"min_criteria {self.min_criteria} is above max_criteria {self.max_criteria}")
        return self


class RoutingConfig(Section):
    """Eqs 5-9. `mode`: full; sigma_zero drops only groups whose rewards are all equal; off trains on all."""

    mode: Literal["full", "sigma_zero", "off"]
    mask_uninformative: bool = Field(description="False: routed groups still train the policy (ablation).")
    sigma_rt: Fraction
    tau_tie: Fraction
    eps_tie: Positive
    d_tri: Fraction
    d_emb: Annotated[float, Field(ge=0.0, le=2.0)]


class PoolConfig(Section):
    """The rubric training pool (Eqs 10-11)."""

    capacity: Count
    min_pool: Count
    min_margin: Fraction
    fill: Literal["rubric_failed", "uniform"]

    @model_validator(mode="after")
    def _fits(self) -> PoolConfig:
        if self.min_pool > self.capacity:
            raise ValueError(
                f"min_pool {self.min_pool} is above capacity {self.capacity}: no phase could switch"
            )
        return self


class RubricRewardConfig(Section):
    """Eqs 15-16."""

    eps_norm: Positive
    clip: Positive
    denominator: Literal["sum", "max"]
    format_weight: NonNegative
    invalid_reward: float | None = Field(description="Reward of an unusable candidate rubric; null: NaN.")
    min_grounded: int = Field(
        ge=0, description="Criteria of a candidate that must share a word with the prompt."
    )

    @model_validator(mode="after")
    def _bounds(self) -> RubricRewardConfig:
        if self.invalid_reward is not None and not -self.clip <= self.invalid_reward <= self.clip:
            raise ValueError(
                f"invalid_reward {self.invalid_reward} lies outside [-clip, clip] = +-{self.clip}"
            )
        return self


class TrqcConfig(Section):
    """The target-rate quarantine controller, Eqs 18-20. Both gains 0: static thresholds."""

    q_target: Annotated[float, Field(gt=0.0, lt=1.0)]
    alpha_q: Annotated[float, Field(gt=0.0, le=1.0)]
    eta_sigma: NonNegative
    eta_tau: NonNegative
    eps_q: Positive
    calibrate_steps: int = Field(ge=0)


class PhaseConfig(Section):
    """Eqs 12-14 and 21-22: when to switch, and how the switching thresholds adapt."""

    mode: Literal["event", "fixed", "random"]
    fixed: tuple[Count, Count] = Field(description="Policy and rubric steps a phase under mode=fixed.")
    sigma_sw: Fraction
    mu_sat: Fraction
    alpha: Annotated[float, Field(gt=0.0, le=1.0)]
    tau_sat: Fraction
    window: Count
    tau_imp: float
    plateau_signal: Literal["s_rubric", "gain"]
    max_rubric_steps: int | None = Field(ge=1)
    policy_target: Count
    rubric_target: Count
    policy_window: Count
    rubric_window: Count
    eta_policy: NonNegative
    eta_rubric: NonNegative
    tau_sat_range: tuple[Fraction, Fraction]
    tau_imp_range: tuple[float, float]

    @model_validator(mode="after")
    def _ranges(self) -> PhaseConfig:
        for key, value, (low, high) in (
            ("tau_sat", self.tau_sat, self.tau_sat_range),
            ("tau_imp", self.tau_imp, self.tau_imp_range),
        ):
            if not low <= high:
                raise ValueError(f"{key}_range [{low}, {high}] is empty")
            if not low <= value <= high:
                raise ValueError(f"{key} {value} lies outside {key}_range [{low}, {high}]")
        if self.max_rubric_steps is not None and self.max_rubric_steps < 2 * self.window:
            raise ValueError(
                f"max_rubric_steps {self.max_rubric_steps} is below 2 x window = {2 * self.window}: "
                "no rubric phase could end by its plateau trigger"
            )
        return self


class MethodCommon(Section):
    """What every method of RACE's comparison has: Table 4 gives all of them the same data, judge and budget."""

    prompts_per_step: Count = Field(description="N, prompts of a policy step (Table 7: batch size).")
    group_size: int = Field(ge=2, description="G, responses per prompt and candidate rubrics per entry.")
    advantage_eps: Positive
    loss_normalisation: Literal["informative_groups", "token_mean", "over_all_groups"]
    response: SamplingConfig
    rubric: RubricConfig

    @property
    def variant_name(self) -> str:
        """The ablation; empty for methods that have none."""
        return ""

    @property
    def roles(self) -> tuple[str, ...]:
        """Sets of trained weights, the policy's first; empty: all roles share one set."""
        return ()


class TargetsConfig(Section):
    """One row of Table 16: (q*, L*, M*)."""

    q_target: Annotated[float, Field(gt=0.0, lt=1.0)]
    policy_target: Count
    rubric_target: Count


class SensitivityConfig(Section):
    """What the variants of Table 16 set; each preset has its own numbers."""

    short_phases: TargetsConfig
    low_quarantine: TargetsConfig


class RaceConfig(MethodCommon):
    """RACE (Algorithm 1). `variant` only names what the other keys do (configs/variant)."""

    name: Literal["race"]
    variant: Literal[
        "full",
        "no-gradient-filtering",
        "uniform-rubric-sampling",
        "filter-only",
        "random-phase-length",
        "fixed-50-50",
        "static-thresholds",
        "short-phases",
        "low-quarantine",
    ]
    entries_per_rubric_step: Count = Field(
        description="Pool entries of a rubric step (Algorithm 1: N_batch)."
    )
    routing: RoutingConfig
    pool: PoolConfig
    rubric_reward: RubricRewardConfig
    trqc: TrqcConfig
    phase: PhaseConfig
    sensitivity: SensitivityConfig

    @property
    def variant_name(self) -> str:
        """See `MethodCommon`."""
        return self.variant


class BaselineCommon(MethodCommon):
    """What every baseline has."""

    active_sampling_rounds: Count = Field(
        description="Rounds of prompts until N groups differ in reward; 1: one round, nothing dropped."
    )


class ReplayBufferConfig(Section):
    """EvoLM's temporal contrast: older answers of the policy, by age in policy steps."""

    capacity: Count
    min_age: int = Field(ge=0)
    max_age: int | None = Field(ge=0, description="null: no limit.")

    @model_validator(mode="after")
    def _order(self) -> ReplayBufferConfig:
        if self.max_age is not None and self.max_age < self.min_age:
            raise ValueError(f"max_age {self.max_age} is below min_age {self.min_age}")
        return self


class EvolmRewardConfig(Section):
    """Reward of a candidate rubric: (1 - format_weight) * base + format_weight * valid."""

    base: Literal["preference", "margin", "separation"]
    format_weight: Fraction
    invalid_reward: Fraction | None = Field(description="Reward of an unusable rubric; null: NaN.")


class EvolmConfig(BaselineCommon):
    """EvoLM (Li et al., 2026): fixed alternation of policy and rubric phases, temporal contrast, no routing."""

    name: Literal["evolm"]
    fixed: tuple[Count, Count] = Field(description="Policy and rubric steps a phase.")
    entries_per_rubric_step: Count
    buffer: ReplayBufferConfig
    rubric_reward: EvolmRewardConfig


class RlcerConfig(BaselineCommon):
    """RLCER (Sheng et al., 2026): every rollout writes its own rubric; both roles are updated on each batch."""

    name: Literal["rlcer"]
    verifier: Literal["list", "items"] = Field(
        description="list: one judge reply with a boolean per item; items: one judge score per item."
    )
    item_threshold: Fraction = Field(description="items: an item holds from this score on.")
    correlation_threshold: Annotated[float, Field(ge=-1.0, le=1.0)]
    outcome_weight: NonNegative
    cot_weight: NonNegative

    @model_validator(mode="after")
    def _items(self) -> RlcerConfig:
        if self.rubric.on_parse_failure != "nan":
            raise ValueError(
                "rubric.on_parse_failure=raw_text leaves no items to verify one by one; set rubric.on_parse_failure=nan"
            )
        return self


class PairwiseJudgeConfig(SamplingConfig):
    """How Rubric-ARM's trained judge samples its verdicts."""


class RubricArmConfig(BaselineCommon):
    """Rubric-ARM (Xu et al., 2026): generator and judge in turns on preference pairs, then the policy."""

    name: Literal["rubric-arm"]
    cycles: Count = Field(description="Alternations of generator and judge before the policy.")
    generator_steps: Count = Field(description="Generator updates of a cycle.")
    judge_steps: Count = Field(description="Judge updates of a cycle.")
    pairs_per_step: Count
    pairs: str = Field(min_length=1, description="`package`, or a .jsonl file: prompt, chosen, rejected.")
    judge: PairwiseJudgeConfig
    format_weight: NonNegative

    @property
    def roles(self) -> tuple[str, ...]:
        """See `MethodCommon`."""
        return ("policy", "generator", "judge")


class StaticRubricCommon(BaselineCommon):
    """Baselines whose rubric somebody else writes."""

    proposer: Literal["api", "untrained"] = Field(
        description="api: the model of `api`; untrained: the policy as it was before training."
    )


class PromptedConfig(StaticRubricCommon):
    """Prompted rubrics (RACE §6.1): written once per prompt by a frozen model."""

    name: Literal["prompted-api", "prompted-policy"]


class RarConfig(StaticRubricCommon):
    """RaR (Gunjal et al., 2025): one static rubric per prompt."""

    name: Literal["rar"]
    aggregation: Literal["implicit", "explicit", "predefined"]
    item_threshold: Fraction = Field(description="explicit, predefined: an item holds from this score on.")
    tries: Count


class RrdConfig(StaticRubricCommon):
    """RRD (Shen et al., 2026): split and filter until stable, items scored one by one, reweighted."""

    name: Literal["rrd"]
    weights: Literal["uniform", "llm", "wu"]
    item_threshold: Fraction
    decomposition_trigger: Count = Field(description="An item that this many answers satisfy is split.")
    termination_threshold: Count = Field(description="Stop once this many candidates were rejected.")
    max_rounds: Count
    tries: Count


class ScalarRmConfig(BaselineCommon):
    """A scalar reward model: sequence classification, no rubric."""

    name: Literal["scalar-rm"]
    source: str = Field(
        min_length=1, description="`fit`: a head fitted to preference pairs at the start; or as model.source."
    )
    sha256: str | None
    revision: str | None
    max_length: Count
    pairs: str = Field(min_length=1, description="fit: as rubric-arm's.")
    holdout: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(description="fit: share of pairs held out.")
    l2: Positive


MethodConfig = Annotated[
    RaceConfig
    | EvolmConfig
    | RlcerConfig
    | RubricArmConfig
    | PromptedConfig
    | RarConfig
    | RrdConfig
    | ScalarRmConfig,
    Field(discriminator="name"),
]


class ApiConfig(Section):
    """One OpenAI-compatible chat endpoint, for the methods that ask a stronger model."""

    base_url: str = Field(description="Empty: $OPENAI_BASE_URL.")
    model: str = Field(min_length=1)
    key_env: str = Field(description="Environment variable that holds the key; empty: the server wants none.")
    temperature: NonNegative
    max_tokens: Count
    timeout_s: Positive
    max_retries: int = Field(ge=0)
    backoff_s: Positive
    max_backoff_s: Positive
    concurrency: Count
    cache: bool = Field(description="Keep replies on disk, so that the same request is made once.")


class ProbeConfig(Section):
    """Rubrics and rollout groups on 100 fixed prompts (RACE Tables 1, 9-11)."""

    at_steps: tuple[int | Literal["start", "middle", "end"], ...] = Field(
        description="Global steps, or start, middle (half of the policy updates) and end; empty: no probe."
    )
    prompts: int = Field(ge=1, le=100, description="The first n of the 100, spread over the categories.")
    group_size: int = Field(ge=0, description="Responses per probe prompt (`probe_groups`); 0: none.")
    lexicon: Literal["evolm", "ours"]
    redundancy: Literal["none", "encoder", "judge", "api"]
    redundancy_cosine: Fraction = Field(description="encoder: criteria this close say the same.")


class EvalConfig(Section):
    """Which checkpoints the benchmarks want."""

    at_steps: tuple[Count, ...] = Field(description="Checkpoints of these global steps are kept for ever.")


class LearnerConfig(Section):
    """The GRPO update (Eq 4) and its optimiser."""

    lr: Positive
    schedule: Literal["constant"]
    warmup_steps: int = Field(ge=0)
    betas: tuple[Decay, Decay]
    weight_decay: NonNegative
    max_grad_norm: Positive
    kl_beta: NonNegative
    clip_ratio: Positive
    epochs: Count
    minibatches: Count
    max_tokens_per_microbatch: Count


class DataCommon(Section):
    """Keys of every data source."""

    limit: int | None = Field(ge=1, description="Training prompts drawn (seeded) from the source; null: all.")
    heldout: Count = Field(description="Validation prompts, disjoint from the training prompts.")
    max_prompt_tokens: Count
    on_long_prompt: Literal["error", "truncate", "drop"]
    deduplicate: bool


class PackageData(DataCommon):
    """The prompts that ship with racelab."""

    source: Literal["package"]
    difficulty: Literal["tiny", "full", "all"]
    categories: tuple[str, ...] = Field(description="Empty: all.")


class ReasoningGymData(DataCommon):
    """Procedural tasks with checkable answers."""

    source: Literal["reasoning-gym"]
    datasets: tuple[str, ...] = Field(min_length=1)
    size: Count
    seed: int


class FileData(DataCommon):
    """A local .jsonl, .parquet or .csv file."""

    source: Literal["file"]
    path: str = Field(min_length=1)
    prompt_field: str = Field(min_length=1)
    id_field: str | None
    category_field: str | None
    check_field: str | None


class HubData(DataCommon):
    """A data set by its hub name; prompts only."""

    source: Literal["hub"]
    name: str = Field(min_length=1)
    split: str
    prompt_field: str
    revision: str | None


DataConfig = Annotated[PackageData | ReasoningGymData | FileData | HubData, Field(discriminator="source")]


class ValidateConfig(Section):
    """The fixed held-out view before and after training."""

    samples: int = Field(ge=1, description="Samples per held-out prompt.")
    temperatures: tuple[Positive, ...] = Field(min_length=1, description="First: the training temperature.")
    every: int = Field(ge=0, description="Also validate every n policy steps; 0: only before and after.")
    bootstrap: Count
    judge_report: bool = Field(description="AUC and attack scores of the judge in the summary.")


class BackendConfig(Section):
    """Who trains. `local`: one process, one device. `verl`: Ray, FSDP and vLLM on many GPUs."""

    name: Literal["local", "verl"]
    nodes: Count
    gpus_per_node: int = Field(ge=0)
    learner_ranks: Count
    rollout_engines: int = Field(ge=0)
    tensor_parallel: Count
    micro_batch_per_device: int | None = Field(ge=1)
    packed_tokens: int | None = Field(ge=1)
    max_lag: int = Field(ge=0)
    truncated_is: float | None = Field(gt=0.0)

    @property
    def gpus(self) -> int:
        """GPUs in all (Table 7: 16)."""
        return self.nodes * self.gpus_per_node


class LauncherConfig(Section):
    """Where the run starts; in this version only here (`inline`)."""

    name: Literal["inline"]


class TrackingConfig(Section):
    """MLflow, fed from the run's spool by a process of its own."""

    mlflow: bool
    uri: str = Field(description="Empty: $MLFLOW_TRACKING_URI, else sqlite beside the runs.")
    experiment: str = Field(min_length=1)
    wait_s: NonNegative = Field(description="Seconds to wait for the last records at the end of a run.")


class CheckpointConfig(Section):
    """When to save, what to keep."""

    every: Count = Field(description="Steps between checkpoints; one is always written at the end.")
    keep_last: Count


class Config(Section):
    """A whole run."""

    preset: str
    run: RunConfig
    method: MethodConfig
    model: ModelConfig
    judge: JudgeConfig
    encoder: EncoderConfig
    learner: LearnerConfig
    data: DataConfig
    validation: ValidateConfig
    probe: ProbeConfig
    eval: EvalConfig
    api: ApiConfig
    backend: BackendConfig
    launcher: LauncherConfig
    tracking: TrackingConfig
    checkpoint: CheckpointConfig

    @model_validator(mode="after")
    def _backend_honours(self) -> Config:
        """An option that the chosen backend cannot honour is an error, never ignored."""
        if self.backend.name != "local":
            return self
        b = self.backend
        for key, value, allowed in (
            ("nodes", b.nodes, 1),
            ("gpus_per_node", b.gpus_per_node, 0),
            ("learner_ranks", b.learner_ranks, 1),
            ("tensor_parallel", b.tensor_parallel, 1),
            ("rollout_engines", b.rollout_engines, 0),
            ("micro_batch_per_device", b.micro_batch_per_device, None),
            ("packed_tokens", b.packed_tokens, None),
            ("max_lag", b.max_lag, 0),
            ("truncated_is", b.truncated_is, None),
        ):
            if value != allowed:
                raise ValueError(
                    f"backend.{key}={value} needs backend=verl; the local backend takes {allowed}"
                )
        return self

    @model_validator(mode="after")
    def _cross(self) -> Config:
        m, v = self.method, self.validation
        if self.data.limit is not None and self.data.limit < m.prompts_per_step:
            raise ValueError(
                f"data.limit={self.data.limit} is below method.prompts_per_step={m.prompts_per_step}: "
                "a batch would hold the same prompt twice"
            )
        if v.temperatures[0] != m.response.temperature:
            raise ValueError(
                f"validation.temperatures starts with {v.temperatures[0]}, but method.response.temperature is "
                f"{m.response.temperature}: the first must be the temperature that is trained at"
            )
        if len(set(v.temperatures)) != len(v.temperatures):
            raise ValueError(f"validation.temperatures {list(v.temperatures)} holds a value twice")
        if self.probe.redundancy == "judge" and self.judge.kind == "likelihood":
            raise ValueError(
                "probe.redundancy=judge asks the judge model a question, which judge=likelihood cannot answer; "
                "set probe.redundancy=encoder or none"
            )
        if isinstance(m, RlcerConfig) and m.verifier == "list" and self.judge.kind != "json":
            raise ValueError(
                f"method.verifier=list asks the judge model for a JSON reply, which judge={self.judge.kind} does not "
                "write; set judge=json or method.verifier=items"
            )
        if self.learner.minibatches > m.prompts_per_step * m.group_size:
            raise ValueError("learner.minibatches is above the number of samples of a step")
        return self
