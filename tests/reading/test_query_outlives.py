"""Queries whose files are compacted and collected while they are read return each row once and in order."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from outliving import EVENTS, GONE, NewLake, bag, event, filenames, filled, key, read, replace_all_files
from query_lake import Lake

from dormouse.errors import ObjectNotFound, ObjectStoreError, QueryOvertaken
from dormouse.postgres import ConnectionSupplier, run_transaction
from dormouse.reading import executor, scan_session, streams
from dormouse.reading.keyed import HeldBack
from tests.stored import assign, replace
from tests.support.model import Range
from tests.support.objects import ObjectStore
from tests.support.reading import query

_names = count()


@pytest.fixture
def new_lake(shared_supplier: tuple[str, ConnectionSupplier], tmp_path: Path) -> NewLake:
    dsn, supplier = shared_supplier
    return lambda schema=EVENTS, **more: Lake(
        dsn, supplier, tmp_path, schema, name=f"outlived_{next(_names)}", **{**GONE, **more}
    )


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits batches to 16 rows, so that files can disappear after any few rows."""
    monkeypatch.setattr(streams, "AHEAD_BYTES", 1)
    monkeypatch.setattr(scan_session, "_key_sessions", {})
    monkeypatch.setitem(scan_session._OPTIONS, "datafusion.execution.batch_size", "16")


def replans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns a list that gets (missing file, position that the query had reached) at each new plan."""
    made: list[Any] = []
    again = executor._Execution._again

    def spy(self: Any, missing: Any, futile: int) -> Any:
        made.append((missing.filename, self._held.reached))
        return again(self, missing, futile)

    monkeypatch.setattr(executor._Execution, "_again", spy)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "replans_min"),
    [
        (None, 2),
        pytest.param({"name": Range("b", "g")}, 2, marks=pytest.mark.slow),
        ({"name": ["a", "c", "h"]}, 1),  # the rows of a group come at once
        pytest.param({"code": [b"", b"\xff"]}, 2, marks=pytest.mark.slow),
        ({"time": Range(-1, 2), "code": Range(b"\x00", None)}, 2),
    ],
)
def test_a_query_outlives_all_files_of_its_plan_several_times(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch, where: Any, replans_min: int
) -> None:
    lake = filled(new_lake)
    expected = [row for row in lake.all.to_pylist() if meets(row, where)]
    made = replans(monkeypatch)
    found = read(lake, query(lake.context, where), (0, 20, 40))
    assert len(made) >= replans_min
    assert bag(found) == bag(expected)
    assert [key(row) for row in found] == sorted(map(key, expected))


def meets(row: dict[str, Any], where: dict[str, Any] | None) -> bool:
    def column_meets(name: str, wanted: Any) -> bool:
        if isinstance(wanted, list):
            return row[name] in wanted
        return (wanted.min is None or wanted.min <= row[name]) and (
            wanted.max is None or row[name] < wanted.max
        )

    return all(column_meets(name, wanted) for name, wanted in (where or {}).items())


@pytest.mark.few(1)
@pytest.mark.parametrize("limit", [1, 400, 5_000])
def test_a_limit_counts_rows_once_however_often_it_is_planned(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    lake = filled(new_lake)
    made = replans(monkeypatch)
    found = read(lake, query(lake.context, limit=limit), (0, 20))
    assert [key(row) for row in found] == sorted(map(key, lake.all.to_pylist()))[:limit]
    assert not bag(found) - bag(lake.all.to_pylist())
    assert len(made) >= (limit > 300)


@pytest.mark.slow
def test_columns_without_keys_come_in_key_order(new_lake: NewLake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = filled(new_lake)
    made = replans(monkeypatch)
    reader = query(lake.context, columns=["n"])
    assert reader.schema.names == ["n"]
    found = [row["n"] for row in read(lake, reader, (0, 20))]
    assert Counter(found) == Counter(lake.all["n"].to_pylist())
    key_of = {row["n"]: key(row) for row in lake.all.to_pylist()}
    assert [key_of[n] for n in found] == sorted(key_of[n] for n in found)
    assert made


@pytest.mark.slow
def test_rows_of_equal_key_are_aggregated_once(new_lake: NewLake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = filled(new_lake, aggregate="sum(n)")
    made = replans(monkeypatch)
    found = read(lake, query(lake.context), (0, 1))
    sums: Counter[tuple[Any, ...]] = Counter()
    for row in lake.all.to_pylist():
        sums[key(row)] += row["n"]
    assert [(*key(row), row["n"]) for row in found] == [(*k, n) for k, n in sorted(sums.items())]
    assert made


def test_rows_of_one_key_fill_many_batches(new_lake: NewLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query returns rows of one key only when it has read all of them.

    If a file disappears before, it drops these rows and reads them again from the new files.
    """
    lake = new_lake(split_points=["d"])
    one = {"name": "b", "code": b"", "time": 1}
    for n in range(4):
        lake.add(
            [{**one, "n": n * 100 + i} for i in range(100)] + [{**one, "time": t, "n": t} for t in (0, 2)]
        )
    made = replans(monkeypatch)
    taken = []
    take = HeldBack.take

    def spy(self: HeldBack, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        yield from take(self, batch)
        taken.append(batch.num_rows)
        if len(taken) == 5:
            assert replace_all_files(lake)

    monkeypatch.setattr(HeldBack, "take", spy)
    assert bag(query(lake.context).read_all().to_pylist()) == bag(lake.all.to_pylist())
    [(_, reached)] = made
    assert reached.key == ("b", b"", 1)
    assert not reached.given


def test_rows_of_one_key_are_held_back_only_up_to_a_limit(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key has more rows than a query holds back, so the query has returned some of them.

    When the files disappear, it raises an error, since it could return rows twice.
    """
    lake = new_lake()
    lake.add([{"name": "b", "code": b"", "time": 1, "n": i} for i in range(2_000)])
    monkeypatch.setattr(HeldBack.__init__, "__defaults__", (1_000,))
    reader = query(lake.context)
    first = reader.read_next_batch().to_pylist()
    assert first
    replace_all_files(lake)
    with pytest.raises(ObjectNotFound, match="collected while rows with one key were read") as error:
        for batch in reader:
            first += batch.to_pylist()
    assert len(str(error.value).splitlines()) == 1
    assert not bag(first) - bag(lake.all.to_pylist())
    assert bag(query(lake.context).read_all().to_pylist()) == bag(lake.all.to_pylist())


def test_after_too_many_rows_of_one_key_a_query_outlives_its_files_again(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = new_lake()
    lake.add([{"name": "b", "code": b"", "time": 1, "n": i} for i in range(200)])
    lake.add([{"name": "c", "code": b"", "time": i, "n": i} for i in range(500)])
    monkeypatch.setattr(HeldBack.__init__, "__defaults__", (1_000,))
    found: list[dict[str, Any]] = []
    replaced = False
    for batch in query(lake.context):
        found += batch.to_pylist()
        if found[-1]["name"] == "c" and not replaced:
            replaced = bool(replace_all_files(lake))
    assert bag(found) == bag(lake.all.to_pylist())


def test_a_lost_file_is_an_error_without_retries(new_lake: NewLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The query returns the rows before the lost file. Then it raises an error of one line.

    The error names the file and the way to restore it.
    """
    lake = filled(new_lake)
    made = replans(monkeypatch)
    reader = query(lake.context)
    first = reader.read_next_batch().to_pylist()
    lost = lake.context.store.file_references_in([lake.context.partitions.leaves()[2].partition_id])
    lake.context.objects.delete([name := min(one.filename for one in lost)])
    with pytest.raises(ObjectNotFound, match=re.escape(name)) as error:
        for batch in reader:
            first += batch.to_pylist()
    assert "it is lost, not collected" in str(error.value)
    assert "from a backup" in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert len(made) == 1
    before = [row for row in lake.all.to_pylist() if row["name"] < "f"]
    assert bag(row for row in first if row["name"] < "f") == bag(before)


def test_a_lost_file_with_cached_metadata_is_an_error(new_lake: NewLake) -> None:
    """The engine has cached the metadata of files, and must still notice that a file is lost."""
    lake = filled(new_lake, rows=2_000)
    assert query(lake.context).read_all().num_rows == 6_000
    everything = filenames(lake)
    lake.context.objects.delete(everything)
    for where in (None, {"name": "a"}, {"name": "a", "code": b"", "time": 1}):
        with pytest.raises(ObjectNotFound, match="it is lost, not collected"):
            query(lake.context, where).read_all()


def test_a_file_that_is_put_back_can_be_read_again(new_lake: NewLake) -> None:
    lake = filled(new_lake)
    [name, *_] = sorted(filenames(lake))
    content = lake.context.objects.get(name)
    lake.context.objects.delete([name])
    with pytest.raises(ObjectNotFound, match="it is lost, not collected"):
        query(lake.context).read_all()
    lake.context.objects.put(name, content)
    assert bag(query(lake.context).read_all().to_pylist()) == bag(lake.all.to_pylist())


@pytest.mark.parametrize("ingest_first", [False, True])
def test_a_query_never_sees_a_part_of_an_ingest(new_lake: NewLake, ingest_first: bool) -> None:
    """After an ingest, compactions replace the query's files. The new files may have rows of the ingest.

    The query fails, because it must not return them.
    """
    lake = filled(new_lake)
    reader = query(lake.context)
    reader.read_next_batch()
    if not ingest_first:
        replace_all_files(lake)
    lake.add([event(random.Random(2)) for _ in range(50)])
    if ingest_first:
        replace_all_files(lake)
    with pytest.raises(QueryOvertaken, match="gc_delay_seconds"):
        reader.read_all()


def test_a_compaction_hides_no_ingest_of_its_transaction(new_lake: NewLake) -> None:
    """A transaction compacts and ingests. The compaction removes as many rows as the ingest adds.

    So the number of rows does not show the ingest.
    """
    lake = filled(new_lake, aggregate="sum(n)")
    context, leaf = lake.context, lake.context.partitions.leaves()[-1].partition_id
    reader = query(context)
    reader.read_next_batch()
    inputs = list(context.store.file_references_in([leaf]))
    left = lake.table(query(context, {"name": Range("f", None)}).read_all().to_pylist())
    taken_away = sum(one.row_count for one in inputs) - left.num_rows
    assert taken_away > 0
    new = lake.table([event(random.Random(n), "fgh") for n in range(taken_away)])
    output, ingest = (lake.written(table, {leaf: table.num_rows}) for table in (left, new))
    names = [one.filename for one in inputs]
    context.store.assign_job_ids([assign("j", leaf, *names)])
    done = replace("j", names, output.filename, leaf, left.num_rows)

    def both(conn: psycopg.Connection[Any]) -> None:
        context.store.replace_file_references([done], conn=conn)
        context.store.add_files_with_references([ingest], conn=conn)

    run_transaction(context.supplier, both)
    context.garbage.collect()
    with pytest.raises(QueryOvertaken, match="gc_delay_seconds"):
        reader.read_all()


@pytest.mark.slow
def test_a_query_goes_on_beside_an_ingest_of_other_keys(new_lake: NewLake) -> None:
    lake = filled(new_lake)
    expected = [row for row in lake.all.to_pylist() if row["name"] < "d"]
    reader = query(lake.context, {"name": Range(None, "d")})
    lake.add([event(random.Random(2), "efgh") for _ in range(50)])
    assert bag(read(lake, reader, (0, 10))) == bag(expected)


def test_a_damaged_file_is_not_reported_as_lost(new_lake: NewLake) -> None:
    lake = filled(new_lake)
    reader = query(lake.context)
    reader.read_next_batch()
    lost = lake.context.store.file_references_in([lake.context.partitions.leaves()[2].partition_id])
    name = min(one.filename for one in lost)
    path = lake.context.objects.local_path(name)
    assert path is not None
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ObjectStoreError, match=re.escape(name)) as error:
        list(reader)
    assert not isinstance(error.value, ObjectNotFound)


@pytest.mark.slow
def test_a_query_fails_if_its_files_are_collected_again_and_again(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each planned file is collected before it is read. The query must not retry without limit."""
    lake = filled(new_lake)
    planned = executor.plan_query

    def plan_then_replace(*args: Any, **moment: Any) -> Any:
        groups = tuple(planned(*args, **moment))
        replace_all_files(lake)
        return groups

    monkeypatch.setattr(executor, "plan_query", plan_then_replace)
    monkeypatch.setattr(executor, "REPLANS_MAX", 3)
    with pytest.raises(ObjectNotFound, match="raise the table's property gc_delay_seconds"):
        query(lake.context).read_all()


@pytest.mark.slow
def test_queries_of_objects_in_s3_outlive_them(
    dsn: str,
    supplier: ConnectionSupplier,
    tmp_path: Path,
    s3_store: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lake = Lake(dsn, supplier, tmp_path, EVENTS, objects=s3_store, split_points=["d", "f"], **GONE)
    rng = random.Random(2)
    for n in range(2):
        lake.add([event(rng) for _ in range(300)], one_file=n == 1)
    made = replans(monkeypatch)
    assert bag(read(lake, query(lake.context), (0, 4))) == bag(lake.all.to_pylist())
    assert made
    lake.context.objects.delete([name := min(filenames(lake))])
    with pytest.raises(ObjectNotFound, match=f"{re.escape(name)}.*it is lost, not collected"):
        query(lake.context).read_all()
