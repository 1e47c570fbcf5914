"""Each option of a verb is found at every door that has the verb; the names of the outside stay."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import typer.main

from dormouse.cli.program import whole
from dormouse.client import Client
from dormouse.client.client import RemoteTable
from dormouse.client.rows import RemoteRowTable
from dormouse.datasource import options as spark_options
from dormouse.datasource.job import _parser as job_parser
from dormouse.sources.text_format import TextFormat
from dormouse.spark import frames
from dormouse.verbs.jobs import kinds
from dormouse.verbs.registry import VERBS
from tests.support.api import Instance, Table
from tests.support.rows import RowTable

OF_THIS_PROCESS = {"interruption", "sessions", "progress", "waiting", "changed_by"}
"""Callables, and who makes a change: a door that is further away knows by itself."""
PLACES = {"self", "table", "schema_id", "instance", "dsn", "objects"}
"""How a door names the table, and what it adds for itself."""
OF_ONE_DOOR = {
    "yes", "format", "output", "explain", "json", "help", "create", "key", "sort_key", "key_row_number",
    "as_json", "debug", "split_bytes", "metadata", "max_rows_per_batch", "changes_after", "changes_till",
    "count",
}  # fmt: skip
"""How a door asks, writes and pages, and what only it can, like a table that is made on the way."""

SAME = {"add_columns": "evolve", "param": "parameters", "all": "where"}
"""Options that are called otherwise at a door, of all verbs."""
OF_CSV = dict.fromkeys(TextFormat.model_fields, "how")
OF_DATA = dict.fromkeys(("paths", "objects", "type", *TextFormat.model_fields), "data")
OF_VERBS: dict[str, dict[str, str]] = {
    "sql": {"file": "statement"},
    "ingest": {"id": "ingest_id", "frame": "data", **OF_DATA},
    "upsert": {"id": "ingest_id", **OF_DATA},
    "rows.change": {"id": "change_id", "file": "changes"},
    "rows.upsert": {"id": "change_id", "file": "rows"},
    "rows.upload": {"id": "change_id", "file": "path", "upload": "path", "digest": "path", **OF_CSV},
}
"""Options that are called otherwise at a door, by verb; how files are read is said in the data in Python."""

Options = Iterable[str]


def python(method: Callable[..., Any]) -> Options:
    return inspect.signature(method).parameters


def command(*path: str) -> Options:
    found: Any = typer.main.get_command(whole())
    for name in path:
        found = found.commands[name]
    return [parameter.name for parameter in found.params]


def job(kind: str) -> Options:
    return {name for verb in kinds()[kind] for name in verb.request.model_fields}


def submitted(work: str) -> Options:
    parser = job_parser()
    [works] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [action.dest for action in works.choices[work]._actions]


DOORS: dict[str, tuple[Options, dict[str, Options]]] = {
    "query": (
        python(Table.query),
        {
            "client": python(RemoteTable.query),
            "HTTP": VERBS["query"].request.model_fields,
            "job": set(job("query")) - {"statement", "parameters"},
            "command": command("query"),
            "Spark": spark_options._READS,
        },
    ),
    "count": (python(Table.count), {"client": python(RemoteTable.count)}),
    "sql": (
        python(Instance.sql),
        {
            "client": python(Client.sql),
            "HTTP": VERBS["sql"].request.model_fields,
            "job": set(job("query")) - {"where", "columns", "limit", "offset", "descending"},
            "command": set(command("sql")) - {"limit"},
        },
    ),
    "changes": (
        python(Table.changes),
        {"client": python(RemoteTable.changes), "HTTP": VERBS["changes"].request.model_fields},
    ),
    "ingest": (
        python(Table.ingest),
        {
            "job": job("ingest"),
            "command": command("ingest"),
            "Spark": {"paths", *spark_options._WRITES},
            "Spark's function": python(frames.write),
            "spark-submit": submitted("ingest"),
        },
    ),
    "upsert": (python(Table.upsert), {"command": command("upsert")}),
    "delete": (python(Table.delete), {"command": command("delete")}),
    "compact": (python(Table.compact), {"job": job("compact"), "command": command("compact")}),
    "split": (python(Table.split), {"job": job("split"), "command": command("split")}),
    "rows.query": (
        python(RowTable.query),
        {
            "client": python(RemoteRowTable.query),
            "HTTP": VERBS["rows query"].request.model_fields,
            "job": job("row_query"),
            "command": command("rows", "query"),
        },
    ),
    "rows.change": (
        python(RowTable.change),
        {
            "client": python(RemoteRowTable.change),
            "job": job("row_change"),
            "command": command("rows", "change"),
        },
    ),
    "rows.upsert": (
        python(RowTable.upsert),
        {
            "client": python(RemoteRowTable.upsert),
            "job": job("row_upsert"),
            "command": command("rows", "upsert"),
        },
    ),
    "rows.upload": (
        python(RowTable.upload_csv),
        {
            "client": python(RemoteRowTable.upload_csv),
            "job": job("row_upload"),
            "command": command("rows", "upload"),
        },
    ),
}

LACKS: dict[tuple[str, str], set[str]] = {
    # Spark is the engine
    **{("ingest", door): {"engine"} for door in ("Spark", "Spark's function", "spark-submit")},
}
"""Options that a door lacks, and why."""


def named(verb: str, options: Options) -> set[str]:
    """Returns the options by the names that Python has, but for those that name the table."""
    names = SAME | OF_VERBS.get(verb, {})
    return {names.get(name, name) for name in options if name in names or name not in PLACES} - OF_ONE_DOOR


@pytest.mark.parametrize(
    ("verb", "door"), [(verb, door) for verb, (_, doors) in DOORS.items() for door in doors]
)
def test_a_door_has_every_option(verb: str, door: str) -> None:
    expected, doors = DOORS[verb]
    wanted = named(verb, expected) - OF_THIS_PROCESS
    has = named(verb, doors[door])
    assert wanted - has == LACKS.get((verb, door), set())
    assert has - wanted - OF_THIS_PROCESS == set()
