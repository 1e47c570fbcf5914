"""Jobs of row tables: each does its work once, and answers as of the version that its request names."""

from __future__ import annotations

from typing import Any

import pytest

import dormouse as dm
from dormouse.errors import InstanceError, SnapshotExists, SnapshotNotFound, TableAlreadyExists
from dormouse.verbs.rows import RowChangeRequest, RowCreateRequest, SnapshotRequest
from tests.support.api import Instance
from tests.support.jobs import Progress
from tests.support.rows import RowTable
from tests.support.verbs import Call
from tests.support.verbs import rows as row_verbs

COLUMNS = [dm.Column("name", "STRING")]


@pytest.fixture
def rows(instance: Instance) -> RowTable:
    made = instance.create_row_table("samples", COLUMNS)
    made.change([dm.Insert([{"name": "a"}])])
    return made


def test_a_query_of_a_snapshot_reads_the_version_of_its_name(instance: Instance, rows: RowTable) -> None:
    asked = {"table": "samples", "sql": "select * from samples", "snapshot": "s"}
    rows.snapshot("s")
    rows.change([dm.Insert([{"name": "b"}])])
    first = row_verbs.start_query(instance, asked, None)
    assert row_verbs.start_query(instance, asked, None) == first
    rows.drop_snapshot("s")
    with pytest.raises(SnapshotNotFound):
        row_verbs.start_query(instance, asked, None)
    rows.snapshot("s")
    other = row_verbs.start_query(instance, asked, None)
    assert [instance.jobs.request(one)["version"] for one in (first, other)] == [1, 2]


def attempts(do: Any, instance: Instance, request: Any) -> tuple[Any, Any]:
    """Returns the results of a job by two workers: the first dies before it reports its result."""
    job_id = instance.jobs.start("row", {})
    first, again = (Call(job=Progress(job_id, attempt=number)) for number in (1, 2))
    return do(instance, request, first), do(instance, request, again)


def test_a_table_that_a_worker_made_before_it_died_is_made_once(instance: Instance) -> None:
    request = RowCreateRequest(name="made", columns=[column.to_json() for column in COLUMNS])
    first, second = attempts(row_verbs._create, instance, request)
    assert first == second
    with pytest.raises(TableAlreadyExists):
        row_verbs._create(instance, request, Call(job=Progress("other")))
    others = RowCreateRequest(name="made", columns=[{"name": "n", "type": "INTEGER"}])
    with pytest.raises(TableAlreadyExists):
        row_verbs._create(instance, others, Call(job=Progress("other", attempt=2)))


def test_a_snapshot_is_taken_or_dropped_once_if_its_worker_dies(instance: Instance, rows: RowTable) -> None:
    rows.snapshot("older")
    first, second = attempts(row_verbs._snapshot, instance, SnapshotRequest(table="samples", name="s"))
    assert first == second
    with pytest.raises(SnapshotExists):
        attempts(row_verbs._snapshot, instance, SnapshotRequest(table="samples", name="s"))
    job_id = instance.jobs.start("row", {})
    with pytest.raises(SnapshotExists):
        asked = SnapshotRequest(table="samples", name="older")
        row_verbs._snapshot(instance, asked, Call(job=Progress(job_id, attempt=2)))
    dropped = attempts(row_verbs._snapshot, instance, SnapshotRequest(table="samples", name="s", drop=True))
    assert dropped == ({"dropped": "s"},) * 2
    assert [one.name for one in rows.snapshots()] == ["older"]


def test_a_job_of_the_longest_id_changes_rows_once(instance: Instance, rows: RowTable) -> None:
    asked = RowChangeRequest(table="samples", changes=[{"insert": [{"name": "b"}]}])
    first, second = (row_verbs._change(instance, asked, Call(job=Progress("x" * 200))) for _ in range(2))
    assert (first, rows.version()) == (second, 2)


def test_a_sent_file_stays_while_its_holder_is_unknown(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change was made, so its job must report success, in spite of the failure that follows."""

    def lost() -> Any:
        raise InstanceError("the database is away")

    monkeypatch.setattr(instance, "holds", lost)
    row_verbs._forget(instance, "answers/x/upload.csv")
