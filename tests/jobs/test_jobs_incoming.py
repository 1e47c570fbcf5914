"""Jobs that ingest from the folder of incoming objects. They follow no links and disclose no paths."""

from __future__ import annotations

import gzip
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dormouse as dm
from dormouse.client import Client, connect
from dormouse.errors import ObjectStoreError
from dormouse.objects import folder as beneath
from dormouse.objects.names import hiding
from tests.serving import http_get, serving
from tests.standard import OF_K_AND_TEXTS
from tests.support.api import Instance
from tests.support.objects import open_store
from tests.working import until

SECRET = "secret-line-of-another-file"  # noqa: S105
SCHEMA = OF_K_AND_TEXTS
GOOD = "k,v\n1,a\n2,b\n"


@pytest.fixture
def instance(dsn: str, tmp_path: Path) -> Iterator[Instance]:
    with dm.connect(dsn, (tmp_path / "objects").as_uri()) as instance:
        instance.create_table("t", SCHEMA)
        yield instance


@pytest.fixture
def incoming(instance: Instance, tmp_path: Path) -> Path:
    folder = tmp_path / "objects" / "incoming"
    folder.mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "s.csv").write_text(f"k,v\n{SECRET},{SECRET}\n")
    return folder


@pytest.fixture
def client(instance: Instance) -> Iterator[Client]:
    with serving(instance, job_threads=1, shutdown_seconds_max=10) as url, connect(url) as client:
        yield client


def ingested(client: Client, *names: str) -> Any:
    job_id = client.jobs.start("ingest", {"table": "t", "objects": list(names)})
    until(lambda: client.jobs.status(job_id).has_ended)
    return client.jobs.status(job_id)


def link_to_a_file(incoming: Path, secret: Path) -> None:
    (incoming / "x.csv").symlink_to(secret / "s.csv")


def folder_that_is_a_link(incoming: Path, secret: Path) -> None:
    (incoming / "a").symlink_to(secret)
    (secret / "x.csv").write_text((secret / "s.csv").read_text())


def fifo(incoming: Path, secret: Path) -> None:
    os.mkfifo(incoming / "x.csv")


def unix_socket(incoming: Path, secret: Path) -> None:
    here = Path.cwd()
    os.chdir(incoming)  # a socket's path has at most 107 bytes
    try:
        socket.socket(socket.AF_UNIX).bind("x.csv")
    finally:
        os.chdir(here)


def folder(incoming: Path, secret: Path) -> None:
    (incoming / "x.csv").mkdir()


@pytest.mark.few(1)
@pytest.mark.parametrize("put", [link_to_a_file, folder_that_is_a_link, fifo, unix_socket, folder])
def test_only_regular_files_are_read(client: Client, incoming: Path, tmp_path: Path, put: Any) -> None:
    put(incoming, tmp_path / "secret")
    name = "incoming/a/x.csv" if put is folder_that_is_a_link else "incoming/x.csv"
    job = ingested(client, name)
    assert job.state == "FAILED"
    assert job.error == f"ObjectStoreError: Cannot read object {name!r} in the object store: {beneath.LINK}"
    assert SECRET not in f"{job}" and str(tmp_path) not in f"{job}"


def test_a_file_that_becomes_a_link_before_it_is_opened_is_not_read(
    instance: Instance, incoming: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (incoming / "x.csv").write_text(GOOD)
    pin = beneath._pin

    def swapped(*given: Any) -> None:
        (incoming / "x.csv").unlink()
        (incoming / "x.csv").symlink_to(tmp_path / "secret" / "s.csv")
        pin(*given)

    monkeypatch.setattr(beneath, "_pin", swapped)
    with instance.objects.pinned(["incoming/x.csv"]) as files:
        [path] = files.values()
        assert path.read_text() == GOOD and not path.is_symlink()
    assert not path.exists()


@pytest.mark.slow
@pytest.mark.parametrize("links", [True, False])
def test_regular_files_are_ingested(
    instance: Instance, client: Client, incoming: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """Each incoming object is linked into the store, or copied where links are not possible."""

    link = os.link

    def refuse(*given: Any, **how: Any) -> None:
        if "src_dir_fd" in how:
            raise PermissionError
        link(*given, **how)

    (incoming / "a").mkdir()
    (incoming / "a" / "x.csv").write_text(GOOD)
    with gzip.open(incoming / "more.csv.gz", "wt") as packed:
        packed.write("k,v\n3,c\n")
    os.link(incoming / "a" / "x.csv", incoming / "hard.csv")
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    job = ingested(client, "incoming/a/x.csv", "incoming/more.csv.gz", "incoming/hard.csv")
    assert (job.state, job.error) == ("COMPLETE", None)
    assert list((incoming.parent / ".staging").iterdir()) == []
    assert instance.table("t").count() == 5


BROKEN = {
    "x.csv": b"k,v\n1,a\nx,b\n",
    "y.csv": b"k,v\n1,a,b,c\n",
    "z.csv": b"q,r\n1,a\n",
    "w.csv": b"\xff\xfe\xff",
    "x.parquet": b"PAR1 no parquet PAR1",
    "y.parquet": b"",
    "x.jsonl": b'{"k": 1, "v": "a"}\n{"k": \n',
    "x.csv.gz": b"no gzip",
    "x.csv.zip": b"no zip",
    "x.csv.zst": b"no zst",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_errors_name_the_object_and_no_path(
    instance: Instance, client: Client, incoming: Path, tmp_path: Path, name: str
) -> None:
    (incoming / name).write_bytes(BROKEN[name])
    job = ingested(client, f"incoming/{name}")
    assert job.state == "FAILED"
    assert f"incoming/{name}" in (job.error or ""), job.error
    assert str(tmp_path) not in f"{job}" and ".staging" not in (job.error or "")
    assert instance.jobs.status(job.job_id).error == job.error


def test_no_answer_of_the_service_has_a_path_of_its_machine(
    instance: Instance, client: Client, tmp_path: Path
) -> None:
    job_id = client.jobs.start("query", {"statement": "select 1 as n"})
    until(lambda: client.jobs.status(job_id).has_ended)
    result = client.jobs.result(job_id)
    assert result["url"] is None
    answer = tmp_path / "objects" / result["object"]
    assert answer.is_file()
    answer.unlink()
    reported = http_get(f"{client._http.url}/v1/jobs/{job_id}/answer").json()["detail"]
    assert reported == f"Object {result['object']!r} does not exist in the object store"
    # in the same process, the error names the path
    with pytest.raises(ObjectStoreError, match=f"{tmp_path}"):
        instance.objects.get(result["object"])


def test_paths_of_folders_are_removed_from_texts(tmp_path: Path) -> None:
    root = tmp_path / "a b" / "objects"
    hide = hiding(open_store(root).url)
    for given, left in [
        (f"Object 'x/y' does not exist in {root}", "Object 'x/y' does not exist in the object store"),
        (f"cannot open '{root}/data/t/1.parquet'", "cannot open 'data/t/1.parquet'"),
        (f"cannot open {root.as_uri()}/data/1.parquet: no", "cannot open data/1.parquet: no"),
        (f"no {root.parent}/postgres/log here", "no a folder of the service here"),
        (f"no {root}2 here", "no a folder of the service here"),
        ("select 'a/b' from /c/d", "select 'a/b' from /c/d"),
    ]:
        assert hide(given) == left


@pytest.mark.slow
def test_a_job_adds_columns_on_request(incoming: Path, client: Client, instance: Instance) -> None:
    (incoming / "more.jsonl").write_text('{"k": 1, "v": "a", "n": 7}')
    asked = {"table": "t", "objects": ["incoming/more.jsonl"]}
    states = []
    for how in ({}, {"evolve": "add"}):
        job_id = client.jobs.start("ingest", {**asked, **how})
        until(lambda job_id=job_id: client.jobs.status(job_id).has_ended)
        states.append(client.jobs.status(job_id).state)
    assert states == ["FAILED", "COMPLETE"]
    assert instance.table("t").query().read_all().to_pylist() == [{"k": 1, "v": "a", "n": 7}]
