"""Files that DuckDB reads together: they give the same rows as when each is read alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dormouse.data.transform import quoted
from dormouse.model.reshaping import with_added_column, without_column
from dormouse.reading.planner import Scan
from dormouse.reading.sql.conditions import all_of
from tests.support.model import LONG, Field, Range, Schema
from tests.support.reading import Deletion, KeyRanges, question
from tests.support.reading import selects as together

SCHEMA = Schema([Field("k", LONG)], [], [Field("v", LONG, nullable=True)])
KEYS = 30
WHERE = [{"k": Range(3, 20)}, {"v": 1}, {"k": Range(5, 6), "v": None}, {"v": [0, None]}, {"k": 12}, {"v": 2}]


def _deletion(number: int) -> Deletion:
    parts = question(SCHEMA, WHERE[number - 1], None, None)
    return Deletion(number, "", parts.ranges, parts.conditions)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, list[tuple[int, int | None]]]]:
    """Returns (path, rows) of nine files. Any two have either the same keys or no key in common."""
    found = []
    for number in range(9):
        low = number % 3 * 10
        rows = [(low + k, (None, 0, 1, 2)[(k * (number + 1)) % 4]) for k in range(10)]
        path = tmp_path_factory.mktemp("files") / f"{number}.v2.parquet"
        columns: dict[str, list[Any]] = {"k": [k for k, _ in rows], "v": [v for _, v in rows]}
        pq.write_table(pa.table(columns, schema=pa.schema({"k": pa.int64(), "v": pa.int64()})), path)
        found.append((str(path), rows))
    return found


def _parts() -> st.SearchStrategy[tuple[KeyRanges, ...]]:
    ends = st.lists(st.integers(0, KEYS), min_size=2, max_size=4, unique=True).map(sorted)
    pairs = ends.map(
        lambda found: tuple(
            KeyRanges({"k": [Range(*pair)]}) for pair in zip(found[::2], found[1::2], strict=False)
        )
    )
    return st.just((KeyRanges(),)) | pairs


@pytest.mark.slow
@given(
    parts=st.lists(
        st.tuples(st.integers(0, 8), _parts(), st.integers(0, 6), st.sets(st.integers(1, 6), max_size=1)),
        min_size=1,
        max_size=12,
    ),
    scans_max=st.integers(0, 4),
)
@settings(max_examples=40, deadline=None)
def test_files_that_are_read_together_give_the_rows_that_each_gives_alone(
    files: list[tuple[str, list[tuple[int, int | None]]]],
    parts: list[tuple[int, tuple[KeyRanges, ...], int, set[int]]],
    scans_max: int,
) -> None:
    scans, expected = [], []
    for number, slices, till, left in parts:
        path, rows = files[number]
        of = [one for one in map(_deletion, range(1, 7)) if one.deletion_id > till or one.deletion_id in left]
        # as in plans, without slices that keys exclude
        of = [one for one in of if any(_in(one.ranges, k) for k, _ in rows)]
        scans.append(Scan(path, slices, "p", None, tuple(of), till if of else 0))
        expected += [
            (k, v)
            for k, v in rows
            if any(_in(one, k) for one in slices)
            and not any(_in(one.ranges, k) and all(_meets(c, v) for c in one.conditions) for one in of)
        ]
    found = list(together.read_together(SCHEMA, scans, scans_max))
    assert len(found) <= max(1, scans_max)
    assert _rows(found) == sorted(expected, key=repr)


def _in(ranges: KeyRanges, k: int) -> bool:
    return all(any(item.contains(k) for item in ranges[name]) for name in ranges)


def _meets(condition: Any, v: int | None) -> bool:
    return condition.or_null if v is None else any(item.contains(v) for item in condition.ranges)


def _rows(parts: Sequence[Sequence[Scan]]) -> list[tuple[Any, ...]]:
    selects = []
    for part in parts:
        names = ", ".join(f"'{scan.filename}'" for scan in part)
        left = together.left_of(
            SCHEMA, part, [scan.deletions for scan in part], lambda field: quoted(field.name)
        )
        where = all_of([together.rows_of(SCHEMA, part), left]) or "true"
        selects.append(f"SELECT k, v FROM read_parquet([{names}]) WHERE {where}")
    return sorted(duckdb.sql(" UNION ALL ".join(selects)).fetchall(), key=repr)


@pytest.mark.parametrize("apart", [False, True])
def test_row_groups_between_wanted_keys_are_not_read(tmp_path: Path, apart: bool) -> None:
    """The row groups between the wanted ones are damaged. One file or two have the ranges."""
    path = tmp_path / "0.v2.parquet"
    rows = pa.table({"k": range(100_000), "v": [1] * 100_000})
    pq.write_table(rows, path, row_group_size=1_000, use_dictionary=False, compression="none")
    groups = pq.read_metadata(path)
    starts = [groups.row_group(number).column(0).data_page_offset for number in (1, 40, 41, 99)]
    content = bytearray(path.read_bytes())
    for start, end in (starts[:2], starts[2:]):
        content[start:end] = b"\xff" * (end - start)
    path.write_bytes(content)
    ranges = [Range(10, 20), Range(40_000, 40_010), Range(99_990)]
    slices = [(KeyRanges({"k": [one]}),) for one in ranges] if apart else [(KeyRanges({"k": ranges}),)]
    scans = [Scan(str(path), some, "p", None) for some in slices]
    where = together.rows_of(SCHEMA, scans)
    names = ", ".join(f"'{scan.filename}'" for scan in scans)
    found = duckdb.sql(f"SELECT count(*) FROM read_parquet([{names}]) WHERE {where} AND v = 1").fetchall()
    assert found == [(30,)]


def test_files_that_may_have_a_column_named_like_the_index_are_read_separately() -> None:
    scans = [Scan(f"{n}.v2.parquet", (KeyRanges({"k": [Range(n, n + 1)]}),), "p", None) for n in range(200)]
    column = Field("File_Index", LONG, nullable=True)
    with_column = with_added_column(SCHEMA, column, None)
    assert len(list(together.read_together(SCHEMA, scans))) <= together.SCANS_MAX
    for schema in (
        with_column,
        without_column(with_column, "File_Index"),
        Schema([Field("k", LONG)], [], [column]),
    ):
        assert len(list(together.read_together(schema, scans))) == 200
