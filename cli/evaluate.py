"""`racelab eval`: benchmarks of one or more models and runs, an evaluation per model and seed."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from racelab.cli.console import print_json, results, say
from racelab.cli.eval_view import make_progress, print_eval_cells, print_scores
from racelab.cli.sweep import Options, is_planning, run_cells, seeded
from racelab.cli.train import calm_threads, command, parse_seeds, reference, run_root
from racelab.configs.compose import Composed, compose
from racelab.configs.idle_eval import URL, refuse_idle
from racelab.configs.schema_eval import BENCHMARKS, RACE_SUITE, RUBRIC_SUITE, EvalRunConfig
from racelab.configs.schema_launcher import asked_of_slurm
from racelab.configs.suggest import did_you_mean, near
from racelab.experiments.errors import ConfigError, RunFolderError
from racelab.experiments.evaluation.subject.find import PACKAGED, source_kind

if TYPE_CHECKING:
    from racelab.experiments.runfolder import RunFolder

_PLAIN: Final = re.compile(r"[A-Za-z0-9_./-]+")
_TITLE_LENGTH: Final = 30
_ALIASES: Final = {"mbpp+": "mbpp_plus", "mbppplus": "mbpp_plus", "reward_bench_2": "rewardbench2"}


def evaluate(
    words: Sequence[str],
    suite: str,
    protocol: str | None,
    benchmarks: str | None,
    limit: int | None,
    judge: str | None,
    seeds: str | None,
    resume: str | None,
    jobs: int,
    fresh: bool,
    dry_run: bool,
    config_dirs: Sequence[Path],
    json_output: bool,
) -> int:
    """Evaluates what is named. Returns the exit code.

    Raises:
        ConfigError: nothing to evaluate, or an option that cannot be.
    """
    asked = Asked(suite, protocol, benchmarks, limit, judge)
    if resume is not None:
        said = [*asked.typed(), *([] if seeds is None else ["--seeds", seeds])]
        said = said[2:] if suite == "race" else said  # the default, typed or not
        said += ["--jobs"] * (jobs > 1) + ["--fresh"] * fresh + ["--dry-run"] * dry_run
        return _resume(resume, [*words, *said], json_output)
    targets = [word for word in words if _is_target(word)]
    overrides = [word for word in words if not _is_target(word)]
    judged = _judge_words(judge, overrides)
    subjects = _subjects(targets, overrides)
    sets = [(label, [*asked.words(), *judged, *subject, *overrides]) for label, subject in subjects]
    several = len(sets) > 1 or seeds is not None or fresh or jobs > 1
    composed = compose(sets[0][1], config_dirs)
    config = composed.config
    assert isinstance(config, EvalRunConfig)
    refuse_idle(
        [*judged, *overrides],
        config,
        [word.partition("=")[2].strip("'") for _, subject in subjects for word in subject],
        dict.fromkeys(judged, f"--judge {judge}"),
    )
    launcher = asked_of_slurm(config.launcher, config.backend)
    if not (several or dry_run or launcher is not None or is_planning()):
        return _start(sets[0][0], composed, json_output)
    options = Options(jobs, False, fresh, dry_run, tuple(config_dirs), json_output, print_eval_cells)
    if dry_run:
        for line in _questions(config):
            say(line)
    named = [(f"{title(config)}-{label}", words) for label, words in sets]
    specs = [spec for label, words in named for spec in seeded(label, words, parse_seeds(seeds))]
    typed = ["eval", *asked.typed(), *options.words(seeds), *words]
    return run_cells(config.run.name or title(config), typed, specs, options)


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of the command that say what is evaluated and how."""

    suite: str
    protocol: str | None
    benchmarks: str | None
    limit: int | None
    judge: str | None

    def words(self) -> list[str]:
        """As overrides; the judge is `_judge_words`'."""
        found = [f"suite={self.suite}"]
        found += [] if self.protocol is None else [f"eval.protocol={self.protocol}"]
        if self.benchmarks is not None:
            names = [benchmark_name(name) for name in self.benchmarks.split(",") if name.strip()]
            found.append(f"eval.benchmarks=[{','.join(names)}]")
        return found if self.limit is None else [*found, f"eval.limit={self.limit}"]

    def typed(self) -> list[str]:
        """As they are typed, `--suite` first."""
        return [
            word
            for name, value in asdict(self).items()
            if value is not None
            for word in (f"--{name}", str(value))
        ]


def title(config: EvalRunConfig) -> str:
    """What is evaluated, for names: `eval-race`, or `eval-gsm8k` where only some benchmarks of the suite are."""
    e = config.eval
    suites = {"race": RACE_SUITE, "rubric": RUBRIC_SUITE, "ifeval": ("ifeval",)}
    what = e.suite if e.benchmarks == suites[e.suite] else "+".join(e.benchmarks)
    if len(what) > _TITLE_LENGTH:
        what = f"{e.suite}-{len(e.benchmarks)}"
    return f"eval-{what}" if e.protocol == "olmo3-adapt" else f"eval-{what}-{e.protocol}"


def _questions(config: EvalRunConfig) -> list[str]:
    """What would be asked, for a dry run: benchmark by benchmark, and from where its data would come."""
    e = config.eval
    many = "all examples" if e.limit is None else f"{e.limit} examples"
    lines = [
        f"suite {e.suite}, protocol {e.protocol}, {many} of each benchmark; no server and no hub is asked now"
    ]
    for name in e.benchmarks:
        bound = e.budget(name)
        tokens = "" if bound is None else f", at most {bound} tokens an answer"
        lines.append(f"{name}: {getattr(e.data, name) or 'data from the hub'}{tokens}")
    return lines


def _is_target(word: str) -> bool:
    """A model or a run; every other word is `key=value`. A URL may hold an equals sign, and so may a path."""
    key = word.partition("=")[0]
    return "=" not in word or bool(URL.match(word)) or "/" in key or Path(word).exists()


def benchmark_name(word: str) -> str:
    """The name as in the config: `MBPP+` is mbpp_plus."""
    plain = word.strip().lower().replace("-", "_")
    name = _ALIASES.get(plain, plain)
    if name not in BENCHMARKS:
        raise ConfigError(
            f"--benchmarks {word.strip()}: no such benchmark{did_you_mean(near(name, BENCHMARKS))}; there are "
            f"{', '.join(BENCHMARKS)}"
        )
    return name


def _judge_words(judge: str | None, overrides: Sequence[str]) -> list[str]:
    """A URL is asked over HTTP, sampled as JudgeBench does; a model is loaded here, and gives a greedy JSON score.

    Another kind may be chosen beside it: `--judge URL judge=api` is greedy too.
    """
    if judge is None:
        return []
    chosen = any(word.partition("=")[0] == "judge" for word in overrides)
    if URL.match(judge):
        return [*([] if chosen else ["judge=api-thinking"]), f"judge.base_url={_quoted(judge)}"]
    source = str(Path(judge).expanduser().absolute()) if Path(judge).expanduser().is_dir() else judge
    source = "smollm2-135m" if source == "embedded" else source
    return [*([] if chosen else ["judge=json"]), f"judge.source={_quoted(source)}"]


def _quoted(text: str) -> str:
    """A value that Hydra reads as it stands."""
    if _PLAIN.fullmatch(text):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _subjects(targets: Sequence[str], overrides: Sequence[str]) -> list[tuple[str, list[str]]]:
    """(label, words) of everything to evaluate; a sweep stands for its finished cells."""
    typed = next((word for word in overrides if word.partition("=")[0].lstrip("+") == "subject.source"), None)
    if typed is not None and targets:
        raise ConfigError(f"{targets[0]} and {typed} both say what to evaluate; leave one of them out")
    if not targets:
        if typed is not None:
            return [("model", [])]
        raise ConfigError(
            "nothing to evaluate; name a run (id, name, latest), a model folder, a hub name, a URL, or `embedded`: "
            "racelab eval embedded --suite race"
        )
    found = [pair for target in targets for pair in _of_target(target)]
    return [(label, [f"subject.source={_quoted(source)}"]) for label, source in found]


def _of_target(target: str) -> list[tuple[str, str]]:
    """(label, subject.source) of one target, or of each cell of a sweep."""
    kind = source_kind(target)
    if kind == "url":
        return [(urlsplit(target).netloc.rpartition("@")[2] or "server", target)]
    if kind == "packaged":
        return [(target, target)]
    if kind == "folder":
        path = Path(target).expanduser().resolve()
        return [(path.name, str(path))]
    from racelab.sweeps.manifest import resolve

    try:
        return _of_run(resolve(run_root(""), target, trained=True))
    except RunFolderError as error:
        if kind == "hub":
            return [(target.rpartition("/")[2], target)]
        raise ConfigError(
            f"{target}: no run, model folder, hub name (org/name), URL or packaged model of that name "
            f"({error}){_hint(target)}"
        ) from None


def _hint(target: str) -> str:
    return did_you_mean(near(target, PACKAGED))


def _of_run(run: RunFolder) -> list[tuple[str, str]]:
    kind = run.info().get("kind")
    if kind == "eval":
        raise ConfigError(
            f"{run.run_id} is an evaluation itself; `racelab show {reference(run)}` shows its scores, "
            f"`racelab eval --resume {reference(run)}` goes on with it"
        )
    if kind != "sweep":
        return [(str(run.info()["name"]), str(run.path))]
    from racelab.experiments.runfolder import RunFolder as Folder
    from racelab.sweeps.run import members

    cells = [run.path.parent / str(entry["run_id"]) for entry in members(run)]
    opened = [Folder.open(path) for path in cells if (path / "run.json").is_file()]
    ended = [cell for cell in opened if cell.status() == "finished"]
    if not ended:
        raise ConfigError(
            f"{run.run_id} is a sweep of which no cell has finished; there is nothing to evaluate"
        )
    if len(ended) < len(cells):
        say(
            f"{len(cells) - len(ended)} of {len(cells)} cells of {run.run_id} have not finished and are left out"
        )
    return [(str(cell.info()["name"]), str(cell.path)) for cell in ended]


def _start(label: str, composed: Composed, json_output: bool) -> int:
    from racelab.experiments.session import new_run, prepare

    calm_threads()  # IFEval's checkers bring torch with them
    root = run_root(composed.config.run.root)
    inputs = prepare(composed.config, root)
    assert isinstance(composed.config, EvalRunConfig)
    folder = new_run(
        composed.config,
        root=root,
        composed_yaml=composed.yaml,
        overrides=list(composed.overrides),
        command=shlex.join(["racelab", *sys.argv[1:]]),
        name=composed.config.run.name or _run_name(composed.config, label),
        more={"evaluates": dict(inputs.found.facts)},
    )
    code, result = attempt(composed, folder, inputs, json_output)
    with results():
        if json_output:
            print_json(result)
    return code


def _run_name(config: EvalRunConfig, label: str) -> str:
    from racelab.sweeps.cells import slug

    return f"{slug(f'{title(config)}-{label}')}-s{config.run.seed}"


def _resume(run: str, others: Sequence[str], json_output: bool) -> int:
    from racelab.cli.train import resume_run

    if others:
        raise ConfigError(
            f"--resume goes on with the config stored with the evaluation; leave {' '.join(others)} out"
        )
    return resume_run(run, json_output, kind="eval")


def attempt(
    composed: Composed, folder: RunFolder, inputs: Any, json_output: bool
) -> tuple[int, dict[str, Any]]:
    """One attempt, with its progress shown; the scores are printed last, or returned under --json."""
    from racelab.experiments.fsio import write_json_atomic
    from racelab.experiments.session import Talk, open_session
    from racelab.experiments.signals import StopRequest

    summary: dict[str, Any] = {}

    def finish(done: RunFolder) -> None:
        from racelab.analysis.summary import summarise

        summary.update(summarise(done))
        write_json_atomic(done.path / "summary.json", summary)

    view = make_progress(json_output)
    with StopRequest() as stop:
        view.start(f"{folder.info()['name']}  {folder.run_id}")
        view.note(f"run folder {folder.path}")
        go_on = f"{command()} eval --resume {reference(folder)}"
        try:
            outcome = open_session(
                composed.config, folder, inputs, Talk(view.update, view.note, finish), stop
            ).run()
        except KeyboardInterrupt:
            say(f"interrupted; go on with: {go_on}")
            return 130, {"run_id": folder.run_id, "path": str(folder.path), "status": "interrupted"}
        finally:
            view.stop()
    end = {"status": outcome.status, "wall_s": outcome.seconds, "peak_gib": outcome.peak_gib}
    if summary and not json_output:
        with results():
            print_scores(summary)
        say(f"{folder.run_id} {outcome.status}; `racelab show {reference(folder)}` shows it again")
    if outcome.status != "finished":
        reason = folder.info().get("reason") or outcome.status
        say(f"{reason}; go on with: {go_on}")
    return outcome.exit_code, {**summary, **end, "run_id": folder.run_id, "path": str(folder.path)}
