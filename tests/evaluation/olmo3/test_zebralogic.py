"""ZebraLogic: the last balanced object, cells, and what spoils a puzzle."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from racelab.experiments.errors import DataError
from racelab.experiments.evaluation.olmo3.common import TaskSettings
from racelab.experiments.evaluation.olmo3.zebralogic import NUMBER_CELL, Zebralogic, last_object
from racelab.experiments.evaluation.types import Answer, Benchmark, Example, Mark

RECORD: dict[str, Any] = {
    "id": "p1",
    "size": "2*3",
    "puzzle": "There are 2 houses.",
    "solution": {
        "header": ["House", "Name", "Pet", "Age"],
        "rows": [["1", "Eric", "cat", "7"], ["2", "Arnold", "dog", "9"]],
    },
}
RIGHT: dict[str, dict[str, Any]] = {
    "House 1": {"Name": "Eric", "Pet": "cat", "Age": "7"},
    "House 2": {"Name": "Arnold", "Pet": "dog", "Age": "9"},
}


def read(record: dict[str, Any]) -> Example:
    (example,) = Zebralogic(TaskSettings()).read([("f.jsonl:1", record)])
    return example


def mark(text: str, quirk: bool = False) -> Mark:
    settings = TaskSettings(quirks=frozenset({NUMBER_CELL} if quirk else ()))
    found = Zebralogic(settings).mark(read(RECORD), [Answer(text)])
    assert found.answers[0]["score"] == found.marks[0].score
    return found.marks[0]


def says(solution: Any) -> str:
    return json.dumps({"reasoning": "so it is", "solution": solution}, indent=4)


def with_cell(value: Any) -> str:
    return says({**RIGHT, "House 1": {**RIGHT["House 1"], "Age": value}})


def test_it_is_a_benchmark() -> None:
    benchmark = Zebralogic(TaskSettings())
    assert isinstance(benchmark, Benchmark)
    assert [(s.name, s.config, s.split) for s in benchmark.sources] == [
        ("allenai/ZebraLogicBench-private", "grid_mode", "test")
    ]


def test_the_prompt_shows_a_solved_puzzle_and_the_form_of_the_answer() -> None:
    ask = Zebralogic(TaskSettings(max_tokens=100)).ask(read(RECORD))
    opening = "\n# Example Puzzle \n\nThere are 3 houses, numbered 1 to 3 from left to right"
    assert ask.user.startswith(opening)
    form = (
        '{\n    "reasoning": "___",\n    "solution": {\n        "House 1": {\n            "Name": "___",\n'
        '            "Pet": "___",\n            "Age": "___"\n        },\n'
    )
    middle = "\n    }\n}\n\n# Puzzle to Solve \n\nThere are 2 houses.\n\n\n# Instruction\n\nNow please solve"
    assert middle in ask.user
    assert form in ask.user
    assert ask.user.endswith('"Age": "___"\n        }\n    }\n}\n\n')
    assert (ask.n, ask.max_tokens, ask.temperature, ask.top_p) == (1, 100, 0.6, 0.95)


@pytest.mark.parametrize(
    ("text", "score", "cell", "parsed"),
    [
        (says(RIGHT), 1.0, 1.0, 1),
        ("<think>{draft}</think>So:\n" + says(RIGHT), 1.0, 1.0, 1),
        (
            says(RIGHT).replace("so it is", "so\nit is"),
            1.0,
            1.0,
            1,
        ),  # no JSON, but line breaks are deleted first
        (says({h: {k: f" {v.upper()}\n" for k, v in a.items()} for h, a in RIGHT.items()}), 1.0, 1.0, 1),
        (says({**RIGHT, "House 3": {"Name": "Peter"}, "more": 1}), 1.0, 1.0, 1),
        # 5 of 6
        (with_cell("8"), 0.0, 5 / 6, 1),
        (with_cell(None), 0.0, 5 / 6, 1),
        (with_cell(""), 0.0, 5 / 6, 1),
        (with_cell({}), 0.0, 5 / 6, 1),
        (with_cell([]), 0.0, 5 / 6, 1),
        (with_cell({"value": {"years": "7", "unit": "y"}}), 1.0, 1.0, 1),
        (with_cell(["7", "8"]), 1.0, 1.0, 1),
        (with_cell(["8", "7"]), 0.0, 5 / 6, 1),
        # a house is missing: 3 of 6
        (says({"House 1": RIGHT["House 1"]}), 0.0, 0.5, 1),
        (says({**RIGHT, "House 2": "Arnold"}), 0.0, 0.5, 1),
        # parsed, but no solution in it
        ('{"answer": 1}', 0.0, 0.0, 1),
        ('{"solution": null}', 0.0, 0.0, 1),
        ('{"solution": ["House 1"]}', 0.0, 0.0, 1),
        # a pair of braces after the answer takes its place
        (says(RIGHT) + "\nI hope {this} helps", 0.0, 0.0, 0),
        (says(RIGHT) + "\n{}", 0.0, 0.0, 1),
        # a brace that is not closed spoils what follows; one that closes nothing does not
        ("<think>a set {1, 2</think>" + says(RIGHT), 0.0, 0.0, 0),
        ("<think>1, 2}</think>" + says(RIGHT), 1.0, 1.0, 1),
        ("no object", 0.0, 0.0, 0),
        ("{'solution': {}}", 0.0, 0.0, 0),
        ("", 0.0, 0.0, 0),
    ],
)
def test_what_an_answer_scores(text: str, score: float, cell: float, parsed: int) -> None:
    found = mark(text)
    assert found.label == "zebralogic"
    assert found.score == score
    assert found.details == {"cell_accuracy": cell, "parsed": parsed, "difficulty": "easy"}
    assert found.status == ("scored" if parsed else "unparsed")


@pytest.mark.parametrize("value", [7, True, [7], 7.0])
def test_a_number_spoils_the_puzzle_only_under_the_quirk(value: Any) -> None:
    spoilt = mark(with_cell(value), quirk=True)
    assert (spoilt.score, spoilt.details["cell_accuracy"], spoilt.details["parsed"]) == (0.0, 0.0, 0)
    assert mark(with_cell(value)).details["parsed"] == 1
    # 7 reads as "7"; 7.0 and true do not
    right = value in (7, [7]) and not isinstance(value, bool | float)
    assert mark(with_cell(value)).score == float(right)


@pytest.mark.parametrize(
    ("solution", "cell", "parsed", "without"),
    [
        # by hand from the rule: 3 of 6 are right in the other house
        ({**RIGHT, "House 1": None}, 0.0, 0, 0.5),
        ({**RIGHT, "House 1": 4}, 0.0, 0, 0.5),
        ({**RIGHT, "House 1": "Eric"}, 0.5, 1, 0.5),
        ({**RIGHT, "House 1": "Name: Eric"}, 0.0, 0, 0.5),
        ({**RIGHT, "House 1": ["Eric", "cat"]}, 0.5, 1, 0.5),
        ({**RIGHT, "House 1": ["Name"]}, 0.0, 0, 0.5),
        # a cell that is not what it seems
        ({**RIGHT, "House 1": {**RIGHT["House 1"], "Age": {"years": {}}}}, 0.0, 0, 5 / 6),
        ({**RIGHT, "House 1": {**RIGHT["House 1"], "Age": {"years": []}}}, 0.0, 0, 5 / 6),
        ({**RIGHT, "House 1": {**RIGHT["House 1"], "Age": [None]}}, 0.0, 0, 5 / 6),
        ({**RIGHT, "House 1": {**RIGHT["House 1"], "Age": [{"years": "7"}]}}, 0.0, 0, 5 / 6),
        # inside an object a number is wrong, no more
        ({**RIGHT, "House 1": {**RIGHT["House 1"], "Age": {"years": 7}}}, 5 / 6, 1, 1.0),
        ({**RIGHT, "House 1": {**RIGHT["House 1"], "Age": {"years": None}}}, 5 / 6, 1, 5 / 6),
        ({**RIGHT, "House 1": {**RIGHT["House 1"], "Age": {"years": ["7"]}}}, 1.0, 1, 1.0),
    ],
)
def test_what_else_spoils_the_puzzle_under_the_quirk(
    solution: Any, cell: float, parsed: int, without: float
) -> None:
    found = mark(says(solution), quirk=True)
    assert (found.details["cell_accuracy"], found.details["parsed"]) == (cell, parsed)
    assert mark(says(solution)).details["cell_accuracy"] == without


def test_a_number_where_no_gold_cell_is_spoils_nothing() -> None:
    extra = {**RIGHT, "House 1": {**RIGHT["House 1"], "Floor": 3}, "House 9": {"Name": 1}}
    assert mark(says(extra), quirk=True).score == 1.0
    assert mark(with_cell(None), quirk=True).details["cell_accuracy"] == 5 / 6


def test_thinking_may_be_left_out() -> None:
    text = "<think>a set {1, 2</think>" + says(RIGHT)
    (found,) = Zebralogic(TaskSettings(thinking="strip")).mark(read(RECORD), [Answer(text)]).marks
    assert found.score == 1.0


def test_deep_nesting_is_not_parsed() -> None:
    assert mark('{"solution": ' + "[" * 100_000 + "]" * 100_000 + "}").details["parsed"] == 0


@pytest.mark.parametrize(
    ("size", "domain"), [("2*2", "easy"), ("2*6", "easy"), ("3*3", "easy"), ("3*4", "hard"), ("6*6", "hard")]
)
def test_difficulty_is_by_size(size: str, domain: str) -> None:
    assert read({**RECORD, "size": size}).domain == domain


def test_size_and_id_may_be_missing() -> None:
    example = read({k: RECORD[k] for k in ("puzzle", "solution")})
    assert (example.example_id, example.domain) == ("1", "easy")


@pytest.mark.parametrize(
    ("change", "says_so"),
    [
        ({"solution": None}, "field 'solution' is missing, so nothing can be scored; the gold ones are in"),
        (
            {"solution": {"header": ["House", "Name"], "rows": [["___", "___"]]}},
            "field 'solution' holds blanks only; the gold ones are in",
        ),
        ({"solution": [1]}, "field 'solution' has type list; an object is needed"),
        ({"solution": "not json"}, "field 'solution' has type str; an object or its JSON text is needed"),
        ({"solution": {"header": ["House"], "rows": [["1"]]}}, "holds no cells"),
        (
            {"solution": {"header": ["House", "Name"], "rows": [["1"]]}},
            "row 1 of field 'solution' does not have",
        ),
        ({"size": "2x3"}, "field 'size' is '2x3'"),
        ({"puzzle": " "}, "field 'puzzle' is blank"),
    ],
)
def test_a_bad_record_is_named(change: dict[str, Any], says_so: str) -> None:
    with pytest.raises(DataError, match=r"^f\.jsonl:1: ") as caught:
        read({**RECORD, **change})
    assert says_so in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_record_without_a_solution_says_where_there_is_one() -> None:
    with pytest.raises(DataError, match=r"f\.jsonl:1: field 'solution' is missing.*ZebraLogicBench-private"):
        read({k: v for k, v in RECORD.items() if k != "solution"})


@given(st.text(alphabet='{}[]":,abc1 \n\\', max_size=80))
def test_marking_never_raises(text: str) -> None:
    for quirk in (False, True):
        assert 0.0 <= mark(text, quirk).details["cell_accuracy"] <= 1.0


BALANCED = st.recursive(
    st.just("{}"), lambda inner: st.lists(inner, max_size=3).map(lambda p: "{" + "a".join(p) + "}")
)


@given(
    st.lists(st.tuples(st.sampled_from(["", "a", "}", " \n"]), BALANCED), max_size=5),
    st.sampled_from(["", "}", "a"]),
)
def test_the_last_balanced_object_is_taken_and_an_open_brace_hides_the_rest(
    parts: list[tuple[str, str]], end: str
) -> None:
    text = "".join(filler + one for filler, one in parts) + end
    wanted = parts[-1][1] if parts else None
    assert last_object(text) == wanted
    assert last_object(text + "{ {}") == wanted
    assert last_object("{" + "".join(one for _, one in parts)) is None
