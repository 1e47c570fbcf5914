"""The details in an error's message. They are the error's fields, even if another process raised it."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

import dormouse as dm
from dormouse import errors
from dormouse.client import Client, connect
from dormouse.errors import DormouseError
from dormouse.errors.base import ErrorField
from dormouse.objects.names import hiding
from dormouse.rows.indexing import IndexWorker
from dormouse.service.problems import problem_of
from tests.serving import serving
from tests.standard import OF_K_AND_TEXTS
from tests.support.api import Instance, Table
from tests.support.verbs import functions

SCHEMA = OF_K_AND_TEXTS
CLASSES = sorted(
    (one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, DormouseError)),
    key=lambda one: one.__name__,
)


@pytest.fixture
def table(instance: Instance) -> Table:
    made = instance.create_table("t", SCHEMA)
    made.ingest([{"k": 1, "v": "a"}], ingest_id="first")
    return made


@pytest.fixture
def client(instance: Instance, table: Table) -> Iterator[Client]:
    rows = instance.create_row_table("r", [dm.Column("n", "INTEGER")])
    rows.change([dm.Insert([{"n": 1}])], change_id="first")
    with serving(instance, job_threads=1) as url, connect(url) as found:
        yield found


def pickled(error: Any) -> Any:
    return pickle.loads(pickle.dumps(error))  # noqa: S301 our own bytes


def refused(kind: type[DormouseError], call: Callable[[], object], **data: Any) -> None:
    """Checks the fields of the raised error, of its pickle, and of the error rebuilt from its document."""
    with pytest.raises(kind) as raised:
        call()
    error = raised.value
    reported = type(error).from_message(str(error), problem_of(error).document)
    for one in (error, pickled(error), reported):
        assert {name: getattr(one, name) for name in data} == data
        assert str(one) == str(error)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_unknown_fields_are_none(kind: type[DormouseError]) -> None:
    error = kind.from_message("it failed")
    assert str(error) == "it failed" and not error.data
    assert all(getattr(error, name) is None for name in kind.fields())
    standard = {"type", "title", "status", "detail", "instance"}
    assert not standard & set(kind.fields())


def test_an_error_takes_no_field_that_its_class_lacks() -> None:
    with pytest.raises(TypeError, match="no field odd"):
        errors.TableNotFound("gone", odd=1)
    assert isinstance(errors.TableNotFound.table, ErrorField)


@pytest.mark.slow
def test_errors_of_tables_have_fields(instance: Instance, table: Table, tmp_path: Path) -> None:
    refused(errors.TableNotFound, lambda: instance.table("x"), table="x")
    refused(errors.TableAlreadyExists, lambda: instance.create_table("t", SCHEMA), table="t")
    again = [{"k": 2, "v": "b"}]
    refused(
        errors.CommitIdReused, lambda: table.ingest(again, ingest_id="first"), commit_id="first", table="t"
    )
    refused(errors.InvalidQuery, lambda: table.query({"x": 1}), column="x", table=None)
    refused(errors.InvalidQuery, lambda: instance.sql("select 1 from x"), table="x")
    refused(errors.InvalidData, lambda: table.ingest([{"k": 1, "x": 1, "v": "", "y": 1}]), columns=["x", "y"])
    refused(errors.InvalidData, lambda: table.ingest([{"k": 1}]), columns=["v"])
    refused(errors.InvalidData, lambda: table.ingest({"k": ["x"], "v": ["a"]}), column="k")
    refused(errors.InvalidData, lambda: table.ingest({"k": [1, None], "v": ["a", "b"]}), column="k", row=1)
    for name, text, found in (
        ("a.csv", "k,v\n1,a\nx,b\n", {"line": 3, "column": "k"}),
        ("b.csv", "k,v\n1,a\n,b\n", {"line": 3, "column": "k", "row": 1}),
        ("c.jsonl", '{"k": 1, "v": "a"}\n{"k": "x", "v": "b"}\n', {"line": 2, "column": "k"}),
        ("d.jsonl", '{"k": 1, "v": "a"}\n{"k": \n', {"line": 3}),
    ):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(errors.InvalidData) as raised:
            table.ingest(str(path))
        assert {one: getattr(raised.value, one) for one in found} == found, name
        assert str(raised.value.file).endswith(name)


def test_a_command_with_json_prints_the_fields(
    table: Table,
    dsn: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: Callable[..., tuple[int, str, str]],
) -> None:
    monkeypatch.setenv("DORMOUSE_DSN", dsn)
    monkeypatch.setenv("DORMOUSE_OBJECTS", table.context.objects.url)
    code, _, err = cli("query", "x", "--json")
    said = json.loads(err.splitlines()[-1])
    assert (code, said["error"], said["table"]) == (1, "TableNotFound", "x")


def test_the_error_of_an_expired_moment_has_the_oldest_readable_one() -> None:
    oldest = datetime(2026, 11, 28, 12, 30, tzinfo=UTC)
    error = errors.CutExpired("too old", oldest, table="t")
    reported = errors.CutExpired.from_message("too old", problem_of(error).document)
    assert error.oldest == reported.oldest == pickled(error).oldest == oldest
    assert reported.table == "t"


@pytest.mark.slow
def test_the_client_raises_errors_with_their_fields(client: Client) -> None:
    refused(errors.TableNotFound, lambda: client.table("x"), table="x")
    refused(errors.InvalidQuery, lambda: client.sql("select * from x").read_all(), table="x")
    refused(errors.JobNotFound, lambda: client.jobs.status("none"), job_id="none")
    refused(errors.NotARowTable, lambda: client.row_table("t"), table="t")
    rows = client.row_table("r")
    refused(errors.RowNotFound, lambda: rows.row(7), table="r", row_id=7)
    rows.change([dm.Insert([{"n": 2}])], change_id="second")
    refused(
        errors.CommitIdReused,
        lambda: rows.change([dm.Insert([{"n": 3}])], change_id="second"),
        commit_id="second",
    )


def test_the_error_of_an_unready_index_has_the_table_and_the_wait(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = instance.create_row_table("r", [dm.Column("n", "INTEGER")])
    rows.change([dm.Insert([{"n": 1}])])
    monkeypatch.setattr(IndexWorker, "start", lambda self: None)
    with pytest.raises(errors.IndexNotReady) as raised:
        rows.query("select * from r", wait_seconds=0.05)
    assert raised.value.table == "r" and (raised.value.seconds or 0) >= 0.05


@pytest.mark.slow
def test_no_error_of_a_job_has_a_path_of_the_server(instance: Instance, table: Table) -> None:
    instance.objects.put("incoming/a.csv", b"k,v\n1,a\nx,b\n")
    job = instance.jobs.start("ingest", {"table": "t", "objects": ["incoming/a.csv"]})
    instance.jobs.worker(functions(instance)).run(drain=True)
    with serving(instance, job_threads=1) as url, httpx.Client(base_url=url) as http:
        status, result = http.get(f"/v1/jobs/{job}"), http.get(f"/v1/jobs/{job}/result")
        assert result.json()["file"] == "incoming/a.csv" and result.json()["line"] == 3
        assert "Traceback" in status.json()["traceback"] and "verbs/jobs.py" in status.json()["traceback"]
        for folder in (str(Path(dm.__file__).parents[1]), sys.prefix, sys.base_prefix, "/objects"):
            assert folder not in status.text and folder not in result.text


def test_messages_of_failed_rounds_name_no_path(instance: Instance, table: Table) -> None:
    root = instance.objects.url.removeprefix("file://")
    with pytest.raises(OSError), table.context.last_rounds.round("compaction"):
        raise OSError(f"cannot write {root}/data/x")
    with serving(instance) as url:
        said = httpx.get(f"{url}/v1/tables/t?counts=true").text
    assert "cannot write" in said and root not in said


def test_paths_of_code_are_hidden() -> None:
    hide = hiding("s3://bucket")
    assert hide(f'File "{errors.__file__}", line 1') == 'File "dormouse/errors/__init__.py", line 1'
    assert hide(f'File "{pytest.__file__}"') == 'File "pytest/__init__.py"'
