"""The doors to an instance. Each calls the same verbs with the same arguments and answers in the same form.

A door has a method for each verb that it offers. An answer is JSON: a list of rows, or a report. A failure
has the name of the error and its text.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq

import dormouse as dm
from dormouse.client import Client
from dormouse.errors import DormouseError
from tests.serving import JSON_LINES
from tests.support.api import Instance
from tests.working import until

Rows = list[dict[str, Any]]
Where = Mapping[str, Any] | None


@dataclass(frozen=True)
class Failed:
    """An error as a door reports it. `error` is the name of its class, or None if the door gives no name."""

    text: str
    error: str | None = None


def plain(value: Any) -> Any:
    """Returns a value as the service writes it in JSON."""
    match value:
        case bool() | None | str() | int():
            return value
        case float():
            return (
                value if math.isfinite(value) else str(value).replace("inf", "Infinity").replace("nan", "NaN")
            )
        case Decimal():
            return str(value)
        case bytes():
            return base64.b64encode(value).decode()
        case datetime():
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case date():
            return value.isoformat()
        case Mapping():
            return {str(name): plain(item) for name, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    raise TypeError(f"{type(value)} has no plain form here")


def of_arrow(reader: pa.RecordBatchReader | pa.Table) -> Rows:
    """Returns the rows of Arrow data as dicts; a map becomes a list of pairs."""
    table = reader if isinstance(reader, pa.Table) else reader.read_all()
    return [plain(row) for row in table.to_pylist()]


def json_where(where: Where) -> dict[str, Any] | None:
    """Returns conditions in the form of JSON requests."""
    if where is None:
        return None
    return {name: _json_condition(condition) for name, condition in where.items()}


def _json_condition(condition: Any) -> Any:
    if isinstance(condition, list):
        return [_json_condition(one) for one in condition]
    if isinstance(condition, dm.Range):
        return plain(condition)
    return plain(condition)


@dataclass
class House:
    """One instance, and for each door the address by which the door opens it."""

    instance: Instance
    client: Client
    url: str
    dsn: str
    objects: str
    folder: Path

    def put(self, name: str, content: bytes) -> str:
        """Writes a file for a load; returns its path."""
        path = self.folder / name
        path.write_bytes(content)
        return str(path)


class Door:
    """The base of all doors. A door returns an error as its answer."""

    def __init__(self, house: House) -> None:
        self.house = house

    def ask(self, verb: str, **how: Any) -> Any:
        """Returns the answer of a verb, or `Failed`."""
        try:
            return getattr(self, verb)(**how)
        except DormouseError as error:
            return Failed(str(error), type(error).__name__)


class Python(Door):
    """The door `dm.connect`, in Python."""

    def query(self, table: str, where: Where = None, columns: Any = None, **how: Any) -> Rows:
        return of_arrow(self.house.instance.table(table).query(where, columns, **how))

    def count(self, table: str, where: Where = None, **how: Any) -> int:
        return self.house.instance.table(table).count(where, **how)

    def explain(self, table: str, where: Where = None, **how: Any) -> Any:
        return plain(self.house.instance.table(table).explain(where, **how))

    def sql(self, statement: str, parameters: Any = None, **how: Any) -> Rows:
        return of_arrow(self.house.instance.sql(statement, parameters, **how))

    def execute(self, table: str, statement: str, parameters: Any = None, **how: Any) -> Any:
        return report(self.house.instance.execute(statement.replace("TABLE", table), parameters, **how))

    def changes(self, table: str, after: Any, till: Any = None, columns: Any = None) -> Rows:
        return of_arrow(self.house.instance.table(table).changes(after, till, columns))

    def schema(self, table: str) -> Any:
        return self.house.instance.table(table).schema.to_json()

    def tables(self) -> list[str]:
        return [table.name for table in self.house.instance.tables()]

    def ingest(self, table: str, content: bytes, name: str, **how: Any) -> Any:
        path = self.house.put(name, content)
        return report(self.house.instance.table(table).ingest(path, **how))

    def upsert(self, table: str, content: bytes, name: str, **how: Any) -> Any:
        return report(self.house.instance.table(table).upsert(self.house.put(name, content), **how))

    def delete(self, table: str, where: Where, **how: Any) -> Any:
        return report(self.house.instance.table(table).delete(where or dm.ALL, **how))

    def compact(self, table: str, **how: Any) -> Any:
        return report(self.house.instance.table(table).compact(**how))

    def split(self, table: str) -> Any:
        return report(self.house.instance.table(table).split())

    def rows_query(self, table: str, sql: str | None = None, **how: Any) -> Rows:
        return page_rows(self.house.instance.row_table(table).query(sql, wait_seconds=60, **how))

    def rows_change(self, table: str, changes: list[dict[str, Any]], **how: Any) -> Any:
        from dormouse.rows.changes import parse_changes

        return report(self.house.instance.row_table(table).change(parse_changes(changes), **how))

    def rows_upsert(self, table: str, rows: Rows, on: Sequence[str], **how: Any) -> Any:
        return report(self.house.instance.row_table(table).upsert(rows, on, **how))

    def rows_upload(self, table: str, content: bytes, **how: Any) -> Any:
        path = self.house.put("upload.csv", content)
        return report(self.house.instance.row_table(table).upload_csv(path, **how))

    def rows_download(self, table: str, sql: str | None = None, **how: Any) -> str:
        path = self.house.folder / "download.csv"
        self.house.instance.row_table(table).download_csv(path, sql, **how)
        return path.read_text("utf-8")

    def rows_get(self, table: str, row_id: int, version: int | None = None) -> Any:
        return plain(self.house.instance.row_table(table).row(row_id, version))

    def rows_history(self, table: str, **how: Any) -> Any:
        return [versions(one) for one in self.house.instance.row_table(table).history(**how)]


class Remote(Door):
    """The door `dormouse.client`, in Python."""

    def query(self, table: str, where: Where = None, columns: Any = None, **how: Any) -> Rows:
        return of_arrow(self.house.client.table(table).query(where, columns, **how).read_all())

    def count(self, table: str, where: Where = None, **how: Any) -> int:
        return self.house.client.table(table).count(where, **how)

    def explain(self, table: str, where: Where = None, **how: Any) -> Any:
        return plain(self.house.client.table(table).explain(where, **how))

    def sql(self, statement: str, parameters: Any = None, **how: Any) -> Rows:
        return of_arrow(self.house.client.sql(statement, parameters, **how).read_all())

    def execute(self, table: str, statement: str, parameters: Any = None, **how: Any) -> Any:
        return report(self.house.client.execute(statement.replace("TABLE", table), parameters, **how))

    def changes(self, table: str, after: Any, till: Any = None, columns: Any = None) -> Rows:
        return of_arrow(self.house.client.table(table).changes(after, till, columns).read_all())

    def schema(self, table: str) -> Any:
        return self.house.client.table(table).schema.to_json()

    def tables(self) -> list[str]:
        return [table.name for table in self.house.client.tables()]

    def rows_query(self, table: str, sql: str | None = None, **how: Any) -> Rows:
        return page_rows(self.house.client.row_table(table).query(sql, wait_seconds=60, **how))

    def rows_change(self, table: str, changes: list[dict[str, Any]], **how: Any) -> Any:
        from dormouse.rows.changes import parse_changes

        return report(self.house.client.row_table(table).change(parse_changes(changes), **how))

    def rows_upsert(self, table: str, rows: Rows, on: Sequence[str], **how: Any) -> Any:
        return report(self.house.client.row_table(table).upsert(rows, on, **how))

    def rows_upload(self, table: str, content: bytes, **how: Any) -> Any:
        path = self.house.put("upload.csv", content)
        return report(self.house.client.row_table(table).upload_csv(path, **how))

    def rows_download(self, table: str, sql: str | None = None, **how: Any) -> str:
        path = self.house.folder / "remote.csv"
        path.unlink(missing_ok=True)
        self.house.client.row_table(table).download_csv(path, sql, **how)
        return path.read_text("utf-8")

    def rows_get(self, table: str, row_id: int, version: int | None = None) -> Any:
        return plain(self.house.client.row_table(table).row(row_id, version))

    def rows_history(self, table: str, **how: Any) -> Any:
        return [versions(one) for one in self.house.client.row_table(table).history(**how)]


class Http(Door):
    """The door `/v1` of the service, called as with curl: JSON requests and JSON answers."""

    def query(self, table: str, where: Where = None, columns: Any = None, **how: Any) -> Rows | Failed:
        return self._lines(
            f"/v1/tables/{table}/query", {"where": json_where(where), "columns": columns, **how}
        )

    def explain(self, table: str, where: Where = None, **how: Any) -> Any:
        return self._post(f"/v1/tables/{table}/plan", {"where": json_where(where), **how})

    def sql(self, statement: str, parameters: Any = None, **how: Any) -> Rows | Failed:
        asked = {"statement": statement, "parameters": _typed(parameters), **how}
        return self._lines("/v1/sql", asked)

    def execute(self, table: str, statement: str, parameters: Any = None, **how: Any) -> Any:
        asked = {"statement": statement.replace("TABLE", table), "parameters": _typed(parameters), **how}
        found = self._post("/v1/execute", asked)
        return found if isinstance(found, Failed) else report(found)

    def changes(self, table: str, after: Any, till: Any = None, columns: Any = None) -> Rows | Failed:
        return self._lines(f"/v1/tables/{table}/changes", {"after": after, "till": till, "columns": columns})

    def schema(self, table: str) -> Any:
        found = self._get(f"/v1/tables/{table}")
        return found if isinstance(found, Failed) else found["schema"]

    def tables(self) -> Any:
        return [table["name"] for table in self._get("/v1/tables")["tables"]]

    def rows_query(self, table: str, sql: str | None = None, **how: Any) -> Any:
        found = self._post(f"/v1/rows/{table}/query", {"sql": sql, "wait_seconds": 30, **how})
        return found if isinstance(found, Failed) else json_page(found)

    def rows_get(self, table: str, row_id: int, version: int | None = None) -> Any:
        return self._get(f"/v1/rows/{table}/rows/{row_id}", {} if version is None else {"version": version})

    def rows_history(self, table: str, **how: Any) -> Any:
        found = self._get(f"/v1/rows/{table}/history", how)
        return found if isinstance(found, Failed) else [versions(one) for one in found["changes"]]

    def _lines(self, path: str, body: Mapping[str, Any]) -> Rows | Failed:
        answer = httpx.post(self.house.url + path, json=body, headers={"Accept": JSON_LINES}, timeout=60)
        if answer.status_code != 200:
            return problem(answer)
        return [json.loads(line) for line in answer.text.splitlines()]

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        answer = httpx.post(self.house.url + path, json=body, timeout=60)
        return answer.json() if answer.status_code < 300 else problem(answer)

    def _get(self, path: str, parameters: Mapping[str, Any] | None = None) -> Any:
        answer = httpx.get(self.house.url + path, params=dict(parameters or {}), timeout=60)
        return answer.json() if answer.status_code == 200 else problem(answer)


class Job(Door):
    """The door `/v1/jobs` of the service, called by the client: verbs that run as jobs."""

    def query(self, table: str, where: Where = None, columns: Any = None, **how: Any) -> Rows | Failed:
        asked = {"table": table, "where": json_where(where), "columns": columns, **how}
        return self._answer("query", {name: value for name, value in asked.items() if value is not None})

    def sql(self, statement: str, parameters: Any = None, **how: Any) -> Rows | Failed:
        return self._answer("query", {"statement": statement, "parameters": _typed(parameters), **how})

    def ingest(self, table: str, content: bytes, name: str, **how: Any) -> Any:
        objects = self.house.instance.objects
        with objects.staged(f"incoming/{name}") as path:
            path.write_bytes(content)
        return self._run("ingest", {"table": table, "objects": [f"incoming/{name}"], **how})

    def compact(self, table: str, **how: Any) -> Any:
        return self._run("compact", {"table": table, **how})

    def split(self, table: str) -> Any:
        return self._run("split", {"table": table})

    def rows_query(self, table: str, sql: str | None = None, **how: Any) -> Any:
        found = self._ended(self.house.client.jobs.start("row_query", {"table": table, "sql": sql, **how}))
        return found if isinstance(found, Failed) else json_page(found)

    def rows_change(self, table: str, changes: list[dict[str, Any]], **how: Any) -> Any:
        return self._run("row_change", {"table": table, "changes": changes, **how})

    def rows_upsert(self, table: str, rows: Rows, on: Sequence[str], **how: Any) -> Any:
        return self._run("row_upsert", {"table": table, "rows": rows, "on": list(on), **how})

    def _run(self, kind: str, request: Mapping[str, Any]) -> Any:
        found = self._ended(self.house.client.jobs.start(kind, request))
        return found if isinstance(found, Failed) else report(found)

    def _ended(self, job_id: str) -> Any:
        jobs = self.house.client.jobs
        until(lambda: jobs.status(job_id).has_ended)
        status = jobs.status(job_id)
        if status.state == "COMPLETE":
            return jobs.result(job_id)
        name, _, text = str(status.error).partition(": ")
        return Failed(text, name) if hasattr(dm.errors, name) else Failed(str(status.error))

    def _answer(self, kind: str, request: Mapping[str, Any]) -> Rows | Failed:
        job_id = self.house.client.jobs.start(kind, request)
        ended = self._ended(job_id)
        if isinstance(ended, Failed):
            return ended
        saved = self.house.client.jobs.save_answer(job_id, self.house.folder / f"{job_id}.parquet")
        return of_arrow(pq.read_table(saved))


class CommandLine(Door):
    """The door `dormouse`, the command line, run in this process."""

    def __init__(self, house: House, run: Callable[..., tuple[int, str, str]]) -> None:
        super().__init__(house)
        self._run = run

    def query(self, table: str, where: Where = None, columns: Any = None, **how: Any) -> Rows | Failed:
        said = ["query", table, *self._where(where), *_listed("columns", columns), *_options(how)]
        return self._lines(*said)

    def sql(self, statement: str, parameters: Any = None, **how: Any) -> Rows | Failed:
        given = parameters.items() if isinstance(parameters, Mapping) else enumerate(parameters or [], 1)
        said = [text for name, value in given for text in ("--param", f"{name}={value}")]
        return self._lines("sql", statement, *said, *_options(how))

    def execute(self, table: str, statement: str, parameters: Any = None, **how: Any) -> Any:
        given = parameters.items() if isinstance(parameters, Mapping) else enumerate(parameters or [], 1)
        said = [text for name, value in given for text in ("--param", f"{name}={value}")]
        options = _options(_named(how, edit_id="id"))
        return self._report("sql", "--write", statement.replace("TABLE", table), *said, *options)

    def explain(self, table: str, where: Where = None, **how: Any) -> Any:
        found = self._json("query", table, *self._where(where), "--explain", *_options(how))
        return found if isinstance(found, Failed) else found[table]

    def changes(self, table: str, after: Any, till: Any = None, columns: Any = None) -> Rows | Failed:
        moments = {"after": after, "till": till}
        said = [text for name, when in moments.items() if when for text in (f"--{name}", str(when))]
        return self._lines("changes", table, *said, *_listed("columns", columns))

    def tables(self) -> Any:
        found = self._json("table", "list")
        return found if isinstance(found, Failed) else [_name_of(one) for one in found]

    def schema(self, table: str) -> Any:
        found = self._json("table", "show", table)
        return found if isinstance(found, Failed) else found["schema"]

    def ingest(self, table: str, content: bytes, name: str, **how: Any) -> Any:
        return self._load("ingest", table, content, name, how)

    def upsert(self, table: str, content: bytes, name: str, **how: Any) -> Any:
        return self._load("upsert", table, content, name, how)

    def delete(self, table: str, where: Where, **how: Any) -> Any:
        which = self._where(where) if where else ["--all"]
        return self._report(
            "delete", table, *which, *([] if how.get("dry_run") else ["--yes"]), *_options(how)
        )

    def compact(self, table: str, **how: Any) -> Any:
        return self._report("compact", table, *_options(how))

    def split(self, table: str) -> Any:
        return self._report("split", table)

    def rows_query(self, table: str, sql: str | None = None, **how: Any) -> Any:
        said = ["rows", "query", table, *([] if sql is None else [sql]), *_options(how)]
        found = self._json(*said)
        return found if isinstance(found, Failed) else json_page(found)

    def rows_change(self, table: str, changes: list[dict[str, Any]], **how: Any) -> Any:
        path = self.house.put("changes.json", json.dumps(changes).encode())
        return self._report("rows", "change", table, path, *_options(_named(how, change_id="id")))

    def rows_upsert(self, table: str, rows: Rows, on: Sequence[str], **how: Any) -> Any:
        path = self.house.put("rows.json", json.dumps(rows).encode())
        said = _options(_named(how, change_id="id"))
        return self._report("rows", "upsert", table, path, "--on", ",".join(on), *said)

    def rows_upload(self, table: str, content: bytes, **how: Any) -> Any:
        path = self.house.put("upload.csv", content)
        return self._report("rows", "upload", table, path, *_options(_named(how, change_id="id")))

    def rows_download(self, table: str, sql: str | None = None, **how: Any) -> Any:
        path = self.house.folder / "command.csv"
        path.unlink(missing_ok=True)
        said = [
            "rows",
            "download",
            table,
            str(path),
            *([] if sql is None else ["--sql", sql]),
            *_options(how),
        ]
        found = self._json(*said)
        return found if isinstance(found, Failed) else path.read_text("utf-8")

    def rows_get(self, table: str, row_id: int, version: int | None = None) -> Any:
        found = self._json("rows", "get", table, str(row_id), *_options({"version": version}))
        return found[0] if isinstance(found, list) else found

    def rows_history(self, table: str, **how: Any) -> Any:
        found = self._json("rows", "history", table, *_options(how))
        return found if isinstance(found, Failed) else [versions(one) for one in found]

    def _where(self, where: Where) -> list[str]:
        asked = json_where(where)
        return [] if asked is None else ["--where", json.dumps(asked)]

    def _load(self, verb: str, table: str, content: bytes, name: str, how: Mapping[str, Any]) -> Any:
        path = self.house.put(name, content)
        options = dict(how)
        if options.pop("evolve", None) == "add":
            options["add_columns"] = True
        return self._report(verb, table, path, *_options(_named(options, ingest_id="id")))

    def _report(self, *said: str) -> Any:
        found = self._json(*said)
        return found if isinstance(found, Failed) else report(found)

    def _json(self, *said: str) -> Any:
        code, out, err = self._run(*said, "--json")
        return json.loads(out) if code == 0 else failure(err)

    def _lines(self, *said: str) -> Any:
        code, out, err = self._run(*said, "--format", "lines")
        if code:
            return Failed(err.strip().rpartition("\n")[2].removeprefix("dormouse: "))
        return [json.loads(line) for line in out.splitlines()]


def failure(err: str) -> Failed:
    """Returns the failure that `--json` writes as the last line of stderr."""
    document = json.loads(err.strip().splitlines()[-1])
    return Failed(document["message"], document["error"])


def problem(answer: httpx.Response) -> Failed:
    """Returns the failure that an HTTP answer describes."""
    document = answer.json()
    words = document["type"].removeprefix("urn:dormouse:").split("-")
    return Failed(document["detail"], "".join(word.capitalize() for word in words))


_DIFFERS = {
    "seconds",
    "ingest_id",
    "job_id",
    "change_id",
    "edit_id",
    "changed_at",
    "deleted_at",
    "table",
    "version",
    "versions",
}
"""Fields of reports that differ between two calls."""


def report(document: Any) -> Any:
    """Returns a report without times, ids and fields that only one door has."""
    if hasattr(document, "to_json"):
        document = document.to_json()
    asked = plain(document)
    return {name: value for name, value in asked.items() if name not in _DIFFERS}


def versions(change: Any) -> tuple[int, int, int, int]:
    """Returns (first version, inserted, updated, deleted) of a row change, without its time and author."""
    found = plain(change)
    return found["first_version"], found["inserted"], found["updated"], found["deleted"]


def page_rows(page: Any) -> Rows:
    names = [column.name for column in page.columns]
    return [plain(dict(zip(names, row, strict=True))) for row in page.rows]


def json_page(page: Mapping[str, Any]) -> Rows:
    names = [column["name"] for column in page["columns"]]
    return [dict(zip(names, row, strict=True)) for row in page["rows"]]


def _name_of(listed: Any) -> str:
    return str(
        listed[0] if isinstance(listed, list) else listed["name"] if isinstance(listed, dict) else listed
    )


def _typed(parameters: Any) -> Any:
    """Returns the values of parameters as JSON. A value of a type that JSON lacks becomes an object."""
    if isinstance(parameters, Mapping):
        return {name: _typed_value(value) for name, value in parameters.items()}
    return None if parameters is None else [_typed_value(value) for value in parameters]


def _typed_value(value: Any) -> Any:
    kinds: dict[type[Any], str] = {bytes: "bytes", datetime: "timestamp", date: "date", Decimal: "decimal"}
    return next(({name: plain(value)} for kind, name in kinds.items() if isinstance(value, kind)), value)


def _named(how: Mapping[str, Any], **renamed: str) -> dict[str, Any]:
    return {renamed.get(name, name): value for name, value in how.items()}


def _listed(name: str, values: Sequence[str] | None) -> list[str]:
    return [] if values is None else [f"--{name}", ",".join(values)]


def _options(how: Mapping[str, Any]) -> list[str]:
    """Returns options in the form of a command line."""
    said: list[str] = []
    for name, value in how.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            said.append(option)
        elif value is not None and value is not False:
            said += [option, plain(value) if isinstance(value, datetime) else str(value)]
    return said
