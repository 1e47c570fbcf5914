"""Options of verbs. A door whose options are written by hand must have all of them."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import cache
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
from tests.support.api import Instance, Table
from tests.support.rows import RowTable
from tests.support.verbs import VERBS, fields_of

Options = Iterable[str]

OF_THIS_PROCESS = {"interruption", "sessions", "progress", "waiting", "changed_by"}
"""The options that belong to the process that runs a verb: callables, and the user, known to doors
otherwise.
"""
PLACES = {"self", "table", "instance", "dsn", "objects"}
"""Options that name the table or its instance."""
OF_ONE_DOOR = {
    "yes", "format", "output", "explain", "create", "key", "sort_key", "key_row_number", "as_json", "debug",
    "split_bytes", "metadata", "max_rows_per_batch", "changes_after", "changes_till", "count", "consumer",
    "from_", "region", "profile", "help", "data", "file", "path",
}  # fmt: skip
"""The options that only one door has: for prompts, files, output, paging, or a table created on the way."""

OF_CSV = dict.fromkeys(TextFormat.model_fields, "how")
OF_DATA = dict.fromkeys(("paths", "frame", "type", *TextFormat.model_fields), "data")
OTHERWISE: dict[str, dict[str, str]] = {
    "sql": dict.fromkeys(("file", "limit", "write_", "dry_run", "edit_id"), "statement"),
    "ingest": OF_DATA,
    "upsert": OF_DATA,
    "delete": dict.fromkeys(("all", "where_sql"), "where"),
    "rows upload": OF_CSV,
}
"""The options that have another name at a door than in the request, by verb."""

PYTHON: dict[str, Callable[..., Any]] = {
    "query": Table.query,
    "plan": Table.explain,
    "sql": Instance.sql,
    "plan_sql": Instance.explain_sql,
    "execute": Instance.execute,
    "changes": Table.changes,
    "ingest": Table.ingest,
    "compact": Table.compact,
    "split": Table.split,
    "rows query": RowTable.query,
    "rows change": RowTable.change,
    "rows upsert": RowTable.upsert,
    "rows upload": RowTable.upload_csv,
}
CLIENT: dict[str, Callable[..., Any]] = {
    "query": RemoteTable.query,
    "plan": RemoteTable.explain,
    "sql": Client.sql,
    "plan_sql": Client.explain_sql,
    "execute": Client.execute,
    "changes": RemoteTable.changes,
    "rows query": RemoteRowTable.query,
    "rows change": RemoteRowTable.change,
    "rows upsert": RemoteRowTable.upsert,
    "rows upload": RemoteRowTable.upload_csv,
}
NOT_COMMANDS = {"plan", "plan_sql", "execute", "index rows", "index row columns"}
"""The verbs without a command of their own: those that are options of `query` or `sql`, and works of jobs."""
WRITTEN_OUT = {"rows create", "table create", "table show", "table list"}
"""The commands that build the request from options of their own, such as one option for each column."""


def python(method: Callable[..., Any]) -> Options:
    return inspect.signature(method).parameters


@cache
def command(name: str) -> Options:
    found: Any = typer.main.get_command(whole())
    for word in name.split():
        found = found.commands[word]
    return [parameter.name for parameter in found.params]


def submitted(work: str) -> Options:
    [works] = [each for each in job_parser()._actions if isinstance(each, argparse._SubParsersAction)]
    return [action.dest for action in works.choices[work]._actions]


SPARK: dict[str, dict[str, Options]] = {
    "query": {"Spark": spark_options._READS},
    "ingest": {
        "Spark": {"paths", *spark_options._WRITES},
        "Spark's function": python(frames.write),
        "spark-submit": submitted("ingest"),
    },
    "compact": {"spark-submit": submitted("compact")},
}


def doors(verb: str) -> Iterator[tuple[str, Options]]:
    for door, methods in (("Python", PYTHON), ("the client", CLIENT)):
        if verb in methods:
            yield door, python(methods[verb])
    if verb not in NOT_COMMANDS | WRITTEN_OUT:
        yield "the command line", command(verb)
    yield from SPARK.get(verb, {}).items()


def named(verb: str, options: Options) -> set[str]:
    """Returns the options by their names in the request, except the options that name the table."""
    names = OTHERWISE.get(verb, {})
    return {names.get(name, name) for name in options if name in names or name not in PLACES} - OF_ONE_DOOR


@pytest.mark.parametrize(("verb", "door", "options"), [(v, *each) for v in VERBS for each in doors(v)])
def test_a_door_has_every_option(verb: str, door: str, options: Options) -> None:
    wanted = named(verb, fields_of(VERBS[verb].request))
    if "park" in door:
        wanted -= {"engine"}  # the engine of this door is Spark
    assert named(verb, options) - OF_THIS_PROCESS == wanted


@pytest.mark.parametrize(
    ("verb", "method", "options"),
    [
        ("upsert", Table.upsert, command("upsert")),
        ("delete", Table.delete, command("delete")),
        ("count", Table.count, python(RemoteTable.count)),
    ],
)
def test_a_door_to_a_method_without_a_verb_has_every_option(
    verb: str, method: Callable[..., Any], options: Options
) -> None:
    assert named(verb, options) == named(verb, python(method)) - OF_THIS_PROCESS
