"""Commit ids that are reused with another request are refused, and never taken for a repetition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ingested import attempts, check_holds, flights, flights_table

import dormouse as dm
from dormouse.client import connect
from dormouse.errors import CommitIdReused, RowLockLost
from dormouse.postgres import ConnectionSupplier
from dormouse.rows.changes import Changed
from tests.serving import http_post, serving
from tests.stored import query
from tests.support.api import Instance
from tests.support.state import TableContext
from tests.support.writing import ingest_in_process as ingest
from tests.working import until


@pytest.fixture
def table(dsn: str, supplier: ConnectionSupplier, tmp_path: Path) -> TableContext:
    return flights_table(dsn, supplier, tmp_path)


def test_an_id_with_other_rows_is_refused(table: TableContext) -> None:
    """An id reused with other rows is a mistake, and not a repetition."""
    rows = flights(100)
    assert ingest(table, rows, ingest_id="july").applied
    with pytest.raises(CommitIdReused, match="ingest id 'july' was used before, for other data"):
        ingest(table, flights(101), ingest_id="july")
    same = pa.concat_tables([rows.slice(0, 7), rows.slice(7)])
    assert not ingest(table, same, ingest_id="july").applied
    assert not ingest(
        table, same.to_reader(), ingest_id="july"
    ).applied  # the rows of a stream are not compared
    check_holds(table, rows)


def test_an_id_with_another_file_is_refused(table: TableContext, tmp_path: Path) -> None:
    """The contents of files are compared, and not their paths."""
    rows = flights(100)
    for name, content in (("a.parquet", rows), ("b.parquet", rows), ("other.parquet", flights(99))):
        pq.write_table(content, tmp_path / name)
    assert ingest(table, tmp_path / "a.parquet", ingest_id="july").applied
    assert not ingest(table, tmp_path / "b.parquet", ingest_id="july").applied
    for other in (tmp_path / "other.parquet", [tmp_path / "a.parquet", tmp_path / "b.parquet"], flights(99)):
        with pytest.raises(CommitIdReused, match="nothing was added"):
            ingest(table, other, ingest_id="july")
    (tmp_path / "a.parquet").unlink()
    assert not ingest(table, tmp_path / "a.parquet", ingest_id="july").applied
    check_holds(table, rows)


def test_an_id_that_a_concurrent_ingest_used_for_other_rows_is_refused(table: TableContext) -> None:
    rows = flights(100)

    def overtake(done: int, total: int | None) -> None:
        if done == 50:
            assert ingest(table, rows, ingest_id="july").applied

    with pytest.raises(CommitIdReused):
        ingest(table, flights(50), ingest_id="july", progress=overtake)
    check_holds(table, rows)
    assert attempts(table) == 0


def test_an_id_with_another_request_is_refused(instance: Instance) -> None:
    """Covers a request before the job ends, and after."""
    jobs = instance.jobs
    ran: list[Any] = []
    jobs.start("work", {"n": 1}, job_id="mine")
    for _ in range(2):
        for other in ({"n": 2}, {"n": 1, "m": None}, None):
            with pytest.raises(CommitIdReused, match="'mine' belongs to a job with another request"):
                jobs.start("work", other, job_id="mine")
        jobs.worker({"work": lambda request, progress: ran.append(request)}).run(drain=True)
    assert ran == [{"n": 1}]
    assert len(jobs.list()) == 1


@pytest.mark.slow
def test_a_change_of_rows_that_changes_nothing_keeps_its_id(instance: Instance, tmp_path: Path) -> None:
    """A repetition with the id returns the first result, also after other changes.

    Another change with the id is refused.
    """
    samples = instance.create_row_table("samples", [dm.Column("name", "STRING")])
    samples.change([], change_id="nothing")
    samples.change([dm.Insert([{"name": "a"}, {"name": "b"}])])
    path, same = tmp_path / "rows.csv", [dm.Patch([{"ROW_ID": 1, "ROW_VERSION": 1, "name": "a"}])]
    samples.download_csv(path)
    content = path.read_text("utf-8")

    def ask() -> list[Changed]:
        upserted = samples.upsert([{"name": "b"}], on=["name"], change_id="upserted")
        uploaded = samples.upload_csv(path, change_id="uploaded")
        return [samples.change(same, change_id="patched"), upserted, uploaded]

    assert samples.change(same, dry_run=True, change_id="patched").changed["unchanged"] == 1
    first = ask()
    assert [one.changed["unchanged"] for one in first] == [1, 1, 2]
    assert [list(one.versions) for one in first] == [[], [], []]
    assert ask() == first
    samples.change([dm.Patch([{"ROW_ID": 1, "ROW_VERSION": 1, "name": "c"}])])
    assert ask() == first  # a change without an id would be in conflict
    path.write_text(content.replace("b", "d"), "utf-8")
    others: list[Callable[[], Changed]] = [
        lambda: samples.change([dm.Insert([{"name": "d"}])], change_id="nothing"),
        lambda: samples.change([dm.Insert([{"name": "d"}])], change_id="patched"),
        lambda: samples.upsert([{"name": "d"}], on=["name"], change_id="upserted"),
        lambda: samples.upload_csv(path, change_id="uploaded"),
    ]
    for other in others:
        with pytest.raises(CommitIdReused, match="nothing was changed"):
            other()
    assert samples.version() == 2
    assert len(samples.history()) == 2
    with samples.locks.write(1):  # each change has released the lock
        pass


def test_a_change_that_lost_its_lock_keeps_no_id(instance: Instance) -> None:
    """Another worker may have changed the rows since the lock was lost."""
    samples = instance.create_row_table("samples", [dm.Column("name", "STRING")])
    samples.change([dm.Insert([{"name": "a"}])])

    def lose(done: int, total: int | None) -> None:
        query(instance._supplier, "delete from row_lock")

    same = [dm.Patch([{"ROW_ID": 1, "ROW_VERSION": 1, "name": "a"}])]
    with pytest.raises(RowLockLost):
        samples.change(same, change_id="one", progress=lose)
    assert samples.change([dm.Insert([{"name": "b"}])], change_id="one").changed["inserted"] == 1


@pytest.mark.slow
def test_the_header_of_a_request_names_its_job(instance: Instance) -> None:
    """`Idempotency-Key` is the id of the job, quoted or not. The same key with another body is refused."""
    instance.create_row_table("samples", [dm.Column("name", "STRING")])
    with serving(instance, job_threads=2, shutdown_seconds_max=10) as url, connect(url) as client:
        samples = client.row_table("samples")
        body = {
            "kind": "row_change",
            "request": {"table": "samples", "changes": [{"insert": [{"name": "a"}]}]},
        }
        asked: list[dict[str, Any]] = [
            {"path": "jobs", "json": body},
            {"path": "rows/samples/csv", "content": b"name\nb\n", "headers": {"content-type": "text/csv"}},
        ]
        other = {"json": body | {"request": {"table": "samples", "changes": [{"remove": [[1, 1]]}]}}}
        for number, (sent, changed) in enumerate(zip(asked, (other, {"content": b"name\nc\n"}), strict=True)):
            key = {"Idempotency-Key": f"one-{number}"}

            def post(sent: dict[str, Any], **headers: str) -> httpx.Response:
                given = {**sent, "headers": sent.get("headers", {}) | headers}
                return http_post(f"{url}/v1/{given.pop('path')}", **given)

            first = post(sent, **key)
            assert (first.status_code, first.json()["job_id"]) == (202, f"one-{number}")
            again = post(sent, **{"Idempotency-Key": f'"one-{number}"'})
            assert (again.status_code, again.json()["job_id"]) == (202, f"one-{number}")
            refused = post({**sent, **changed}, **key)
            assert (refused.status_code, refused.json()["type"]) == (409, "urn:dormouse:commit-id-reused")
            until(lambda number=number: client.jobs.status(f"one-{number}").has_ended)
        two = http_post(f"{url}/v1/jobs", json=body | {"job_id": "two"}, headers={"Idempotency-Key": "one"})
        assert (two.status_code, "two ids" in two.json()["detail"]) == (400, True)
        assert samples.query("select name from samples order by name", wait_seconds=60).rows == [
            ("a",),
            ("b",),
        ]


@pytest.mark.slow
def test_a_file_that_is_sent_with_the_id_of_another_is_refused(instance: Instance, tmp_path: Path) -> None:
    """The service does not keep the refused file."""
    instance.create_row_table("samples", [dm.Column("name", "STRING")])
    path = tmp_path / "rows.csv"
    path.write_text("name\na\n", "utf-8")
    with serving(instance, job_threads=2, shutdown_seconds_max=10) as url, connect(url) as client:
        samples = client.row_table("samples")
        first = samples.upload_csv(path, change_id="one")
        assert samples.upload_csv(path, change_id="one") == first
        assert list(instance.objects.list("answers/")) == []
        path.write_text("name\nb\n", "utf-8")
        with pytest.raises(CommitIdReused, match="'one' was used before, for another change"):
            samples.upload_csv(path, change_id="one")
        with pytest.raises(CommitIdReused, match="'one' was used before, for another change"):
            samples.upload_csv(path, change_id="one", header=False)
        assert list(instance.objects.list("answers/")) == []
        assert samples.version() == 1
        client.create_row_table("more", [dm.Column("name", "STRING")])
        more, insert = client.row_table("more"), [dm.Insert([{"name": "a"}])]
        assert more.change(insert, change_id="two") == more.change(insert, change_id="two")
        with pytest.raises(CommitIdReused, match="'two' was used before, for another change"):
            more.change([dm.Insert([{"name": "b"}])], change_id="two")
        assert more.version() == 1


@pytest.mark.slow
def test_an_id_used_without_rows_cannot_be_reused_with_rows(table: TableContext) -> None:
    """Data without rows counts as the same data, whatever its Python type. Any rows are other data."""
    rows = flights(10)
    none = rows.slice(0, 0)
    kinds: dict[str, Any] = {
        "list": lambda: [],
        "columns": lambda: {name: [] for name in rows.column_names},
        "table": lambda: none,
        "frame": none.to_pandas,
        "reader": none.to_reader,
        "generator": lambda: iter([]),
        "batches": lambda: iter([none]),
    }
    for name, empty in kinds.items():
        assert ingest(table, empty(), ingest_id=name).applied
        for again in kinds.values():
            assert not ingest(table, again(), ingest_id=name).applied
        for some in (rows, rows.to_pylist(), rows.to_reader(), iter([none, rows])):
            with pytest.raises(CommitIdReused, match="nothing was added"):
                ingest(table, some, ingest_id=name)
    check_holds(table, none)
    for number, some in enumerate((rows, rows.to_pylist(), rows.to_reader(), iter([none, rows]))):
        assert ingest(table, some, ingest_id=f"rows {number}").rows == 10
    for number, empty in enumerate(kinds.values()):
        for id_ in ("rows 0", "rows 1"):
            with pytest.raises(CommitIdReused, match="nothing was added"):
                ingest(table, empty(), ingest_id=id_)
        assert not ingest(table, empty(), ingest_id="rows 2").applied, (
            number
        )  # the rows of a stream are not compared
    check_holds(table, pa.concat_tables([rows] * 4))
