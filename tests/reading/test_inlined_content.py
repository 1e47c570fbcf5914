"""The content of inlined files in a process: look-ups read it in memory, and engines in local files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dormouse as dm
from dormouse.errors import ObjectDamaged
from dormouse.objects import inlined
from dormouse.reading import bundles, look_ups, page_reads
from dormouse.reading.sql import engine
from dormouse.state.files.inlined import InlinedContent
from tests.support.api import Instance, Table
from tests.support.objects import open_store

SCHEMA = dm.Schema([dm.Field("key", dm.LONG)], values=[dm.Field("value", dm.STRING, nullable=True)])


@pytest.fixture(autouse=True)
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begins without content, as a new process does."""
    monkeypatch.setattr(inlined, "_contents", {})


def new_table(instance: Instance, **properties: Any) -> Table:
    given = {"inline_bytes_max": 65_536, "history_retention_seconds": 3_600, "gc_delay_seconds": 0}
    return instance.create_table("t", SCHEMA, properties=dm.TableProperties(**(given | properties)))


def ingest(table: Table, *keys: int, value: str = "a") -> None:
    table.ingest(pa.table({"key": pa.array(keys, pa.int64()), "value": [value] * len(keys)}))


def values_at(table: Table, key: int) -> list[str]:
    return sorted(table.query({"key": key}).read_all().column("value").to_pylist())


def local_files(table: Table) -> list[Path]:
    return list(table.context.objects.staging_area().folder.glob("*/*.parquet"))


def in_memory(table: Table) -> dict[str, bytes]:
    [contents] = inlined._contents.values()
    return {name: content for name, (content, _) in contents._memory.items()}


def test_look_ups_write_no_local_files_and_engines_do(instance: Instance) -> None:
    table = new_table(instance)
    for number in range(3):
        ingest(table, 1, 5 + number, value=f"{number}")
    assert values_at(table, 1) == ["0", "1", "2"]
    assert values_at(table, 6) == ["1"]
    assert not local_files(table)
    assert table.query().read_all().num_rows == 6
    assert len(local_files(table)) == 3
    assert table.sql("select sum(key) as s from t").read_all().to_pylist() == [{"s": 21}]
    assert values_at(table, 1) == ["0", "1", "2"]


@pytest.mark.parametrize("files", [1, bundles.FILES_MIN])
def test_a_statement_whose_local_files_are_collected_by_another_process_is_planned_again(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    table, real, times = new_table(instance), engine.LocalSession.rows, []
    for key in range(files):
        ingest(table, key)

    def rows(*given: Any) -> Any:
        if not times:
            for path in local_files(table):
                path.unlink()
        times.append(files)
        return real(*given)

    monkeypatch.setattr(engine.LocalSession, "rows", rows)
    found = table.sql("select count(distinct key || value) as n from t").read_all().to_pylist()
    assert (found, times) == ([{"n": files}], [files] * 2)


def test_content_that_leaves_the_memory_is_read_in_local_files(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = new_table(instance)
    monkeypatch.setattr(inlined, "MEMORY_BYTES_MAX", 4_000)
    for number in range(20):
        ingest(table, number, value=f"{number}")
    for number in range(20):
        assert values_at(table, number) == [f"{number}"]
    held = in_memory(table)
    assert 2 <= len(held) <= 8
    assert sum(map(len, held.values())) + len(held) * inlined.ITEM_MEMORY_BYTES <= 4_000
    assert len(local_files(table)) == 20 - len(held)
    monkeypatch.delattr(InlinedContent, "read")
    for _ in range(2):
        for number in range(20):
            assert values_at(table, number) == [f"{number}"]
        assert table.query().read_all().num_rows == 20


def test_old_content_leaves_the_memory_without_a_local_file(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = new_table(instance)
    monkeypatch.setattr(inlined, "MEMORY_BYTES_MAX", 4_000)
    monkeypatch.setattr(inlined, "KEPT_SECONDS", -1)
    for number in range(20):
        ingest(table, number, value=f"{number}")
    for _ in range(2):
        for number in range(20):
            assert values_at(table, number) == [f"{number}"]
    assert not local_files(table)


@pytest.mark.parametrize("reads", ["look-ups", "scans"])
def test_erased_rows_leave_the_memory(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, reads: str
) -> None:
    monkeypatch.setattr(bundles, "FILES_MIN", 2)
    table = new_table(instance)
    for key in range(4):
        ingest(table, key, 99, value=f"secret {key}")
    if reads == "scans":
        assert table.query().read_all().num_rows == 8
    else:
        assert values_at(table, 99) == [f"secret {key}" for key in range(4)]
        assert values_at(table, 2) == ["secret 2"]
    assert [data for data in in_memory(table).values() if b"secret 2" in data]
    assert table.erase({"value": "secret 2"}).is_finished
    assert not [data for data in in_memory(table).values() if b"secret 2" in data]
    assert not [path for path in local_files(table) if b"secret 2" in path.read_bytes()]
    assert values_at(table, 99) == ["secret 0", "secret 1", "secret 3"]
    assert values_at(table, 2) == []


def test_a_reader_that_verifies_reads_local_files(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compares the digest of the bytes that it reads, also if the process has the content in memory."""
    table = new_table(instance)
    ingest(table, 1, 2)
    assert values_at(table, 1) == ["a"]
    given, rows_of = list[bytes | None](), page_reads.rows_of

    def spied(*args: Any, content: bytes | None, **how: Any) -> Any:
        given.append(content)
        return rows_of(*args, content=content, **how)

    monkeypatch.setattr(look_ups, "rows_of", spied)
    assert table.query({"key": 1}, verify=True).read_all().num_rows == 1
    assert given == [None]
    [path] = local_files(table)
    path.write_bytes(path.read_bytes().replace(b"a", b"b"))
    with pytest.raises(ObjectDamaged):
        table.query({"key": 1}, verify=True).read_all()
    assert values_at(table, 1) == ["a"]
    assert given[-1] is not None


def test_a_forked_child_has_content_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the parent may hold the lock of its content."""
    names, asked = [f"data/{number:032}/inlined/{number:032}/0-root.v2.parquet" for number in range(2)], []

    def contents(some: Sequence[str]) -> dict[str, bytes]:
        asked.append(list(some))
        return dict.fromkeys(some, b"from the database")

    store = inlined.inlining(open_store(tmp_path), contents)
    store.add(names[0], b"of the parent")
    [parent] = inlined._contents.values()
    with parent._lock, monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        assert store.lacking(names) == names
        assert store.get(names[0]) == b"from the database"
    assert asked == [[names[0]]]


def test_content_of_another_size_is_left_to_the_engine(tmp_path: Path) -> None:
    store, key = open_store(tmp_path), {SCHEMA.row_keys[0]: 1}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"key": [1, 2], "value": ["a", "b"]}), sink)
    content = sink.getvalue().to_pybytes()
    [found] = page_reads.rows_of(store, "f", len(content), key, ["value"], content=content) or []
    assert found.to_pylist() == [{"value": "a"}]
    assert page_reads.rows_of(store, "f", len(content) + 1, key, ["value"], content=content) is None
