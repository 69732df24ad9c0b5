"""The shape of every run's configuration, checked before anything heavy is imported.

Values come from the YAML files beside this module; the reason for each value stands there. Fields without a
default must be given by a YAML file, so that no number hides in code. All models are frozen and refuse unknown
keys. Rules that tie keys together stand in the validators; what cannot be reached at run time (targets, thresholds)
is judged by `check.py`.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from racelab.configs.schema_launcher import LauncherConfig, refuse_what_launcher_cannot
from racelab.configs.schema_methods import (
    BaselineCommon,
    EvolmConfig,
    EvolmRewardConfig,
    MethodCommon,
    MethodConfig,
    PairwiseJudgeConfig,
    PhaseConfig,
    PoolConfig,
    PromptedConfig,
    RaceConfig,
    RarConfig,
    ReplayBufferConfig,
    RlcerConfig,
    RoutingConfig,
    RrdConfig,
    RubricArmConfig,
    RubricConfig,
    RubricRewardConfig,
    SamplingConfig,
    ScalarRmConfig,
    SensitivityConfig,
    StaticRubricCommon,
    TargetsConfig,
    TrqcConfig,
)
from racelab.configs.section import Count, Decay, Fraction, NonNegative, Positive, Section

# The methods' blocks belong to the schema: they are imported from here.
__all__ = [
    "ApiConfig",
    "ApiJudgeConfig",
    "BackendConfig",
    "BaselineCommon",
    "CheckpointConfig",
    "Config",
    "DataCommon",
    "DataConfig",
    "DigitJudgeConfig",
    "EncoderConfig",
    "EvalConfig",
    "EvolmConfig",
    "EvolmRewardConfig",
    "FileData",
    "HubData",
    "JsonJudgeConfig",
    "JudgeCommon",
    "JudgeConfig",
    "LauncherConfig",
    "LearnerConfig",
    "LikelihoodJudgeConfig",
    "MethodCommon",
    "MethodConfig",
    "ModelConfig",
    "PackageData",
    "PairwiseJudgeConfig",
    "PhaseConfig",
    "PoolConfig",
    "ProbeConfig",
    "PromptedConfig",
    "RaceConfig",
    "RarConfig",
    "ReasoningGymData",
    "ReplayBufferConfig",
    "RlcerConfig",
    "RoutingConfig",
    "RrdConfig",
    "RubricArmConfig",
    "RubricConfig",
    "RubricRewardConfig",
    "RunBase",
    "RunConfig",
    "SamplingConfig",
    "ScalarRmConfig",
    "Section",
    "SensitivityConfig",
    "ServerConfig",
    "StaticRubricCommon",
    "TargetsConfig",
    "TrackingConfig",
    "TrqcConfig",
    "ValidateConfig",
    "refuse_what_launcher_cannot",
    "refuse_what_local_cannot",
]


class RunBase(Section):
    """What every run has: its name, place and seed."""

    name: str = Field(
        description="Name of the run; empty: made from method, variant and seed.", max_length=80
    )
    root: str = Field(description="Folder of all runs; empty: $RACELAB_HOME/runs, else ./runs.")
    seed: int = Field(ge=0, lt=2**31)
    threads: int = Field(ge=0, description="CPU threads of the compute library; 0: all cores.")

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


class RunConfig(RunBase):
    """What to run, how long, where it lands."""

    policy_updates: Count = Field(description="Budget: policy steps. Rubric steps come on top (RACE App. D).")
    max_steps: int | None = Field(
        ge=1, description="Hard limit on policy and rubric steps together; null: none."
    )
    samples_every: Count = Field(
        description="Keep generated texts of every n-th step in the `samples` table."
    )


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


class ServerConfig(Section):
    """An OpenAI-compatible server, and how it is asked."""

    base_url: str = Field(description="As http://host:8000/v1; empty: $OPENAI_BASE_URL.")
    model: str = Field(description="Its name on that server; empty: the only one that it serves.")
    key_env: str = Field(description="Environment variable that holds the key; empty: the server wants none.")
    timeout_s: Positive = Field(description="Of one whole reply.")
    max_retries: int = Field(ge=0)
    backoff_s: Positive
    max_backoff_s: Positive
    concurrency: Count = Field(description="Requests under way at a time.")
    cache: bool = Field(description="Keep replies on disk, so that the same request is made once.")


class ApiJudgeConfig(ServerConfig):
    """A judge behind a server, such as `racelab serve judge`; it replies with a JSON score."""

    kind: Literal["api"]
    high: Positive
    temperature: NonNegative
    top_p: Annotated[float, Field(gt=0.0, le=1.0)]
    max_tokens: Count


JudgeConfig = Annotated[
    LikelihoodJudgeConfig | DigitJudgeConfig | JsonJudgeConfig | ApiJudgeConfig, Field(discriminator="kind")
]


class EncoderConfig(Section):
    """The frozen encoder of Eq 7."""

    source: str = Field(min_length=1)
    sha256: str | None
    revision: str | None
    pooling: Literal["mean", "last_token"]
    max_length: Count


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
    clip_ratio_high: Positive | None = Field(
        description="Another bound above 1 (clip-higher); null: symmetric."
    )
    entropy_coef: NonNegative = Field(description="Weight of the policy's entropy, which is maximised.")
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
    rubric_temperature: Positive = Field(
        description="At which the untrained model writes the fixed rubrics of the held-out prompts."
    )
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


def refuse_what_local_cannot(b: BackendConfig) -> None:
    """An option that the chosen backend cannot honour is an error, never ignored."""
    if b.name != "local":
        return
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
            raise ValueError(f"backend.{key}={value} needs backend=verl; the local backend takes {allowed}")


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

    @property
    def budget(self) -> int:
        """Updates of the policy."""
        return self.run.policy_updates

    def facts(self) -> dict[str, object]:
        """What a list of runs tells them apart by."""
        return {
            "paper": "race",
            "method": self.method.name,
            "variant": self.method.variant_name,
            "preset": self.preset,
            "seed": self.run.seed,
            "policy_updates": self.budget,
        }

    @property
    def title(self) -> str:
        """Of a run that nobody has named; without the seed."""
        return "-".join(filter(None, (self.method.name, self.method.variant_name, self.preset)))

    @model_validator(mode="after")
    def _cross(self) -> Config:
        refuse_what_local_cannot(self.backend)
        refuse_what_launcher_cannot(self.launcher, self.backend)
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
                "method.verifier=list asks a judge of this process for a list in JSON, which "
                f"judge={self.judge.kind} does not give; set judge=json or method.verifier=items"
            )
        if self.learner.minibatches > m.prompts_per_step * m.group_size:
            raise ValueError("learner.minibatches is above the number of samples of a step")
        return self
