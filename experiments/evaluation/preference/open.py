"""The rubric suite, ready to be run: benchmarks, the judge with its scales, the model under test or a reward model.

`judge.source=policy` means here what it means in training, the untrained policy: of a run under test its base model, of
any other model of this machine the packaged one, so that models are compared under the same judge.

The likelihood judge needs scales. A run's own, measured before its first step, are taken if its judge was the one that
is asked for now; otherwise they are measured as a training run of the packaged preset with seed 0 does. A judge of this
process computes in the number type of that training.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from racelab.configs.compose import compose, read_composed
from racelab.configs.schema import ApiJudgeConfig, Config, RubricConfig
from racelab.configs.schema_eval import EvalRunConfig
from racelab.configs.schema_rlds import TrainConfig
from racelab.experiments.errors import ConfigError, RacelabError, RunFolderError
from racelab.experiments.evaluation.preference.examiner import RatingExaminer
from racelab.experiments.evaluation.preference.judgebench import JudgeBench
from racelab.experiments.evaluation.preference.raters import RewardModelRater, RubricRater, Writing
from racelab.experiments.evaluation.preference.rating import RatedBenchmark, Rater
from racelab.experiments.evaluation.preference.rewardbench2 import RewardBench2
from racelab.experiments.evaluation.subject.found import Found
from racelab.experiments.evaluation.types import Examiner, Example, Subject
from racelab.experiments.fsio import read_json
from racelab.experiments.models.api_settings import ApiSettings
from racelab.experiments.models.assets import model_sha256, resolve_model
from racelab.experiments.models.configured import (
    find_judge,
    judge_settings,
    make_generator,
    rubric_settings,
    with_scales,
)
from racelab.experiments.models.generator import default_templates
from racelab.experiments.models.judge import build_judge
from racelab.experiments.models.judge_api import ApiJudgeSettings
from racelab.experiments.models.judge_likelihood import LikelihoodJudge
from racelab.experiments.models.judge_prompted import JsonSettings

if TYPE_CHECKING:
    from racelab.experiments.ports import Encoder, Judge, LanguageModel

PACKAGED: Final = "smollm2-135m"
_TWICE: Final = "judgebench-system-twice"

Note = Callable[[str], None]
Make = Callable[[RatedBenchmark, Sequence[Example]], Examiner]


@dataclass(frozen=True, slots=True)
class JudgeInputs:
    """Everything that can be wrong with the judge, found before a model is loaded.

    Attributes:
        name: kind and model, short: `likelihood/smollm2-135m`, `api/Qwen3-1.7B`.
        policy: folder of the untrained policy; None where nothing asks for it.
        folder: of the judge; None: it is the untrained policy, or stands behind a server.
        server: of the judge, which has answered.
        encoder: folder; None where the judge needs none.
    """

    name: str
    policy: Path | None = None
    folder: Path | None = None
    server: ApiSettings | None = None
    encoder: Path | None = None


def make_rated(name: str, config: EvalRunConfig) -> RatedBenchmark:
    """The benchmark of that name.

    Raises:
        ConfigError: there is none.
    """
    made: dict[str, Callable[[], RatedBenchmark]] = {
        "rewardbench2": lambda: RewardBench2(config.eval.in_force),
        "judgebench": lambda: JudgeBench(config.eval.judgebench_split),
    }
    if name not in made:
        raise ConfigError(f"{name} is not rated; suite=rubric has {', '.join(made)}")
    return made[name]()


def find_rater(config: EvalRunConfig, found: Found) -> tuple[str, ...]:
    """Finds the judge, its server and its encoder; nothing is loaded.

    Args:
        config: of the evaluation.
        found: the model under test.

    Returns:
        What to say.

    Raises:
        ConfigError: an option that cannot be honoured.
        ModelError: no such judge or encoder.
        UnreachableError: the judge's server does not answer.
    """
    refuse(config, found)
    if config.eval.rater == "reward-model":
        return (f"rated by the reward model {_short(config.subject.source)}",)
    return (f"judged by {find_inputs(config, found).name}", *_made_for_another(config, found))


def _made_for_another(config: EvalRunConfig, found: Found) -> tuple[str, ...]:
    """A line where the likelihood judge rates what it was not made for: rubrics of another model than the packaged."""
    if config.judge.kind != "likelihood" or (found.folder is not None and found.folder == _packaged()):
        return ()
    return (
        "the likelihood judge is made for the embedded model and runs trained from it; --judge MODEL|URL or "
        "judge=qwen3-1.7b names another",
    )


def refuse(config: EvalRunConfig, found: Found) -> None:
    """Raises ConfigError for what this suite cannot honour."""
    if _TWICE in config.eval.in_force:
        raise ConfigError(
            f"eval.quirks={_TWICE} puts the system prompt behind the assistant's header, where no chat template and no "
            "server lets it stand; leave it out"
        )
    if config.eval.rater == "reward-model":
        if found.folder is None or found.trained is not None:
            raise ConfigError("eval.rater=reward-model needs a model folder or hub name with a scalar head")
    elif found.kind != "url":
        return
    elif config.rubric.format == "lines":
        raise ConfigError(
            "rubric.format=lines is continued as plain text, and the model under test stands behind a URL, where it is "
            "only asked in turns; leave it out or take json, or evaluate the model on this machine"
        )
    elif not isinstance(config.judge, ApiJudgeConfig) and config.judge.source == "policy":
        raise ConfigError(
            "the model under test stands behind a URL, so judge.source=policy names no model of this machine; name the "
            "judge: --judge MODEL or --judge http://host:8000/v1"
        )


def find_inputs(config: EvalRunConfig, found: Found) -> JudgeInputs:
    """The judge's parts; raises as `find_rater`."""
    folder, server = find_judge(config.judge)
    if server is not None:
        return JudgeInputs(f"api/{_short(server.model)}", server=server)
    assert not isinstance(config.judge, ApiJudgeConfig)
    source, likelihood = config.judge.source, config.judge.kind == "likelihood"
    policy = None
    if folder is None or likelihood:  # whose samples set the scales, too
        policy = found.folder if found.trained is not None else resolve_model(PACKAGED)
    if folder is None:
        source = PACKAGED if found.trained is None else _trained_by(found).model.source
    e = config.encoder
    encoder = resolve_model(e.source, sha256=e.sha256, revision=e.revision) if likelihood else None
    return JudgeInputs(f"{config.judge.kind}/{_short(source)}", policy, folder, encoder=encoder)


@contextlib.contextmanager
def open_rated(config: EvalRunConfig, found: Found, note: Note) -> Iterator[Make]:
    """Inside, the models are loaded; gives the maker of examiners.

    Raises:
        RacelabError: as `find_rater`, or a model that cannot be run as the config says.
    """
    refuse(config, found)
    if config.eval.rater == "reward-model":
        rater: Rater = _reward_model(config, found)
        subject = None
    else:
        from racelab.experiments.evaluation.subject.open import open_subject

        inputs = find_inputs(config, found)
        subject = open_subject(config, found, note)
        rater = open_rater(config, subject, found, note, inputs)
    try:
        yield lambda benchmark, examples: RatingExaminer(benchmark, examples, rater)
    finally:
        if subject is not None:
            subject.close()


def open_rater(
    config: EvalRunConfig, subject: Subject, found: Found, note: Note, inputs: JudgeInputs | None = None
) -> RubricRater:
    """The model under test as a writer of rubrics, under the judge of the config.

    Args:
        config: of the evaluation.
        subject: writes the rubrics; the caller closes it.
        found: what it is.
        note: says what takes a while.
        inputs: of the judge; None finds them.
    """
    inputs = inputs or find_inputs(config, found)
    trained = training_config(found)
    judge = open_judge(config, found, inputs, note)
    return RubricRater(
        subject,
        judge,
        writing(config, found, trained),
        name=inputs.name,
        together=1 if inputs.server is None else inputs.server.concurrency,
    )


# --- the judge ------------------------------------------------------------------------------------------------------


def open_judge(config: EvalRunConfig, found: Found, inputs: JudgeInputs, note: Note) -> Judge:
    """The judge, frozen, with the scales that it needs; what it writes is read as the benchmarks' authors do.

    Raises:
        RacelabError: a model that cannot be run so, or samples that give no scales.
    """
    from racelab.experiments.models.api import ApiModel

    settings = judge_settings(config.judge, config.run.seed)
    if isinstance(settings, JsonSettings | ApiJudgeSettings):
        settings = replace(settings, reading="first_number")
    if inputs.server is not None:
        assert isinstance(settings, ApiJudgeSettings)
        return build_judge("api", chat=ApiModel(inputs.server), settings=replace(settings, strict=True))
    folder = inputs.folder or inputs.policy
    assert folder is not None
    model = _open(config, found, folder)
    judge = build_judge(
        config.judge.kind,
        model=model,
        encoder=None if inputs.encoder is None else _encoder(config, inputs.encoder),
        settings=settings,
        model_id=model_sha256(folder),
    )
    if not isinstance(judge, LikelihoodJudge):
        return judge
    known = stored_scales(config, found, judge)
    if known is not None:
        note("the judge's scales are those of the run under test")
        return _scaled(judge, config, known, lambda: model)
    note("measuring the judge's scales on samples of the untrained policy")
    assert inputs.policy is not None
    policy = inputs.policy
    return _scaled(judge, config, None, lambda: model if policy == folder else _open(config, found, policy))


def stored_scales(config: EvalRunConfig, found: Found, judge: Judge) -> Mapping[str, Any] | None:
    """The scales that the run under test stored, if they are those of this judge with this encoder; else None."""
    trained = training_config(found)
    if trained is None or found.trained is None:
        return None
    try:
        stored = read_json(found.trained.run.path / "setup.json")
    except RunFolderError:
        return None
    said = stored.get("judge") if isinstance(stored, dict) else None
    if not isinstance(said, dict) or trained.encoder != config.encoder:
        return None
    mine = json.loads(json.dumps(judge.describe()))
    if {**said, "calibration": None} != {**mine, "calibration": None}:
        return None
    scales = said.get("calibration")
    return scales if isinstance(scales, dict) else None


def _scaled(
    judge: Judge,
    config: EvalRunConfig,
    known: Mapping[str, Any] | None,
    policy: Callable[[], LanguageModel],
) -> Judge:
    """The likelihood judge with its scales; only measuring them asks for the policy, the prompts and a generator."""
    from racelab.experiments.build import as_ruler, room
    from racelab.experiments.data.load import fit_prompts, load_prompts

    if known is not None:
        return with_scales(judge, config.judge, known, ruler=_never, prompts=(), seed=0)
    training = compose(()).race
    model = policy()
    generator = make_generator(training.method, model)
    data, _ = load_prompts(training.data, training.run.seed)
    prompts, _ = fit_prompts(
        training.data, data, lambda text: len(model.encode(text)), room(training, generator)
    )
    return with_scales(
        judge,
        config.judge,
        None,
        ruler=lambda: as_ruler(generator, training),
        prompts=prompts.train,
        seed=training.run.seed,
    )


def _never() -> Any:
    raise AssertionError("stored scales need no samples")


def _open(config: EvalRunConfig, found: Found, folder: Path) -> LanguageModel:
    """A frozen model in the number type that judges are trained with: the scales and the draws depend on it."""
    from racelab.experiments.backends.local.model import open_language_model
    from racelab.experiments.needs import torch_device

    training = training_config(found) or compose(()).race
    return open_language_model(
        folder,
        role="frozen",
        compute_dtype=training.model.compute_dtype,
        device=torch_device(config.subject.device),
    )


def _encoder(config: EvalRunConfig, folder: Path) -> Encoder:
    from racelab.experiments.models.encoder import SentenceEncoder
    from racelab.experiments.needs import torch_device

    e = config.encoder
    device = torch_device(config.subject.device)
    return SentenceEncoder(folder, pooling=e.pooling, max_length=e.max_length, device=device)


# --- the model under test -------------------------------------------------------------------------------------------


def training_config(found: Found) -> Config | None:
    """What a RACE run (or a baseline) under test was trained with; None for all other models."""
    config = None if found.trained is None else _trained_by(found)
    return config if isinstance(config, Config) else None


def _trained_by(found: Found) -> TrainConfig:
    assert found.trained is not None
    config = read_composed(found.trained.run.path / "config" / "composed.yaml", to_look=True).config
    assert not isinstance(config, EvalRunConfig)  # `find_trained` refuses those
    return config


def writing(config: EvalRunConfig, found: Found, trained: Config | None) -> Writing:
    """How the model under test is asked for a rubric: as its run was, else as the preset of its size."""
    rubric = _rubric(config, found, trained)
    r = config.rubric
    caps = {name: config.eval.budget(name) for name in config.eval.benchmarks}
    return Writing(
        default_templates(rubric.format).rubric,
        replace(rubric_settings(rubric), on_parse_failure="raw_text"),
        max_tokens=r.max_tokens,
        temperature=r.temperature,
        top_p=r.top_p,
        retry_temperatures=r.retry_temperatures,
        budgets={name: cap for name, cap in caps.items() if cap is not None},
        thinking=config.subject.thinking,
    )


def _rubric(config: EvalRunConfig, found: Found, trained: Config | None) -> RubricConfig:
    """What counts as a usable rubric: the run's own, or the preset's whose format it is."""
    form = config.rubric.format
    if trained is not None and form in ("auto", trained.method.rubric.format):
        return trained.method.rubric
    if form == "auto":
        packaged = found.folder is not None and found.folder == _packaged()
        form = "lines" if packaged else "json"
    preset = "embedded" if form == "lines" else "paper"
    return compose([f"preset={preset}"]).race.method.rubric


def _packaged() -> Path | None:
    """Folder of the packaged model, if it is installed."""
    try:
        return resolve_model(PACKAGED)
    except RacelabError:  # not installed, or damaged: then it is not the one that was found
        return None


def _reward_model(config: EvalRunConfig, found: Found) -> RewardModelRater:
    from racelab.experiments.models.reward_model import ClassifierRewardModel, open_classifier
    from racelab.experiments.needs import torch_device

    assert found.folder is not None
    s = config.subject
    device = torch_device(s.device)
    classifier = open_classifier(found.folder, dtype=s.compute_dtype, device=device)
    model = ClassifierRewardModel(classifier, max_length=s.max_length or classifier.window)
    return RewardModelRater(model, name=f"reward-model/{_short(s.source)}")


def _short(source: str) -> str:
    """The last part of a folder or of a hub name."""
    return source.rstrip("/").rpartition("/")[2]
