"""Ingests in this process: all kinds of input, both ways to write files, each id once, all rows or none."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from ingested import (
    PLAIN,
    SCHEMA,
    attempts,
    check_holds,
    check_untouched,
    column_set,
    flights,
    flights_table,
    nulled,
    repeated,
)

from dormouse.errors import (
    AttemptAbandoned,
    CommitFailed,
    CommitIdReused,
    CommitOutcomeUnknown,
    DormouseError,
    InvalidData,
    InvalidInput,
    JobFailed,
    ObjectStoreError,
)
from dormouse.objects.staging import temporary_folder
from dormouse.postgres import ConnectionSupplier
from dormouse.writing import ingest as ingest_module
from tests.support.state import TableContext
from tests.support.writing import ingest as ingest_anywhere
from tests.support.writing import ingest_in_process as ingest

WRITING = ["one_file_per_leaf", "one_reference_per_leaf"]
NewTable = Callable[..., TableContext]


@pytest.fixture
def new_flights(dsn: str, supplier: ConnectionSupplier, tmp_path: Path) -> NewTable:
    return lambda **options: flights_table(dsn, supplier, tmp_path, **options)


@pytest.fixture
def table(new_flights: NewTable) -> TableContext:
    return new_flights()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that this test uses for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def left_in(temporary: Path) -> list[Path]:
    """Returns what is left in the folder; that of this process stays, with its lock."""
    own = temporary_folder()
    return [path for path in temporary.rglob("*") if path not in {own.parent, own, own / "owner.lock"}]


@pytest.mark.objects
@pytest.mark.slow
@pytest.mark.parametrize("writing", WRITING)
@pytest.mark.parametrize("memory_bytes", [1 << 28, 1], ids=["in memory", "spilled"])
def test_rows_are_sorted_into_the_files_of_their_leaves(
    new_flights: NewTable, writing: str, memory_bytes: int, temporary: Path
) -> None:
    table = new_flights(ingest_file_writing=writing, row_group_bytes=64 * 1024)
    table.partitions.split("0-1", 0, field="flight")
    table.partitions.split("0-2", 10, field="flight")
    rows = flights(20_000)
    report = ingest(table, rows.to_batches(500), memory_bytes=memory_bytes)
    check_holds(table, rows)
    assert (report.rows, report.references, report.applied) == (20_000, 5, True)
    assert report.files == (5 if writing == "one_file_per_leaf" else 1)
    assert report.bytes == sum(n for name, n in table.objects.list() if name.endswith(".parquet"))
    assert left_in(temporary) == []


@pytest.mark.parametrize("memory_bytes", [1 << 28, 1], ids=["in memory", "spilled"])
def test_an_ingest_applies_no_filter_and_no_aggregate(new_flights: NewTable, memory_bytes: int) -> None:
    """The rows are equal or old. Only compactions and queries aggregate and filter them."""
    table = new_flights(schema=PLAIN, aggregate="max(delay)", filter="age_off(time, 1)")
    rows = repeated(flights(1_000, schema=PLAIN), 2)
    ingest(table, rows.to_batches(500), memory_bytes=memory_bytes)
    check_holds(table, rows)


@pytest.mark.slow
def test_data_can_be_a_table_batch_reader_iterable_or_files(table: TableContext, tmp_path: Path) -> None:
    rows = flights(1_000)
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "_metadata.parquet").touch()
    pq.write_table(rows.slice(0, 600), folder / "a.parquet")
    pq.write_table(rows.slice(600).select(SCHEMA.names[::-1]), folder / "b.parquet", row_group_size=100)
    pq.write_table(rows.slice(0, 0), folder / "c.parquet")
    forms: list[Any] = [
        rows,
        rows.combine_chunks().to_batches()[0],
        rows.to_reader(),
        iter(rows.to_batches(100)),
        folder,
        str(folder / "*.parquet"),
        [folder / "a.parquet", str(folder / "b.parquet")],
    ]
    for form in forms:
        assert ingest(table, form).rows == 1_000
    check_holds(table, repeated(rows, len(forms)))


def test_other_files_may_vanish_from_the_folder_during_an_ingest(
    table: TableContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(flights(10), tmp_path / "in" / "a.parquet")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "nothing")
    passing = tmp_path / "in" / "b.tmp"
    passing.touch()
    stat = Path.stat

    def and_gone(path: Path, **options: Any) -> Any:
        found = stat(path, **options)
        if path == passing:
            path.unlink()
        return found

    monkeypatch.setattr(Path, "stat", and_gone)
    report = ingest_anywhere(
        table, tmp_path / "in", ingest_id=None, engine="auto", progress=None, on_spark=pytest.fail
    )
    assert report.rows == 10


def test_csv_files_are_read_with_the_types_of_the_schema(new_flights: NewTable, tmp_path: Path) -> None:
    table = new_flights(schema=PLAIN)
    rows = flights(500, schema=PLAIN)
    pacsv.write_csv(rows, tmp_path / "flights.csv")
    assert ingest(table, tmp_path / "flights.csv").rows == 500
    check_holds(table, rows)


def test_an_id_is_applied_once(table: TableContext) -> None:
    rows = flights(100)
    assert ingest(table, rows, ingest_id="july").applied
    again = ingest(table, rows, ingest_id="july")
    assert (again.applied, again.rows, again.files) == (False, 0, 0)
    check_holds(table, rows)


def test_two_concurrent_ingests_with_one_id_are_applied_once(table: TableContext) -> None:
    rows = flights(100)

    def overtake(done: int, total: int | None) -> None:
        if done == 100:
            assert ingest(table, rows, ingest_id="july").applied

    assert not ingest(table, rows, ingest_id="july", progress=overtake).applied
    check_holds(table, rows)
    assert attempts(table) == 0


def test_an_ingest_of_no_rows_writes_no_file_and_uses_its_id(table: TableContext) -> None:
    for data, applied in ((flights(0), True), (flights(0), False), ([], False)):
        report = ingest(table, data, ingest_id="nothing")
        assert (report.rows, report.files, report.applied) == (0, 0, applied)
    with pytest.raises(CommitIdReused):
        ingest(table, flights(10), ingest_id="nothing")
    check_untouched(table)


@pytest.mark.slow
def test_progress_reports_rows_done_and_their_total(table: TableContext) -> None:
    seen: list[tuple[int, int | None]] = []
    ingest(table, flights(200_000), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (200_000, 200_000)
    assert len(seen) > 2
    assert seen == sorted(seen)


def test_references_of_a_leaf_split_during_the_ingest_are_pushed_down_later(
    table: TableContext,
) -> None:
    rows = flights(1_000)
    first = table.partitions.leaves()[0].partition_id

    def divide(done: int, total: int | None) -> None:
        table.partitions.split(first, "B6")

    ingest(table, rows, progress=divide)
    [inner] = [r for r in table.store.file_references() if r.partition_id == first]
    assert inner.only_contains_data_for_this_partition
    table.store.split_file_references(list(table.partitions.references_above_leaves()))
    assert {r.partition_id for r in table.store.file_references()} == {
        leaf.partition_id for leaf in table.partitions.leaves()
    }


def bad(rows: pa.Table, tmp_path: Path) -> dict[str, tuple[Any, list[str]]]:
    """Returns data that cannot be ingested, each with words that the error's message must contain."""
    files = {name: tmp_path / name for name in ("empty.parquet", "torn.parquet", "bad.csv", "a.txt")}
    for name in ("empty.parquet", "a.txt"):
        files[name].touch()
    files["torn.parquet"].write_bytes(b"PAR1 and then nothing")
    files["bad.csv"].write_text("carrier,flight,time,delay\nAA,1,1,1.5\nAA,2,1,late\n")
    pq.write_table(rows.drop_columns(["time"]), tmp_path / "short.parquet")
    pq.write_table(nulled(rows, "flight", 3), tmp_path / "nulls.parquet")
    damaged = tmp_path / "damaged.parquet"
    pq.write_table(rows, damaged, compression="zstd")
    content = bytearray(damaged.read_bytes())
    content[20:200] = b"x" * 180
    damaged.write_bytes(content)
    (tmp_path / "void").mkdir()
    late = [*rows.to_batches(), nulled(rows, "carrier", 0).to_batches()[0]]
    return {
        "missing": (rows.drop_columns(["time"]), ["time", "missing"]),
        "extra": (rows.append_column("tail", rows["flight"]), ["tail", "not in the schema"]),
        "mistyped": (column_set(rows, "flight", rows["carrier"]), ["flight", "string", "long"]),
        "null in a key": (nulled(rows, "flight", 3), ["flight", "null", "row 3"]),
        "late": (late, ["carrier", "null"]),
        "empty file": (files["empty.parquet"], ["empty.parquet"]),
        "torn file": (files["torn.parquet"], ["torn.parquet"]),
        "damaged file": (damaged, ["damaged.parquet"]),
        "file with missing column": (tmp_path / "short.parquet", ["short.parquet", "time"]),
        "file with nulls": ([tmp_path / "nulls.parquet"], ["nulls.parquet", "flight"]),
        "csv cell": (files["bad.csv"], ["bad.csv", "column 'delay'", "line 3", "late"]),
        "other file": (files["a.txt"], ["a.txt", ".parquet"]),
        "no file": (tmp_path / "nowhere.parquet", ["nowhere.parquet", "does not exist"]),
        "no match": (str(tmp_path / "*.pq"), ["*.pq"]),
        "empty folder": (tmp_path / "void", ["void", "no .parquet"]),
        "no data": (42, ["int"]),
        "no batches": ([1, 2], ["int"]),
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["parquet", "csv", "table", "batches"])
def test_the_error_of_a_null_has_the_row_number_in_all_data(
    new_flights: NewTable, tmp_path: Path, kind: str
) -> None:
    table, rows = new_flights(schema=PLAIN), flights(150_000, schema=PLAIN)
    rows = nulled(rows, "flight", 140_000)
    if kind == "parquet":
        pq.write_table(rows, tmp_path / "late.parquet", row_group_size=40_000)
    if kind == "csv":
        pacsv.write_csv(rows, tmp_path / "late.csv")
    data = {"table": rows, "batches": rows.to_batches(max_chunksize=7_000)}
    with pytest.raises(
        InvalidData, match=r"'flight' must not be null, but is in row 140,000 \(counted from 0"
    ):
        ingest(table, data.get(kind, tmp_path / f"late.{kind}"))


@pytest.mark.parametrize("memory_bytes", [1 << 28, 1], ids=["in memory", "spilled"])
def test_bad_data_is_one_clear_line_and_leaves_nothing(
    new_flights: NewTable, tmp_path: Path, memory_bytes: int, temporary: Path
) -> None:
    table = new_flights(schema=PLAIN)
    for name, (data, words) in bad(flights(100, schema=PLAIN), tmp_path).items():
        with pytest.raises(InvalidData) as raised:
            ingest(table, data, memory_bytes=memory_bytes)
        message = str(raised.value)
        assert "\n" not in message, name
        assert [word for word in words if word not in message] == [], (name, message)
        check_untouched(table)
        assert left_in(temporary) == []


def test_a_page_with_a_wrong_checksum_is_refused(table: TableContext, tmp_path: Path) -> None:
    path = tmp_path / "rotten.parquet"
    pq.write_table(flights(500), path, write_page_checksum=True, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # changes a value, which only the checksum shows
    path.write_bytes(data)
    with pytest.raises(InvalidData, match=r"rotten\.parquet.*CRC"):
        ingest(table, path)
    check_untouched(table)


def test_csv_for_a_table_with_lists_is_refused(table: TableContext, tmp_path: Path) -> None:
    (tmp_path / "flights.csv").write_text("carrier,flight,time,delay,tags\n")
    with pytest.raises(InvalidData, match=r"flights\.csv.*'tags' is list.*Parquet"):
        ingest(table, tmp_path / "flights.csv")


def test_an_id_must_be_text(table: TableContext) -> None:
    for ingest_id in ("", "a\x00b", 7, "x" * 1_000):
        with pytest.raises(InvalidInput, match="ingest_id"):
            ingest(table, flights(1), ingest_id=ingest_id)  # type: ignore[arg-type]


@contextmanager
def files_at_most(bytes_max: int) -> Iterator[None]:
    """Simulates a full disk for this process alone: writing a file past the limit fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.few(1)
@pytest.mark.parametrize(("memory_bytes", "error"), [(1 << 28, ObjectStoreError), (1 << 20, JobFailed)])
def test_a_full_disk_is_one_clear_line_and_leaves_nothing(
    table: TableContext, temporary: Path, memory_bytes: int, error: type[DormouseError]
) -> None:
    rows = flights(100_000)
    with files_at_most(20_000), pytest.raises(error) as raised:
        ingest(table, rows, ingest_id="july", memory_bytes=memory_bytes)
    assert "File too large" in str(raised.value)
    assert "\n" not in str(raised.value)
    check_untouched(table)
    assert left_in(temporary) == []
    assert ingest(table, rows, ingest_id="july").rows == 100_000


def test_ctrl_c_while_ingesting_leaves_nothing(table: TableContext, temporary: Path) -> None:
    def interrupt(done: int, total: int | None) -> None:
        if done == 100_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ingest(table, flights(100_000), memory_bytes=1, progress=interrupt)
    check_untouched(table)
    assert left_in(temporary) == []


@pytest.mark.objects
def test_ctrl_c_just_after_the_commit_keeps_the_committed_rows(
    table: TableContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit_and_interrupt(*arguments: Any, **options: Any) -> bool:
        commit_files(*arguments, **options)
        raise KeyboardInterrupt

    commit_files = ingest_module.commit_files
    monkeypatch.setattr(ingest_module, "commit_files", commit_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        ingest(table, flights(100))
    check_holds(table, flights(100))


@pytest.mark.objects
def test_an_attempt_that_expired_commits_nothing(new_flights: NewTable) -> None:
    table = new_flights(attempt_expiry_seconds=0)

    def collect(done: int, total: int | None) -> None:
        table.garbage.collect()

    with pytest.raises(AttemptAbandoned):
        ingest(table, flights(100), progress=collect)
    check_untouched(table)


@pytest.mark.objects
@pytest.mark.parametrize("committed", [True, False])
def test_a_commit_with_unknown_outcome_is_looked_up(
    table: TableContext, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    real = ingest_module.run_transaction

    def lost(*arguments: Any, **options: Any) -> None:
        if committed:
            real(*arguments, **options)
        raise CommitOutcomeUnknown("the connection died")

    monkeypatch.setattr(ingest_module, "run_transaction", lost)
    rows = flights(100)
    if committed:
        assert ingest(table, rows, ingest_id="july").applied
        check_holds(table, rows)
    else:
        with pytest.raises(CommitFailed):
            ingest(table, rows, ingest_id="july")
        check_untouched(table)
