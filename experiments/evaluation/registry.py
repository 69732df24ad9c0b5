"""Which class stands for which benchmark under protocol `olmo3-adapt`: a new one is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from racelab.configs.schema_eval import BenchmarkName, EvalRunConfig
from racelab.experiments.evaluation.olmo3.agieval import AgiEval
from racelab.experiments.evaluation.olmo3.bbh import Bbh
from racelab.experiments.evaluation.olmo3.common import TaskSettings
from racelab.experiments.evaluation.olmo3.gpqa import Gpqa
from racelab.experiments.evaluation.olmo3.gsm8k import Gsm8k
from racelab.experiments.evaluation.olmo3.ifeval import Ifeval
from racelab.experiments.evaluation.olmo3.mbpp_plus import MbppPlus
from racelab.experiments.evaluation.olmo3.mmlu import Mmlu
from racelab.experiments.evaluation.olmo3.popqa import PopQa
from racelab.experiments.evaluation.olmo3.zebralogic import Zebralogic
from racelab.experiments.evaluation.sandbox import CodeResult, Limits, run_code
from racelab.experiments.evaluation.types import Benchmark

RUNS_CODE: Final = frozenset({"mbpp_plus"})
"""Benchmarks that run what the model wrote."""

_TASKS: Final[dict[str, Callable[[TaskSettings], Benchmark]]] = {
    "gsm8k": Gsm8k,
    "bbh": Bbh,
    "mmlu": Mmlu,
    "popqa": PopQa,
    "gpqa": Gpqa,
    "zebralogic": Zebralogic,
    "agieval": AgiEval,
    "ifeval": Ifeval,
}


def make_benchmark(name: BenchmarkName, config: EvalRunConfig) -> Benchmark:
    """The benchmark as this run wants it. Loads nothing."""
    e = config.eval
    settings = TaskSettings(
        max_tokens=e.budget(name),
        thinking=e.thinking,
        think_end=e.think_end,
        quirks=frozenset(e.in_force),
        think=config.subject.thinking,
    )
    return MbppPlus(settings, code_runner(config)) if name == "mbpp_plus" else _TASKS[name](settings)


def code_runner(config: EvalRunConfig) -> Callable[[str], CodeResult]:
    """Runs one program in the sandbox, under this run's limits."""
    c = config.eval.code
    limits = Limits(
        timeout_s=c.timeout_s,
        cpu_s=c.cpu_s,
        memory_mb=c.memory_mb,
        file_mb=c.file_mb,
        processes=c.processes,
    )
    return lambda program: run_code(program, limits)
