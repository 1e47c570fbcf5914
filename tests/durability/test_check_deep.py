"""Deep checks: real damage within files is found, with recorded digests and without."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.checked import LAYOUTS, lake_of, names, names_of_leaves, problem_kinds, sql
from tests.support.api import Instance
from tests.support.objects import SKETCHES_SUFFIX

pytestmark = pytest.mark.objects


@pytest.fixture(params=LAYOUTS)
def lake(request: pytest.FixtureRequest, dsn: str, tmp_path: Path) -> Iterator[Instance]:
    with lake_of(dsn, tmp_path, request.param) as instance:
        yield instance


@pytest.fixture
def objects(tmp_path: Path) -> Path:
    return tmp_path / "objects"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


@pytest.mark.slow
def test_a_flipped_bit_is_found(lake: Instance, objects: Path) -> None:
    path = objects / names(lake)[0]
    whole = path.read_bytes()
    for at in (1, *range(5, len(whole), len(whole) // 30), len(whole) - 6):  # pages, page index, footer
        flip(path, at)
        assert lake.check().problems == ()
        assert problem_kinds(lake, deep=True) == {"object_digest"}
        path.write_bytes(whole)
    flip(path.with_name(path.name + SKETCHES_SUFFIX), 20)
    assert problem_kinds(lake, deep=True) == {"object_unreadable"}


def forget_digests(instance: Instance) -> None:
    """Removes the recorded digests. Files written before digests were introduced have none."""
    match instance.table("t").layout:
        case "file_table":
            sql(instance, "update {file} set digest = null")
        case "salted_counts":
            sql(instance, "update {file_count} set digest = null")
        case _:
            sql(instance, "update {file_reference} set file_digest = null")


@pytest.mark.slow
def test_damage_is_found_without_a_digest_where_reading_shows_it(lake: Instance, objects: Path) -> None:
    """The flipped bits are near the end of the file. For other damage of a footer, Arrow ends its process."""
    forget_digests(lake)
    assert lake.check(deep=True).problems == ()
    if lake.table("t").layout != "file_table":
        return  # the other layouts behave alike, and the rest of the test takes long
    path = objects / names(lake)[0]
    whole = path.read_bytes()
    kinds = set()
    for at in range(len(whole) - 330, len(whole), 60):
        forget_digests(lake)
        flip(path, at)
        kinds |= problem_kinds(lake, deep=True)
        path.write_bytes(whole)
    assert "object_unreadable" in kinds
    assert kinds <= {"object_unreadable", "row_count", "key_range", "not_sorted", "statistics"}


@pytest.mark.slow
def test_files_without_a_digest_that_read_well_get_one(
    lake: Instance, dsn: str, objects: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    digests = [file.digest for file in lake.table("t").files.all_files(0).files]
    assert None not in digests
    forget_digests(lake)
    assert lake.check().problems == ()
    assert {file.digest for file in lake.table("t").files.all_files(0).files} == {None}
    path = objects / names(lake)[0]
    whole = path.read_bytes()
    rewrite(path, lambda rows: rows.slice(1))
    assert problem_kinds(lake, deep=True)
    path.write_bytes(whole)
    rest = [file.digest for file in lake.table("t").files.all_files(0).files]
    assert [digest for digest in rest if digest is None] == [None]
    where = ("--dsn", dsn, "--objects", objects.as_uri())
    assert cli("check", "--deep", *where)[0] == 0
    assert rest == [file.digest for file in lake.table("t").files.all_files(0).files]
    assert cli("check", "--note-digests", *where)[0] != 0
    assert cli("check", "--deep", "--note-digests", *where)[0] == 0
    assert [file.digest for file in lake.table("t").files.all_files(0).files] == digests


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table], **how: bool) -> None:
    table = change(pq.read_table(path, partitioning=None))
    pq.write_table(table, path, **how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("row_count", lambda rows: rows.slice(0, rows.num_rows - 1)),
        ("key_range", lambda rows: rows.slice(1)),
        ("not_sorted", lambda rows: pa.concat_tables([rows.slice(50), rows.slice(0, 50)])),
        (
            "not_sorted",
            lambda rows: pa.concat_tables(
                [rows.slice(0, 1), rows.slice(2, 1), rows.slice(1, 1), rows.slice(3)]
            ),
        ),
    ],
)
def test_replaced_rows_are_found(
    lake: Instance, objects: Path, kind: str, change: Callable[[pa.Table], pa.Table]
) -> None:
    rewrite(objects / names(lake)[0], change)
    assert "object_digest" in problem_kinds(lake, deep=True)
    forget_digests(lake)
    assert kind in problem_kinds(lake, deep=True)


@pytest.mark.slow
def test_swapped_files_are_found(lake: Instance, objects: Path) -> None:
    one, *_, other = [
        r.filename
        for leaf in names_of_leaves(lake)
        for r in lake.table("t").files.file_references_in([leaf])
        if r.only_contains_data_for_this_partition
    ]
    shutil.move(objects / one, objects / "x")
    shutil.move(objects / other, objects / one)
    shutil.move(objects / "x", objects / other)
    problems = lake.check(deep=True).problems
    assert {p.filename for p in problems if p.kind == "object_digest"} == {one, other}
    forget_digests(lake)
    problems = lake.check(deep=True).problems
    assert {(p.kind, p.filename) for p in problems} >= {("key_range", one), ("key_range", other)}
    assert {p.partition_id for p in problems if p.filename in (one, other)} >= set(names_of_leaves(lake))
