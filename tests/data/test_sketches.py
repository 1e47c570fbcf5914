"""Sketches of row keys: their errors and weights, the split points that they give, and corrupt containers."""

from __future__ import annotations

import random
from bisect import bisect_left
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import Quantiles, quantile

from dormouse.errors import InvalidData
from tests.support.model import BYTES, LONG, STRING, Field, Range, Schema
from tests.support.reading import arrow_schema
from tests.support.writing import FileSketches

LONGS = Schema([Field("key", LONG), Field("other", LONG)])
RANK_ERROR_MAX = 0.01


def _file(keys: Any, others: Any = None) -> FileSketches:
    order = np.argsort(np.asarray(keys), kind="stable")
    others = np.zeros(len(keys), dtype=np.int64) if others is None else np.asarray(others)[order]
    table = pa.table({"key": np.asarray(keys)[order], "other": others}).cast(arrow_schema(LONGS))
    return FileSketches.from_sorted(LONGS, table.to_batches(10_000), len(keys))


def _one(schema: Schema, *columns: list[Any]) -> Quantiles:
    table = pa.table(list(columns), schema=arrow_schema(schema))
    return Quantiles(schema, [FileSketches.from_sorted(schema, [table], len(columns[0]))])


def _rank_errors(quantiles: Quantiles, field: str, values: Any) -> float:
    """Returns the largest difference between the ranks of the sketch and of the values, at 99 quantiles."""
    ordered = np.sort(values)
    places = ordered[(np.linspace(0.01, 0.99, 99) * len(ordered)).astype(int)].tolist()
    return max(
        abs(quantiles.rank(field, v) - int(np.searchsorted(ordered, v)) / len(ordered)) for v in set(places)
    )


@pytest.mark.slow
def test_files_of_different_sizes_are_weighted_by_their_rows() -> None:
    """The files have a million skewed rows, a thousand, and a few. Each row counts once, whatever the file's
    stride.
    """
    random_numbers = np.random.default_rng(7)
    parts = [
        (random_numbers.pareto(1.5, 1_000_000) * 100).astype(np.int64),
        random_numbers.integers(5_000, 6_000, 300_000),
        random_numbers.integers(0, 10, 1_000),
        np.array([3, 3, 3]),
    ]
    quantiles = Quantiles(LONGS, [_file(part) for part in parts])
    together = np.concatenate(parts)
    assert _rank_errors(quantiles, "key", together) < RANK_ERROR_MAX
    assert quantiles.row_count("key") == pytest.approx(len(together), rel=0.001)
    assert quantiles.ends("key") == [together.min(), together.max()]


def test_a_later_key_that_repeats_in_step_with_the_sampling_is_sampled_fairly() -> None:
    """Each key has the same 16 values of the second key, which is also the number of rows in a block.

    Sampling with a fixed step would draw only one of these values.
    """
    keys = np.repeat(np.arange(40_000), 16)
    others = np.tile(np.arange(16), 40_000)
    assert _rank_errors(Quantiles(LONGS, [_file(keys, others)]), "other", others) < RANK_ERROR_MAX


@pytest.mark.parametrize("rows", [1_000, 5_000, 60_000, 700_000])
def test_ranks_are_exact_to_a_percent_for_any_key_and_size(rows: int) -> None:
    random_numbers = np.random.default_rng(rows)
    keys, others = random_numbers.integers(-9, 1 << 60, rows), random_numbers.normal(0, 1e6, rows).astype(int)
    quantiles = Quantiles(LONGS, [_file(keys, others)])
    assert _rank_errors(quantiles, "key", keys) < RANK_ERROR_MAX
    assert _rank_errors(quantiles, "other", others) < RANK_ERROR_MAX


def test_a_later_string_key_is_sketched_in_the_order_of_strings() -> None:
    schema = Schema([Field("key", LONG), Field("other", STRING)])
    numbers = np.random.default_rng(5).permutation(30_000)
    quantiles = _one(schema, list(range(30_000)), [f"ß{n:05d}" for n in numbers])
    for n in range(1_000, 30_000, 1_000):
        assert quantiles.rank("other", f"ß{n:05d}") == pytest.approx(n / 30_000, abs=RANK_ERROR_MAX)


def test_a_range_has_its_own_quantiles() -> None:
    quantiles = Quantiles(LONGS, [_file(np.arange(100_000))])
    within = Range(20_000, 30_000)
    assert quantile(quantiles, "key", 0.5, within) == pytest.approx(25_000, abs=300)
    assert quantiles.rank("key", 25_000, within) == pytest.approx(0.5, abs=0.03)
    assert quantiles.split_point("key", within) == pytest.approx(25_000, abs=300)
    assert quantile(quantiles, "key", 0.5, Range(200_000, None)) is None


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30), st.integers(-3, 3), st.integers(-3, 4))
def test_a_split_point_leaves_keys_on_both_sides_exactly_when_it_can(
    keys: list[int], low: int, high: int
) -> None:
    within = Range(low, high)
    inside = sorted(key for key in keys if low <= key < high)
    point = Quantiles(LONGS, [_file(keys)]).split_point("key", within)
    if len(set(inside)) < 2:
        assert point is None
        return
    assert isinstance(point, int)
    assert inside[0] < point <= inside[-1]
    unbalance = abs(2 * bisect_left(inside, point) - len(inside))
    assert unbalance == min(abs(2 * bisect_left(inside, k) - len(inside)) for k in inside if k > inside[0])


def test_one_odd_row_among_a_million_equal_ones_still_divides() -> None:
    keys = np.full(1_000_000, 5)
    keys[0] = 1
    assert Quantiles(LONGS, [_file(keys)]).split_point("key") == 5
    keys[0] = 9
    assert Quantiles(LONGS, [_file(keys)]).split_point("key") == 9


def test_strings_and_bytes_are_returned_unchanged() -> None:
    schema = Schema([Field("s", STRING), Field("b", BYTES)])
    quantiles = _one(schema, ["", "\x00", "a", "ß", "\uffff", "\U0001f42d"], [b"", b"\xff", b"\x00"] * 2)
    assert [quantile(quantiles, "s", i / 6) for i in range(6)] == [
        "",
        "\x00",
        "a",
        "ß",
        "\uffff",
        "\U0001f42d",
    ]
    assert quantiles.ends("b") == [b"", b"\xff"]
    assert quantiles.split_point("b") == b"\x00"


def test_a_stored_sketch_gives_the_same_quantiles() -> None:
    file = _file(np.random.default_rng(1).integers(0, 1_000, 200_000))
    again = FileSketches.from_bytes(file.to_bytes())
    assert (again.row_count, again.stride) == (file.row_count, file.stride)
    before, after = Quantiles(LONGS, [file]), Quantiles(LONGS, [again])
    assert [quantile(before, "key", i / 100) for i in range(100)] == [
        quantile(after, "key", i / 100) for i in range(100)
    ]
    assert len(file.to_bytes()) < 60_000


def test_corrupt_containers_are_refused_by_name() -> None:
    good = _file(range(100)).to_bytes()
    randomly = random.Random(3)
    bad = [b"", b"DMSK", good[:-1], good + b"x", b"PAR1" + good[4:]]
    for _ in range(50):
        position = randomly.randrange(len(good))
        bad.append(
            good[:position] + bytes([good[position] ^ (1 + randomly.randrange(255))]) + good[position + 1 :]
        )
    for data in bad:
        with pytest.raises(InvalidData, match=r"'a\.sketches'"):
            FileSketches.from_bytes(data, "a.sketches")


def test_rows_out_of_order_are_noticed() -> None:
    table = pa.table({"key": [1, 3, 2], "other": [0, 0, 0]})
    with pytest.raises(InvalidData, match="not in the order of 'key'"):
        FileSketches.from_sorted(LONGS, [table], 3)


def test_no_files_have_no_quantiles() -> None:
    nothing = Quantiles(LONGS, [])
    assert quantile(nothing, "key", 0.5) is nothing.split_point("key") is None
    assert nothing.ends("key") == []
    assert nothing.row_count("key") == 0
