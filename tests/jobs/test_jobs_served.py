"""Jobs over HTTP: queries whose answers are stored as objects, ingests of objects, rounds, and
permissions.
"""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dormouse as dm
from dormouse.client import Client, connect
from dormouse.errors import (
    InstanceReadOnly,
    InvalidData,
    InvalidInput,
    JobCancelled,
    JobFailed,
    JobForbidden,
    JobIdTaken,
    JobNotEnded,
    JobNotFound,
    TableNotFound,
)
from dormouse.jobs.job import answer_name
from tests.serving import serving
from tests.standard import OF_K_AND_TEXTS
from tests.support.api import Instance
from tests.support.jobs import Claims
from tests.support.objects import ObjectStore
from tests.support.verbs import functions
from tests.working import until

ROWS = pa.table({"k": pa.array(range(1_000), pa.int64()), "v": [f"v{n}" for n in range(1_000)]})
SCHEMA = OF_K_AND_TEXTS
STATEMENT = "select count(*) as n, max(v) as v from t where k >= $1"


@pytest.fixture
def instance(dsn: str, tmp_path: Path) -> Iterator[Instance]:
    with dm.connect(dsn, (tmp_path / "objects").as_uri()) as instance:
        instance.create_table("t", SCHEMA).ingest(ROWS)
        yield instance


@pytest.fixture
def client(instance: Instance) -> Iterator[Client]:
    with serving(instance, job_threads=2, shutdown_seconds_max=10) as url, connect(url) as client:
        yield client


def ended(client: Client, job_id: str) -> Any:
    until(lambda: client.jobs.status(job_id).has_ended)
    return client.jobs.result(job_id)


@pytest.mark.slow
def test_the_answer_of_a_statement_is_an_object_that_clients_download(
    instance: Instance, client: Client, tmp_path: Path
) -> None:
    job_id = client.jobs.start("query", {"statement": STATEMENT, "parameters": [500]})
    result = ended(client, job_id)
    assert (result["rows"], result["bytes"]) == (1, instance.objects.size(result["object"]))
    saved = client.jobs.save_answer(job_id, tmp_path / "answer.parquet")
    assert pq.read_table(saved).to_pylist() == [{"n": 500, "v": "v999"}]
    assert pq.read_table(instance.objects.uri(result["object"])).to_pylist() == [{"n": 500, "v": "v999"}]
    for which in (job_id, "none"):  # the path is checked before the answer is requested
        with pytest.raises(InvalidInput, match=r"answer\.parquet' is there already"):
            client.jobs.save_answer(which, saved)
    with pytest.raises(InvalidInput, match=r"cannot write .*: No such file or directory"):
        client.jobs.save_answer(job_id, tmp_path / "none" / "answer.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answer.parquet", "objects"]


@pytest.mark.slow
def test_an_answer_of_a_lost_claim_does_not_replace_the_new_answer(
    instance: Instance, client: Client
) -> None:
    """A server that lost its last transactions issues the same attempt number a second time."""
    instance.objects.put(answer_name("lost", 1), b"of the same attempt")
    job_id = client.jobs.start("query", {"statement": STATEMENT, "parameters": [500]}, job_id="lost")
    result = ended(client, job_id)
    assert (result["rows"], client.jobs.status(job_id).attempts) == (1, 1)
    assert pq.read_table(instance.objects.uri(result["object"])).to_pylist() == [{"n": 500, "v": "v999"}]
    assert instance.objects.get(answer_name("lost", 1)) == b"of the same attempt"


@pytest.mark.slow
def test_a_service_replaces_a_worker_that_ended(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database was read-only for a moment, which ended the worker."""
    look, failures = Claims.look, iter(range(1))
    ended_once = threading.Event()

    def fail(*given: Any) -> Any:
        if next(failures, None) is None:
            return look(*given)
        ended_once.set()
        raise InstanceReadOnly("the database only takes reads")

    monkeypatch.setattr(Claims, "look", fail)
    monkeypatch.setattr("dormouse.service.jobs.AGAIN_SECONDS", 0.01)
    with serving(instance, job_threads=1, shutdown_seconds_max=10) as url, connect(url) as client:
        assert ended_once.wait(60)
        job_id = client.jobs.start("query", {"table": "t"})
        until(lambda: client.jobs.status(job_id).has_ended, 10)
        assert client.jobs.result(job_id)["rows"] == 1_000


@pytest.mark.slow
def test_a_query_of_a_table_writes_its_rows_to_an_object(client: Client, tmp_path: Path) -> None:
    asked = {"table": "t", "where": {"k": {"min": 10, "max": 20}}, "columns": ["v"], "limit": 5}
    job_id = client.jobs.start("query", asked)
    assert ended(client, job_id)["rows"] == 5
    saved = client.jobs.save_answer(job_id, tmp_path / "answer.parquet")
    assert pq.read_table(saved).column("v").to_pylist() == [f"v{n}" for n in range(10, 15)]


@pytest.mark.slow
def test_a_query_job_gives_the_same_rows_as_a_query(
    instance: Instance, client: Client, tmp_path: Path
) -> None:
    """The query uses the column names of the moment that it reads."""
    table = instance.table("t")
    then = str(table.history.record_cut("before").name)
    table.rename_column("v", "w")
    asks = [
        ({"where": {"v": "v7"}, "as_of": then}, ["v7"]),
        ({"where": {"v": ["v7", "v8"]}, "as_of": then, "descending": True}, ["v8", "v7"]),
        ({"where": {"k": {"min": 10}}, "offset": 3, "limit": 2}, ["v13", "v14"]),
        ({"offset": 3, "limit": 2, "descending": True}, ["v996", "v995"]),
    ]
    for number, (asked, values) in enumerate(asks):
        job_id = client.jobs.start("query", {"table": "t", **asked})
        ended(client, job_id)
        saved = client.jobs.save_answer(job_id, tmp_path / f"{number}.parquet")
        assert pq.read_table(saved).column(1).to_pylist() == values


@pytest.mark.slow
def test_objects_of_the_store_are_ingested_once(instance: Instance, client: Client) -> None:
    path = instance.objects.local_path("incoming/more.parquet")
    assert path is not None
    path.parent.mkdir(parents=True)
    pq.write_table(ROWS.slice(0, 10), path)
    asked = {"table": "t", "objects": ["incoming/more.parquet"], "ingest_id": "more"}
    assert ended(client, client.jobs.start("ingest", asked))["rows"] == 10
    assert ended(client, client.jobs.start("ingest", asked))["rows"] == 0
    assert instance.table("t").count() == 1_010


@pytest.mark.slow
def test_objects_in_s3_are_ingested_and_answers_are_written_there(
    dsn: str, s3_store: ObjectStore, tmp_path: Path
) -> None:
    with dm.connect(dsn, s3_store.url, **s3_store.options) as instance:
        instance.create_table("t", SCHEMA)
        pq.write_table(ROWS, tmp_path / "rows.parquet")
        instance.objects.put("incoming/rows.parquet", (tmp_path / "rows.parquet").read_bytes())
        ingest = instance.jobs.start("ingest", {"table": "t", "objects": ["incoming/rows.parquet"]})
        instance.objects.put("incoming/more.csv.gz", gzip.compress(b"k,v\n-1,first\n-2,second\n"))
        packed = instance.jobs.start("ingest", {"table": "t", "objects": ["incoming/more.csv.gz"]})
        instance.jobs.worker(functions(instance)).run(drain=True)
        assert instance.jobs.result(ingest)["rows"] == 1_000
        assert instance.jobs.result(packed)["rows"] == 2
        query = instance.jobs.start("query", {"statement": STATEMENT, "parameters": [990]})
        with serving(instance, job_threads=1, shutdown_seconds_max=10) as url, connect(url) as client:
            until(lambda: client.jobs.status(query).has_ended)
            saved = client.jobs.save_answer(query, tmp_path / "answer.parquet")
        assert pq.read_table(saved).to_pylist() == [{"n": 10, "v": "v999"}]
        assert instance.jobs.result(query)["url"].startswith("s3://")
        assert not instance.check().problems
        assert list(instance.orphans(timedelta(0))) == []


@pytest.mark.slow
def test_rounds_are_run_as_jobs(instance: Instance, client: Client) -> None:
    for number in range(3):
        instance.table("t").ingest(ROWS.slice(number, 1))
    assert ended(client, client.jobs.start("compact", {"table": "t"}))["jobs_failed"] == 0
    assert ended(client, client.jobs.start("compact", {"table": "t", "full": True}))["files_in"] > 1
    assert instance.table("t").status().files == 1
    assert ended(client, client.jobs.start("split", {"table": "t"}))["partitions_split"] == []


@pytest.mark.slow
def test_a_failed_query_reports_the_reason(client: Client) -> None:
    """The fault is in the values, so it shows only while the query runs."""
    job_id = client.jobs.start("query", {"statement": "select 'nothing'::varchar::integer from t"})
    until(lambda: client.jobs.status(job_id).has_ended)
    with pytest.raises(JobFailed, match="nothing"):
        client.jobs.result(job_id)
    assert client.jobs.status(job_id).state == "FAILED"


@pytest.mark.slow
def test_a_query_is_cancelled(instance: Instance, client: Client) -> None:
    """The query is cancelled even while DuckDB computes and reports no progress."""
    slow = "select count(*) from range(100000000) a, range(100000) b where hash(a.range + b.range) = 7"
    job_id = client.jobs.start("query", {"statement": slow})
    until(lambda: not client.jobs.status(job_id).is_waiting)
    client.jobs.cancel(job_id)
    until(lambda: client.jobs.status(job_id).has_ended)
    with pytest.raises(JobCancelled):
        client.jobs.result(job_id)
    assert list(instance.objects.list("answers")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "request_", "error"),
    [
        ("drop", {}, InvalidInput),
        ("query", {}, InvalidInput),
        ("query", {"statement": "select 1", "table": "t"}, InvalidInput),
        ("query", {"statement": "select 1", "limit": 1}, InvalidInput),
        ("query", {"statement": "select 1", "descending": True}, InvalidInput),
        ("query", {"table": "none"}, TableNotFound),
        ("query", {"statement": 7}, InvalidInput),
        ("query", {"statement": "select 1", "more": 1}, InvalidInput),
        ("ingest", {"table": "t"}, InvalidInput),
        ("ingest", {"table": "t", "objects": []}, InvalidInput),
        ("ingest", {"table": "t", "objects": ["../../etc/passwd"]}, InvalidInput),
        ("ingest", {"table": "t", "objects": ["/etc/passwd"]}, InvalidInput),
        ("ingest", {"table": "t", "objects": ["owner/0.parquet"]}, InvalidInput),
        ("ingest", {"table": "t", "objects": ["data/x/0.parquet"]}, InvalidInput),
        ("ingest", {"table": "t", "objects": ["incoming/x.exe"]}, InvalidData),
        ("compact", {"table": "none"}, TableNotFound),
        ("split", {"tabel": "t"}, InvalidInput),
    ],
)
def test_invalid_requests_are_refused_at_the_start(
    instance: Instance, client: Client, kind: str, request_: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        client.jobs.start(kind, request_)
    assert "\n" not in str(caught.value)
    assert [job for job in instance.jobs.list() if not job.kind.startswith("round:")] == []


@pytest.mark.slow
def test_a_missing_object_fails_its_job(client: Client) -> None:
    job_id = client.jobs.start("ingest", {"table": "t", "objects": ["incoming/none.parquet"]})
    until(lambda: client.jobs.status(job_id).has_ended)
    assert client.jobs.status(job_id).error == (
        "ObjectNotFound: Object 'incoming/none.parquet' does not exist in the object store"
    )


@pytest.mark.slow
def test_a_service_without_job_threads_runs_no_jobs(instance: Instance, tmp_path: Path) -> None:
    """Other services run the jobs that a service with 0 threads starts. A job that has not ended has no
    result.
    """
    with serving(instance, job_threads=0) as url, connect(url) as client:
        job_id = client.jobs.start("query", {"statement": "select 1 as n"})
        assert (client.jobs.status(job_id).is_waiting, client.jobs.status(job_id).has_workers) == (
            True,
            False,
        )
        for ask in (client.jobs.result, lambda job_id: client.jobs.save_answer(job_id, tmp_path / "x")):
            with pytest.raises(JobNotEnded):
                ask(job_id)
        assert client.jobs.cancel(job_id).state == "CANCELLED"
        assert not (tmp_path / "x").exists()


def test_a_service_without_the_setting_has_no_routes_of_jobs(instance: Instance) -> None:
    with serving(instance) as url, connect(url) as client, pytest.raises(dm.DormouseError, match="Not Found"):
        client.jobs.start("query", {"statement": "select 1"})


@pytest.mark.slow
def test_tokens_limit_the_kinds_of_jobs_and_the_jobs_that_are_visible(
    instance: Instance, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("# permissions\netl ingest,compact etl-token\n\nana query,split ana-token  # she\n")
    tokens.chmod(0o600)
    with serving(instance, job_threads=1, token="service", job_tokens_file=tokens) as url:  # noqa: S106
        clients = [connect(url, token) for token in ("etl-token", "ana-token", "service", "wrong")]
        etl, ana, all_, wrong = clients
        job_id = etl.jobs.start("compact", {"table": "t"}, job_id="mine")
        with pytest.raises(JobForbidden, match="'ana' starts jobs of kind query, split, not 'compact'"):
            ana.jobs.start("compact", {"table": "t"})
        with pytest.raises(JobForbidden):
            etl.jobs.start("query", {"statement": "select 1"})
        for ask in (ana.jobs.status, ana.jobs.result, ana.jobs.cancel):
            with pytest.raises(JobNotFound):
                ask(job_id)
        with pytest.raises(JobIdTaken):
            ana.jobs.start("split", {"table": "t"}, job_id="mine")
        hers = ana.jobs.start("query", {"statement": "select 'nothing'::varchar::integer from t"})
        until(lambda: ana.jobs.status(hers).has_ended)
        assert ana.jobs.status(hers).traceback is None
        assert all_.jobs.status(hers).traceback is not None
        assert {job.owner for job in ana.jobs.list()} == {"ana"}
        assert {"etl", "ana"} <= {job.owner for job in all_.jobs.list()}
        with pytest.raises(dm.DormouseError, match="token"):
            wrong.jobs.list()
        assert ana.sql("select 1 as n").read_all().to_pylist() == [{"n": 1}]
        for client in clients:
            client.close()


@pytest.mark.few(2)
@pytest.mark.parametrize("line", ["etl ingest", "etl ingest tok en", "etl ingest t\u00f6ken", "a * t\nb * t"])
def test_an_error_of_the_tokens_file_names_the_line(instance: Instance, tmp_path: Path, line: str) -> None:
    (tmp_path / "tokens").write_text(f"# tokens\n{line}\n", "utf-8")
    (tmp_path / "tokens").chmod(0o600)
    with (
        pytest.raises(InvalidInput, match=r"line [23] of"),
        serving(instance, job_threads=0, job_tokens_file=tmp_path / "tokens"),
    ):
        pass


@pytest.mark.slow
def test_an_instance_that_is_read_only_takes_no_jobs(dsn: str, instance: Instance, tmp_path: Path) -> None:
    with (
        dm.connect(dsn, (tmp_path / "objects").as_uri(), read_only=True) as reader,
        serving(reader, job_threads=0) as url,
        connect(url) as client,
        pytest.raises(dm.errors.InstanceReadOnly),
    ):
        client.jobs.start("query", {"statement": "select 1"})
