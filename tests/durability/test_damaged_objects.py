"""Damaged and replaced objects: none of their rows is returned; the error names file, table and partition."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from query_lake import Lake, sql

from dormouse.errors import ObjectDamaged, ObjectNotFound
from dormouse.reading.sql.views import opened
from tests.standard import OF_K_AND_TEXTS
from tests.support.objects import ObjectStore
from tests.support.reading import query
from tests.support.writing import ingest_in_process as ingest

Reader = Callable[[Lake], Any]


def by_query(lake: Lake) -> Any:
    return query(lake.context, {"k": 2}).read_all().to_pylist()


def by_scan(lake: Lake) -> Any:
    return query(lake.context).read_all().to_pylist()


def by_sql(lake: Lake) -> Any:
    return sql({"t": lake.context}, "select * from t").read_all().to_pylist()


def by_limited_sql(lake: Lake) -> Any:
    return sql({"t": lake.context}, "select * from t limit 1").read_all().to_pylist()


def by_view(lake: Lake) -> Any:
    with opened(lake.context.objects, {"t": lake.context}, {}) as conn:
        return conn.execute("select * from t").fetchall()


READERS = pytest.mark.parametrize("read", [by_query, by_scan, by_sql, by_limited_sql, by_view])


@pytest.fixture
def lake(dsn: str, supplier: Any, tmp_path: Path) -> Lake:
    made = Lake(dsn, supplier, tmp_path, OF_K_AND_TEXTS)
    made.add([{"k": k, "v": str(k)} for k in range(100)])
    return made


def path_of(lake: Lake) -> tuple[str, Path]:
    [file] = lake.context.store.all_files(0).files
    path = lake.context.objects.local_path(file.filename)
    assert path is not None
    return file.filename, path


def replaced(lake: Lake, table: pa.Table) -> str:
    name, path = path_of(lake)
    path.unlink()
    pq.write_table(table, path)
    return name


def unknown_sizes(lake: Lake) -> None:
    with lake.context.supplier.connection() as conn:
        conn.execute("update file set byte_count = 0")


@READERS
def test_an_object_of_another_size_is_refused_before_a_row_of_it_is_used(lake: Lake, read: Reader) -> None:
    assert read(lake)  # the file's facts that this process cached do not hide the damage
    name = replaced(lake, lake.table([{"k": k, "v": "wrong"} for k in range(40)]))
    with pytest.raises((ObjectDamaged, duckdb.Error)) as raised:
        read(lake)
    said = str(raised.value)
    size = lake.context.objects.size(name)
    assert f"file {name!r}" in said and "table 't'" in said and "partition 'root'" in said
    assert f"has {size:,} bytes" in said and "'dormouse check --deep'" in said and "backup" in said


@READERS
def test_an_unknown_size_is_not_checked(lake: Lake, read: Reader) -> None:
    replaced(lake, lake.table([{"k": 2, "v": "another"}]))
    unknown_sizes(lake)
    assert len(read(lake)) == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("read", [by_query, by_scan, by_sql])
def test_the_size_of_an_object_in_s3_is_checked_at_most_once(
    dsn: str, supplier: Any, tmp_path: Path, s3_store: ObjectStore, read: Reader
) -> None:
    sizes = Sizes(s3_store)
    lake = Lake(dsn, supplier, tmp_path, OF_K_AND_TEXTS, objects=sizes)
    lake.add([{"k": k, "v": str(k)} for k in range(100)])
    sizes.asked.clear()
    for _ in range(3):
        assert read(lake)
    # a query knows the size from PostgreSQL, and would not find the footer of a file of another size
    assert len(sizes.asked) == (read is not by_query)
    [other] = lake.add([{"k": k, "v": "another"} for k in range(7)])
    other_bytes = s3_store.get(other)
    s3_store.delete([other])
    s3_store.put(other, b"more" + other_bytes)
    with pytest.raises(ObjectDamaged, match=other):
        read(lake)
    s3_store.delete([other])
    with pytest.raises(ObjectNotFound, match=other):
        read(lake)


class Sizes:
    """A store that records the names whose sizes are requested."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.asked: list[str] = []

    def size(self, name: str) -> int:
        self.asked.append(name)
        return self._store.size(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


FOREIGN = [
    pa.table({"x": pa.array(["a", "b"])}),
    pa.table({"k": pa.array(["a", "b"]), "v": pa.array(["a", "b"])}),
    None,
]


@pytest.mark.parametrize("foreign", FOREIGN, ids=["other columns", "other types", "no Parquet"])
@READERS
def test_a_foreign_file_is_named_with_its_table(lake: Lake, read: Reader, foreign: Any) -> None:
    if read in {by_sql, by_limited_sql} and foreign is FOREIGN[1]:
        pytest.skip("DuckDB takes the types that the first file has: sizes and checks tell")
    name, path = path_of(lake)
    if foreign is None:
        path.chmod(0o600)
        path.write_bytes(b"hello, I am another file")
    else:
        replaced(lake, foreign)
    unknown_sizes(lake)
    with pytest.raises((ObjectDamaged, duckdb.Error)) as raised:
        read(lake)
    said = str(raised.value)
    assert isinstance(raised.value, ObjectDamaged) or read is by_view
    assert re.search(re.escape(name), said) and "table 't'" in said and "\n" not in said


@pytest.mark.parametrize("read", [by_scan, by_sql])
def test_a_read_that_fails_at_a_flipped_bit_names_the_file(
    dsn: str, supplier: Any, tmp_path: Path, read: Reader
) -> None:
    """The error of a query engine names no file. Dormouse compares the files' digests to find the damaged
    file.
    """
    lake = Lake(dsn, supplier, tmp_path, OF_K_AND_TEXTS)
    rng = random.Random(1)
    ingest(lake.context, lake.table([{"k": k, "v": str(rng.random())} for k in range(3_000)]))
    name, path = path_of(lake)
    path.chmod(0o600)
    whole, failed = path.read_bytes(), 0
    for number in range(40):
        data = bytearray(whole)
        data[rng.choice([rng.randrange(len(data)), -1 - rng.randrange(600)])] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        os.utime(path, (number, number))  # engines cache footers by modification time
        try:
            read(lake)
        except ObjectDamaged as error:
            failed += 1
            assert error.filename == name
    assert failed > 5
