"""Tests that the benchmark of concurrency distinguishes wrong answers from stale ones."""

from __future__ import annotations

import pytest

from benchmarks.concurrency.clients import Lookups
from benchmarks.concurrency.ledger import Row, judge, row

ONE, TWO, THREE = row(7, 1), row(7, 2), row(7, 3)


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ([ONE, TWO], None),
        ([ONE, TWO, THREE], None),
        ([THREE, ONE, TWO], None),
        ([ONE], "stale"),
        ([], "stale"),
        ([ONE, THREE], "wrong"),
        ([ONE, TWO, TWO], "wrong"),
        ([ONE, TWO, row(8, 3)], "wrong"),
        ([ONE, (7, 2, "7/1")], "wrong"),
        ([ONE, TWO, THREE, row(7, 4)], "wrong"),
    ],
)
def test_an_answer_is_judged_by_the_acknowledged_and_the_sent_versions(
    answer: list[Row], verdict: str | None
) -> None:
    """Version 2 was acknowledged before the look-up began. Version 3 was sent before the look-up ended."""
    assert judge(7, answer, version_min=2, version_max=3) == verdict


def test_the_results_of_threads_are_added_up() -> None:
    found, other = Lookups(seconds=[1.0], errors=1), Lookups(seconds=[3.0])
    other.note("stale", "key 7")
    other.note("wrong", "key 8")
    found.add(other)
    assert (found.errors, found.stale, found.wrong) == (1, 1, 1)
    assert found.seconds == [1.0, 3.0]
    assert found.examples == ["stale: key 7", "wrong: key 8"]
