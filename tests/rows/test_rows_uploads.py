"""CSV sent over HTTP is loaded completely or not at all, and deleted with its job. Also limits on pages."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

import dormouse as dm
from dormouse.errors import CommitOutcomeUnknown, InvalidData, ObjectNotFound, RowLockLost
from dormouse.jobs.claims import roll
from dormouse.jobs.job import upload_name
from dormouse.objects.folder import FolderStore
from dormouse.state.files.holds import held
from dormouse.verbs.rows import RowUploadRequest
from tests.serving import eventually, http_post, serving
from tests.support.api import Instance
from tests.support.jobs import JobStore, Progress
from tests.support.rows import RowTable
from tests.support.verbs import Call
from tests.support.verbs import rows as row_verbs

CSV = b"name\na\n"
SENT: dict[str, Any] = {"content": CSV, "headers": {"content-type": "text/csv"}}


@pytest.fixture
def rows(instance: Instance) -> RowTable:
    return instance.create_row_table("samples", [dm.Column("name", "STRING")])


def sent(instance: Instance) -> list[str]:
    return [name for name, _ in instance.objects.list("answers")]


def test_a_file_that_is_deleted_amid_its_copy_is_not_loaded(
    instance: Instance, rows: RowTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This can happen in S3, where an object is read range by range."""

    class Vanishing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell():
                raise ObjectNotFound("it is deleted")
            return super().read(len(CSV))

    instance.objects.put(upload_name("one"), CSV * 2)
    monkeypatch.setattr(FolderStore, "local_path", lambda *_: None)
    monkeypatch.setattr(FolderStore, "reader", lambda *_: Vanishing(CSV * 2))
    with pytest.raises(InvalidData, match="the file cannot be read"):
        row_verbs._upload(instance, RowUploadRequest(table="samples"), Call(job=Progress("one")))
    assert rows.version() == 0


def test_a_backup_with_a_waiting_job_has_its_file(instance: Instance, rows: RowTable) -> None:
    instance.objects.put(upload_name("one"), CSV)
    with held(instance._supplier, "backup of now"):
        row_verbs._upload(instance, RowUploadRequest(table="samples"), Call(job=Progress("one")))
    assert (rows.version(), sent(instance)) == (1, [upload_name("one")])


def test_a_worker_that_lost_its_lock_leaves_the_file_to_the_next(
    instance: Instance, rows: RowTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any, **__: Any) -> Any:
        raise RowLockLost("the lock is another's")

    instance.objects.put(upload_name("one"), CSV)
    with monkeypatch.context() as patched:
        patched.setattr(RowTable, "upload_csv", lost)
        with pytest.raises(RowLockLost):
            row_verbs._upload(instance, RowUploadRequest(table="samples"), Call(job=Progress("one")))
    row_verbs._upload(instance, RowUploadRequest(table="samples"), Call(job=Progress("one")))
    assert (rows.version(), sent(instance)) == (1, [])


def test_a_job_whose_start_lost_its_answer_has_its_file(
    instance: Instance, rows: RowTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = JobStore.start

    def unheard(self: JobStore, *args: Any, **named: Any) -> str:
        start(self, *args, **named)
        raise CommitOutcomeUnknown("the connection died")

    with serving(instance, job_threads=1, shutdown_seconds_max=10) as url:
        with monkeypatch.context() as patched:
            patched.setattr(JobStore, "start", unheard)
            assert http_post(f"{url}/v1/rows/samples/csv?job_id=one", **SENT).status_code == 503
        eventually(lambda: instance.jobs.status("one").has_ended)
    assert instance.jobs.status("one").state == "COMPLETE"
    assert rows.version() == 1


def test_an_id_of_another_kind_of_job_is_refused(instance: Instance, rows: RowTable) -> None:
    change = {"table": "samples", "changes": [{"insert": [{"name": "b"}]}]}
    with serving(instance, job_threads=1, shutdown_seconds_max=10) as url:
        instance.jobs.start("row_change", change, job_id="one")
        refused = http_post(f"{url}/v1/rows/samples/csv?job_id=one", **SENT)
    assert refused.json()["type"] == "urn:dormouse:job-id-taken"
    assert sent(instance) == []


@pytest.mark.slow
def test_a_file_of_a_service_that_died_before_its_job_is_deleted(
    instance: Instance, rows: RowTable, tmp_path: Path
) -> None:
    left, new = upload_name("one", "upload-1"), upload_name("other", "upload-2")
    for name in (left, new, upload_name("one")):
        instance.objects.put(name, CSV)
    with serving(instance, job_threads=1, shutdown_seconds_max=10) as url:
        assert http_post(f"{url}/v1/rows/samples/csv?job_id=one", **SENT).status_code == 202
        eventually(lambda: instance.jobs.status("one").has_ended)
    assert rows.version() == 1
    lost = upload_name("lost", "upload-3")
    instance.objects.put(lost, CSV)
    foreign = ["answers/notes.txt", "answers/mine/notes.txt"]
    for name in foreign:
        instance.objects.put(name, CSV)
    for name in (left, lost, *foreign):
        os.utime(str(instance.objects.local_path(name)), (0, 0))
    instance.jobs.expire(30)
    # the file of an existing job is deleted with the job
    assert sorted(sent(instance)) == sorted([left, new, upload_name("one"), *foreign])
    instance.objects.delete(foreign)
    with instance._supplier.connection() as conn:
        conn.execute("update ended_job set ended_at = ended_at - interval '31 days'")
    roll(instance._supplier)
    instance.jobs.expire(30)
    assert sent(instance) == [new]


@pytest.mark.slow
def test_a_page_respects_the_limits_of_answers(instance: Instance, rows: RowTable) -> None:
    rows.change([dm.Insert([{"name": name} for name in "abc"])])
    asked = {"sql": "select name from samples order by name", "wait_seconds": 60}

    def ask(url: str, **more: Any) -> Any:
        return http_post(f"{url}/v1/rows/samples/query", json=asked | more, timeout=60).json()

    with serving(instance, rows_max=2) as url:
        first = ask(url)
        assert first["rows"] == [["a"], ["b"]]
        assert ask(url, page=first["next_page"])["rows"] == [["c"]]
        assert "the 2 rows that are allowed" in ask(url, page_rows=3)["detail"]
    with serving(instance, bytes_max=50) as url:
        assert "the 50 bytes that are allowed" in ask(url)["detail"]
