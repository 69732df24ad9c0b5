"""The methods' blocks of the schema: RACE, and the baselines of its Table 4.

The numbers and their reasons stand in `configs/method/*.yaml`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from racelab.configs.section import Count, Fraction, NonNegative, Positive, Section


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
                f"min_pool {self.min_pool} is above capacity {self.capacity}: no phase could switch; "
                f"take at most {self.capacity}"
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
