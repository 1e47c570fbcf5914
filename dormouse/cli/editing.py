"""`dormouse update`, `merge-into` and `replace`, and the output of `dormouse sql --write`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from dormouse.cli.command import Session, Yes, ask, command, group, plural
from dormouse.cli.console import progress
from dormouse.cli.data import AllRows, RowsToGo, WhereSql, check_said, rows_to_edit
from dormouse.cli.loading import Many, Paths, TextOption, TypeOption, given_files
from dormouse.cli.output import counts_said, said
from dormouse.errors import InvalidInput
from dormouse.model.edits import Sql, When, WhenMatched, WhenNotMatched
from dormouse.model.text import split_names
from dormouse.model.types import value_of_text
from dormouse.verbs.editing import MergeRequest, ReplaceRequest, UpdateRequest
from dormouse.verbs.verb import options

if TYPE_CHECKING:
    from dormouse.api.instance import Instance
    from dormouse.api.table import Table

app = group()


@command(app, example="flights --where carrier=UA --set late=true --set-sql 'delay=delay + 1' --dry-run")
def update(
    session: Session,
    request: UpdateRequest,
    where: RowsToGo = None,
    where_sql: WhereSql = None,
    all: AllRows = False,
    set_: Annotated[Many, "column=value."] = None,
    set_sql: Annotated[Many, "column=expression, in SQL over the row's columns as they were."] = None,
    yes: Yes = False,
) -> None:
    check_said("update", where, all, where_sql)
    if not (set_ or set_sql):
        raise InvalidInput("give --set column=value or --set-sql column=expression")
    with session.open(read_only=request.dry_run) as instance:
        of = instance.table(request.table)
        condition, what = rows_to_edit(of, request.table, where, where_sql)
        values = _values(of, set_ or [], set_sql or [])
        ask(request.dry_run or yes, f"update {what}", done="updated")
        with progress(f"update rows of {request.table}", unit="rows") as moved:
            report = of.update(condition, values, **options(request, "table"), progress=moved)
    rows = f"{plural(report.rows, 'row')} of table {request.table}"
    session.show(report, said(report, f"update {rows}", f"updated {rows}"))


@command(app, example="orders changes.parquet --on id --when 'matched and s.gone then delete'")
def merge_into(
    session: Session,
    request: MergeRequest,
    paths: Paths,
    /,
    how: TextOption,
    on: Annotated[
        Many, "Columns with equal values: a,b, or repeat the option; or SQL over t and s, like 't.a = s.b'."
    ],
    when: Annotated[
        Many,
        "A clause, as in MERGE INTO after WHEN, over t (the table) and s (the files); repeat the option.",
    ] = None,
    type: TypeOption = None,
) -> None:
    files = given_files(paths, type, how, with_types=False)
    with session.open(read_only=request.dry_run) as instance:
        of = instance.table(request.table)
        clauses = _clauses(instance, of, when)
        with progress(f"merge into {request.table}", unit="rows") as moved:
            report = of.merge_into(files, _on(on), clauses, **options(request, "table"), progress=moved)
    counts = counts_said(report)
    session.show(report, said(report, f"merge into {request.table}: {counts}", f"merged: {counts}"))


@command(app, example="flights january.parquet --where month=2026-01")
def replace(
    session: Session,
    request: ReplaceRequest,
    paths: Paths,
    /,
    how: TextOption,
    where: RowsToGo = None,
    where_sql: WhereSql = None,
    all: AllRows = False,
    type: TypeOption = None,
    yes: Yes = False,
) -> None:
    check_said("replace", where, all, where_sql)
    files = given_files(paths, type, how, with_types=False)
    with session.open(read_only=request.dry_run) as instance:
        of = instance.table(request.table)
        condition, what = rows_to_edit(of, request.table, where, where_sql)
        ask(request.dry_run or yes, f"replace {what}", done="replaced")
        with progress(f"replace rows of {request.table}", unit="rows") as moved:
            report = of.replace(condition, files, **options(request, "table"), progress=moved)
    added = plural(report.inserted, "row")
    would = f"would replace {plural(report.deleted or 0, 'row')} of table {request.table} by {added}"
    again = f"nothing was replaced: the id {report.ingest_id!r} was used before"
    refused = would if request.dry_run else again
    session.show(report, f"replaced {what} by {added}" if report.applied else refused)


def _values(of: Table, texts: list[str], expressions: list[str]) -> dict[str, Any]:
    """Returns the new values of columns, by their names. Raises `InvalidInput` for a text without `=`."""
    found: dict[str, Any] = {}
    schema = of.schema
    for name, text in map(_divided, texts):
        _check_new(found, name)
        kind = schema.field(name).type if name in schema else None
        if kind is not None and kind.is_nested:
            raise InvalidInput(f"column {name!r} is {kind}: give its value as SQL, by --set-sql {name}=…")
        found[name] = text if kind is None else value_of_text(schema.field(name), text)
    for name, text in map(_divided, expressions):
        _check_new(found, name)
        found[name] = Sql(text)
    return found


def _check_new(values: dict[str, Any], name: str) -> None:
    if name in values:
        raise InvalidInput(f"column {name!r} is set twice")


def _divided(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name.strip() or not value.strip():
        raise InvalidInput(f"{text!r}: write column=value, like delay=0; for null, --set-sql column=null")
    return name.strip(), value


def _on(texts: Many) -> list[str] | Sql:
    listed = texts or []
    if any("=" in text for text in listed):
        return Sql(" AND ".join(f"({text}\n)" for text in listed))
    return [name for text in listed for name in split_names(text)]


def _clauses(instance: Instance, of: Table, when: Many) -> list[When]:
    if not when:
        return [WhenMatched(update="*"), WhenNotMatched(insert="*")]
    return instance.merge_clauses(of.name, when)
