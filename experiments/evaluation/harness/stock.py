"""Which of lm-eval's tasks stands for each benchmark, and what its records hold. Loads nothing.

Where the harness has several variants, the one for chat models that is scored from the text of an answer is taken
(servers give no log-probs), zero-shot if there is one:

gsm8k       gsm8k_cot_zeroshot. The others have examples, which `gsm8k` and `gsm8k_cot` let a base model go on with and
            `gsm8k_cot_llama` spreads over the turns of a dialogue.
mbpp_plus   mbpp_plus, 3 examples. `mbpp_plus_instruct` opens the model's answer for it, which servers refuse, and takes
            the first word of bare code for a language tag (lm-eval's pull request 3769), so that right code scores 0.
            Both run the three tests of the prompt only, not those that EvalPlus added.
bbh         bbh_cot_zeroshot. `bbh` has 3 examples and stops at the first blank line.
mmlu        mmlu_cot_llama. `mmlu_generative` counts a lone letter only, `mmlu_flan_cot_zeroshot` asks the validation
            split, `mmlu` needs log-probs.
gpqa        gpqa_main_cot_zeroshot. The generative n-shot variant has no examples unless their number is given.
agieval     agieval_en. There is no other: nine of its ten tasks rate the choices by log-probs, `math` is answered.
ifeval      ifeval.

PopQA and ZebraLogic are not in the harness.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from racelab.experiments.errors import ConfigError

Kind = Literal["text", "number", "texts", "list"]


@dataclass(frozen=True, slots=True)
class StockTask:
    """A benchmark as lm-eval has it.

    Attributes:
        name: ours.
        task: lm-eval's task or group.
        folder: of its definition, below `lm_eval/tasks`.
        primary: the metric that is `Mark.score`, `metric.filter` (no filter where it is "none"): the one that the group
            reports, or else the one that reads an answer freely.
        columns: of a record, as on the hub.
        subset: the column of a local file that names the subset; "" where there are none.
        likelihoods: whether choices are rated by their log-probs, which no server gives.
        dataset: hub name used in place of the task's own; "" is the task's own.
    """

    name: str
    task: str
    folder: str
    primary: str
    columns: tuple[tuple[str, Kind], ...]
    subset: str = ""
    likelihoods: bool = False
    dataset: str = ""


_TASKS = (
    StockTask(
        "gsm8k",
        "gsm8k_cot_zeroshot",
        "gsm8k",
        "exact_match.flexible-extract",
        (("question", "text"), ("answer", "text")),
    ),
    StockTask(
        "mbpp_plus",
        "mbpp_plus",
        "mbpp",
        "pass_at_1",
        (("prompt", "text"), ("test_list", "texts")),
    ),
    StockTask(
        "bbh",
        "bbh_cot_zeroshot",
        "bbh/cot_zeroshot",
        "exact_match.flexible-extract",
        (("input", "text"), ("target", "text")),
        subset="task",
    ),
    StockTask(
        "mmlu",
        "mmlu_cot_llama",
        "llama3/instruct/mmlu_cot",
        "exact_match.strict_match",
        (("question", "text"), ("choices", "texts"), ("answer", "number")),
        subset="subject",
        # Its own, hails/mmlu_no_train, is a copy of this one behind a loading script, which `datasets` 4 refuses.
        dataset="cais/mmlu",
    ),
    StockTask(
        "gpqa",
        "gpqa_main_cot_zeroshot",
        "gpqa/cot_zeroshot",
        "exact_match.flexible-extract",
        (
            ("Question", "text"),
            ("Correct Answer", "text"),
            ("Incorrect Answer 1", "text"),
            ("Incorrect Answer 2", "text"),
            ("Incorrect Answer 3", "text"),
        ),
    ),
    StockTask(
        "agieval",
        "agieval_en",
        "agieval",
        "acc",
        (("query", "text"), ("choices", "texts"), ("gold", "list")),
        subset="task",
        likelihoods=True,
    ),
    StockTask(
        "ifeval",
        "ifeval",
        "ifeval",
        "prompt_level_loose_acc",  # as in olmo3-adapt; lm-eval reports all four alike
        (("key", "number"), ("prompt", "text"), ("instruction_id_list", "texts"), ("kwargs", "list")),
    ),
)
STOCK = {task.name: task for task in _TASKS}
"""The benchmarks that lm-eval has, by our names."""


def stock_tasks(benchmarks: Iterable[str], *, likelihoods: bool = True) -> tuple[StockTask, ...]:
    """What lm-eval has for these benchmarks, in their order. Asks nothing and loads nothing: call it first.

    Args:
        benchmarks: our names.
        likelihoods: whether the model under test gives log-probs (a model on this machine does, a server does not).

    Raises:
        ConfigError: lm-eval has no task for some of them, or one needs log-probs; all of them are named.
    """
    names = list(benchmarks)
    missing = [name for name in names if name not in STOCK]
    if missing:
        raise ConfigError(
            f"eval.benchmarks: lm-eval has no task for {', '.join(missing)}; it has {', '.join(STOCK)}: "
            "leave the others out, or set eval.protocol=olmo3-adapt"
        )
    rated = [name for name in names if STOCK[name].likelihoods and not likelihoods]
    if rated:
        raise ConfigError(
            f"eval.benchmarks: lm-eval rates the choices of {', '.join(rated)} by log-probs, which a server does not "
            "give; leave it out, take a model on this machine, or set eval.protocol=olmo3-adapt"
        )
    return tuple(STOCK[name] for name in names)
