"""Properties of tables. They are validated when they are built, and every mistake is one line."""

from __future__ import annotations

import json
import math
import pickle
import re
from typing import Any

import pytest

from dormouse.errors import InvalidProperties
from tests.support.model import TableProperties


def test_the_defaults_are_those_of_the_documentation() -> None:
    found = TableProperties()
    assert (found.gc_delay_seconds, found.gc_batch_files, found.history_retention_seconds) == (
        900,
        10_000,
        86_400,
    )
    assert (found.compaction_strategy, found.compaction_batch_files, found.size_ratio) == (
        "size_ratio",
        12,
        3,
    )
    assert (found.split_threshold_rows, found.split_min_rows) == (1_000_000_000, 1_000)
    assert (found.commit, found.isolation, found.compression) == ("async", "read committed", "zstd")


def test_properties_survive_json_and_a_pickle() -> None:
    given = TableProperties(gc_delay_seconds=0.5, aggregate="sum(a)", split_threshold_rows=2**40)
    assert TableProperties(**json.loads(json.dumps(given.model_dump(exclude_defaults=True)))) == given
    assert pickle.loads(pickle.dumps(given)) == given  # noqa: S301


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gc_delay_seconds", -1), ("gc_delay_seconds", math.nan), ("gc_delay_seconds", "5"),
        ("history_retention_seconds", math.inf), ("attempt_expiry_seconds", 1e300), ("size_ratio", math.inf),
        ("size_ratio", 0), ("gc_batch_files", 0), ("gc_batch_files", 10**30), ("gc_batch_files", 1.5),
        ("compaction_batch_files", 1), ("compaction_jobs_max", 0), ("compaction_jobs_max", 2**70),
        ("compaction_strategy", "SIZE_RATIO"), ("split_threshold_rows", True), ("compression", None),
        ("isolation", "read uncommitted"), ("gc_dealy_seconds", 5),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_with_its_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidProperties, match=name) as caught:
        TableProperties(**{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("gc_delay_seconds", "abc", "a number from 0 to 3155760000, not 'abc'"),
        ("gc_batch_files", 1.5, "a whole number from 1 to 2147483647, not 1.5"),
        ("size_ratio", 0, "a number above 0, not 0"),
        ("compression", "rar", "zstd, snappy, lz4 or none, not 'rar'"),
        ("aggregate", 5, "text, not 5"),
    ],
)
def test_a_bad_value_is_reported_with_the_allowed_values(name: str, value: Any, said: str) -> None:
    with pytest.raises(InvalidProperties, match=re.escape(f"{name} must be {said}")):
        TableProperties(**{name: value})


def test_every_mistake_is_named() -> None:
    with pytest.raises(InvalidProperties, match=r"size_ratio.*; .*nope|nope.*; .*size_ratio"):
        TableProperties(size_ratio=-1, nope=2)


def test_history_retention_must_not_be_shorter_than_the_delay_of_collection() -> None:
    with pytest.raises(InvalidProperties, match="at least gc_delay_seconds"):
        TableProperties(gc_delay_seconds=100, history_retention_seconds=99)


def test_properties_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        TableProperties().size_ratio = 5  # type: ignore[misc]
