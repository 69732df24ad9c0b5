"""`--limit` over benchmarks whose data are sorted by domain."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from racelab.experiments.evaluation.build import spread


def test_the_domains_take_turns() -> None:
    assert spread(list("aaabbc"), 4) == [0, 1, 3, 5]
    assert spread(list("aaabbc"), 1) == [0]
    assert spread(list("aaabbc"), None) == [0, 1, 2, 3, 4, 5]
    assert spread(["", "", ""], 2) == [0, 1]
    assert spread([], 3) == []


@given(st.lists(st.sampled_from("abcd")), st.integers(1, 30))
def test_counts_differ_by_one_at_most_and_limits_are_nested(domains: list[str], limit: int) -> None:
    kept = spread(domains, limit)
    assert len(kept) == min(limit, len(domains))
    assert set(kept) <= set(spread(domains, limit + 1))
    counts = {name: sum(domains[place] == name for place in kept) for name in set(domains)}
    for name, count in counts.items():
        if count < domains.count(name):  # it had more to give
            assert count + 1 >= max(counts.values())
