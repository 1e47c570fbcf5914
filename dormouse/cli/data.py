"""`dormouse query`, `sql`, `changes`, `delete`, `erase`, `erasures` and `restore-table`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dormouse.cli.command import DryRun, Session, TableName, Yes, ask, command, group, plural
from dormouse.cli.console import progress
from dormouse.cli.options import bounds
from dormouse.cli.output import (
    ExplainOption,
    FormatOption,
    OutputOption,
    check_output,
    executed_said,
    format_of,
    is_plan,
    print_plan,
    show_plans,
    write,
)
from dormouse.cli.parsing import parse_moment, parse_where, read_text
from dormouse.errors import InvalidInput
from dormouse.model.cut import BEGINNING
from dormouse.model.edits import Sql
from dormouse.model.table import Engine
from dormouse.verbs.reading import ChangesRequest, QueryRequest, StatementRequest
from dormouse.verbs.verb import options

if TYPE_CHECKING:
    from dormouse.api.table import Table
    from dormouse.durability.erasing import EraseReport
    from dormouse.reading.where import DeleteWhere

app = group()


@command(app, example="flights --where carrier=UA --where flight=1:100 --columns flight,delay")
def query(
    session: Session,
    request: QueryRequest,
    where: Annotated[
        list[str] | None,
        "column=value, column=min:max (without the maximum; column=: is not null), or JSON, like "
        "'{\"day\": null}'.",
    ] = None,
    format: FormatOption = "table",
    output: OutputOption = None,
    explain: ExplainOption = False,
) -> None:
    """Print the rows that meet conditions, in key order. Write a colon within a value as \\:."""
    format = check_output(session, format, output, explain=explain)
    given = options(request, "table")
    given["columns"] = columns = request.columns or None
    with session.open(read_only=True) as instance:
        table, moment = instance.table(request.table), given["as_of"]
        schema = table.schema if moment is None else table.schema_at(moment)
        condition = parse_where(schema, where or [])
        if explain:
            from dormouse.reading.where import question

            question(schema, condition, columns, request.limit)  # its columns are there
            show_plans(session, {request.table: table.explain(condition, as_of=moment)})
            return
        reader = table.query(**given | {"where": condition})
        write(session, reader, format, output, limited=request.limit is not None)


@command(app, example='"select carrier, avg(delay) from flights group by 1 order by 1"')
def sql(
    session: Session,
    request: StatementRequest,
    statement: Annotated[str | None, "A SELECT over the tables, by name; - reads it from stdin."] = None,
    /,
    write_: Annotated[bool, "Run an INSERT, UPDATE, DELETE, TRUNCATE or MERGE INTO instead."] = False,
    dry_run: Annotated[bool, "With --write: count the rows that would change, and change nothing."] = False,
    edit_id: Annotated[str | None, "With --write: an id; the same id again changes nothing."] = None,
    file: Annotated[Path | None, "A file with the statement."] = None,
    limit: Annotated[int | None, "The most rows to print.", bounds(0)] = None,
    format: FormatOption = "table",
    output: OutputOption = None,
    explain: ExplainOption = False,
) -> None:
    """Print the answer of a SELECT over the instance's tables, in DuckDB's dialect.

    With --write, run a statement that writes, and print how many rows it changed.
    """
    format = check_output(session, format, output, explain=explain)
    if (statement is None) == (file is None):
        raise InvalidInput("give a statement, - to read it from stdin, or --file FILE")
    text = str(statement) if file is None and statement != "-" else read_text(file or Path("-"))
    given = options(request)
    if write_:
        if (
            explain
            or limit is not None
            or output is not None
            or format != "table"
            or request.as_of
            or request.verify
        ):
            raise InvalidInput(
                "--write prints no rows: leave out --explain, --limit, --output, --format, --as-of and "
                "--verify"
            )
        _write(session, text, given["parameters"], edit_id, dry_run=dry_run)
        return
    if dry_run or edit_id is not None:
        raise InvalidInput("--dry-run and --id are for statements that write: give --write, too")
    with session.open(read_only=True) as instance:
        if explain:
            del given["verify"]
            show_plans(session, instance.explain_sql(text, **given))
            return
        reader = instance.sql(text, **given)
        if is_plan(reader) and output is None and format == "table" and not session.as_json:
            print_plan(reader)
            return
        if limit is not None:
            from dormouse.reading.streams import first_rows

            reader = first_rows(reader, limit)
        write(session, reader, format, output, limited=limit is not None)


def _write(session: Session, text: str, parameters: Any, edit_id: str | None, *, dry_run: bool) -> None:
    with session.open(read_only=dry_run) as instance, progress("run the statement", unit="rows"):
        report = instance.execute(text, parameters, edit_id=edit_id, dry_run=dry_run)
    session.show(report, executed_said(report))


@command(app, example="flights --consumer etl --format parquet -o new.parquet")
def changes(
    session: Session,
    request: ChangesRequest,
    consumer: Annotated[
        str | None, "Print this consumer's new changes, and acknowledge them once all are written."
    ] = None,
    from_: Annotated[str | None, "The moment at which the consumer begins, if it does not exist yet."] = None,
    format: Annotated[
        Literal["lines", "json", "csv", "tsv", "arrow", "parquet"] | None,
        typer.Option(
            "--format",
            "-f",
            help="The format [lines, with one JSON object per line]; json is one array.",
        ),
    ] = None,
    output: OutputOption = None,
) -> None:
    """Print the rows that were ingested and deleted after a moment, with a column `_change`.

    A new consumer begins now, or at --from.
    """
    form = check_output(session, format or format_of(output, "lines"), output)
    if (request.after is None) == (consumer is None):
        raise InvalidInput("give --after, or --consumer NAME to continue where that consumer stopped")
    if consumer is not None and request.till is not None:
        raise InvalidInput("leave --till out: a consumer always reads up to now")
    if consumer is None and from_ is not None:
        raise InvalidInput(
            "--from needs --consumer NAME, because it sets where a new consumer begins; "
            "without one, give --after"
        )
    if request.till == BEGINNING:
        raise InvalidInput(
            "--till cannot be the beginning, before which there are no changes: give "
            "another moment, or leave it out"
        )
    given = options(request, "table")
    with session.open(read_only=consumer is None) as instance:
        table = instance.table(request.table)
        if consumer is None:
            given["after"] = None if request.after == BEGINNING else given["after"]
            write(session, table.changes(**given), form, output, limited=False)
            return
        etl = table.consumer(consumer, None if from_ is None else parse_moment(from_))
        write(session, etl.read(request.columns), form, output, limited=False)
        etl.acknowledge()


RowsToGo = Annotated[
    list[str] | None,
    "column=value, column=min:max with at least one end, or JSON, like '{\"day\": null}'; rows must meet "
    "all.",
]
WhereSql = Annotated[
    str | None, "A condition in SQL over the row's columns, like 'delay > 60', instead of --where."
]
AllRows = Annotated[bool, "All rows."]


@command(app, example="flights --where carrier=UA --dry-run")
def delete(
    session: Session,
    table: TableName,
    /,
    where: RowsToGo = None,
    where_sql: WhereSql = None,
    all: AllRows = False,
    dry_run: Annotated[bool, "Count the rows that match, and change nothing."] = False,
    yes: Yes = False,
) -> None:
    """Delete rows, at once, for every reader. Asks first on a terminal; elsewhere it needs --yes."""
    check_said("delete", where, all, where_sql)
    with session.open(read_only=dry_run) as instance:
        of = instance.table(table)
        condition, what = rows_to_edit(of, table, where, where_sql)
        ask(dry_run or yes, f"delete {what}", done="deleted")
        with progress(f"delete rows of {table}", unit="rows"):
            report = of.delete(condition, dry_run=dry_run)
    rows = plural(report.rows or 0, "row")
    how = rows if report.deletion_id is None else f"deletion {report.deletion_id}"
    would = f"would delete {rows} of table {table}"
    session.show(report, would if dry_run else f"deleted {what} ({how})")


@command(app, example="customers --where email=a@example.com --dry-run")
def erase(
    session: Session,
    table: TableName,
    /,
    where: RowsToGo = None,
    all: AllRows = False,
    dry_run: Annotated[bool, "Find the files that have such rows, and change nothing."] = False,
    yes: Yes = False,
    engine: Annotated[Engine, "auto: Spark if it has a cluster, else this machine."] = "auto",
    wait_seconds: Annotated[float, "The longest wait for jobs, consumers and writers.", bounds(0)] = 60.0,
    abandon_writers: Annotated[bool, "Refuse the commits of writers that began before the erasure."] = False,
    backups: Annotated[
        list[str] | None,
        typer.Option(help="A place to search for backups, besides the known ones.", metavar="PLACE"),
    ] = None,
) -> None:
    """Delete rows permanently: also from the history, and from deleted objects that the store keeps. An
    interrupted erasure continues when it is run again. Asks first on a terminal; elsewhere it needs --yes."""
    check_said("erase", where, all)
    with session.open(read_only=dry_run) as instance:
        of = instance.table(table)
        condition, what = rows_to_go(of, table, where)
        question = f"Erase {what} permanently, also from the history?"
        ask(dry_run or yes, f"erase {what}", done="erased", question=question)
        with progress(f"erase rows of {table}", unit="files") as moved:
            report = of.erase(
                condition,
                dry_run,
                engine=engine,
                wait_seconds=wait_seconds,
                abandon_writers=abandon_writers,
                backups=backups or [],
                progress=moved,
            )
    session.show({**asdict(report), "finished": report.is_finished}, _erased(what, report))
    if report.open:
        raise typer.Exit(1)


@command(app, example="customers --json")
def erasures(session: Session, table: TableName, /) -> None:
    """List the proofs of a table's erasures, the oldest first."""
    with session.open(read_only=True) as instance:
        proofs = instance.table(table).erasures()
    session.lines(
        [{**asdict(one), "finished": one.is_finished} for one in proofs],
        (_erased(f"deletion {one.deletion_id} of {one.deleted_at}", one) for one in proofs),
        empty=f"nothing of table {table} was erased",
    )


@command(app, example='flights --to "2026-11-20 14:00"')
def restore_table(
    session: Session,
    table: TableName,
    /,
    to: Annotated[str, "The moment: a time, in this machine's time zone if it names none, or a cut's name."],
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Give a table the rows that it had at a moment, in one commit, which can be undone in the same way."""
    moment = parse_moment(to)
    with session.open(read_only=dry_run) as instance:
        of = instance.table(table)
        would = of.restore(moment, dry_run=True)
        about = "" if would.exact else "about "
        what = (
            f"{about}{plural(would.rows_removed, 'row')} removed, "
            f"{about}{plural(would.rows_restored, 'row')} brought back (file references: "
            f"{would.references_removed:,} removed, {would.references_restored:,} added)"
        )
        if dry_run:
            session.show(would, f"would restore {table}: {what}")
            return
        ask(yes, f"restore {table}", done="restored", question=f"Restore {table}: {what}?")
        done = of.restore(moment)
        session.show(done, f"restored {table} to {done.at}: {what}")


def check_said(verb: str, where: list[str] | None, all: bool, where_sql: str | None = None) -> None:
    """Raises `InvalidInput` unless there are either conditions or --all."""
    given = {"--where": bool(where), "--where-sql": where_sql is not None, "--all": all}
    named = [name for name, is_given in given.items() if is_given]
    if len(named) > 1:
        raise InvalidInput(f"give only one of {' and '.join(named)}")
    if not named:
        raise InvalidInput(f"give --where to choose the rows to {verb}, or --all for all of them")


def rows_to_go(of: Table, table: str, where: list[str] | None) -> tuple[DeleteWhere, str]:
    """Returns the condition of the rows to change, and a description of these rows for a question.

    Without conditions, these are all rows.
    """
    from dormouse.reading.where import ALL

    if not where:
        return ALL, f"all rows of table {table}"
    return parse_where(of.schema, where), f"the rows of table {table} with {' '.join(where)}"


def rows_to_edit(
    of: Table, table: str, where: list[str] | None, where_sql: str | None
) -> tuple[DeleteWhere | Sql, str]:
    """Returns the same as `rows_to_go` for rows that may also be chosen by a condition in SQL."""
    if where_sql is not None:
        return Sql(where_sql), f"the rows of table {table} where {where_sql}"
    return rows_to_go(of, table, where)


def _erased(what: str, report: EraseReport) -> str:
    looked = plural(report.files_looked_at, "file")
    copies = f"{plural(report.rows, 'row')} in {plural(report.files, 'file')}"
    if report.deletion_id is None:
        return (
            f"would erase {what}: {copies} of {looked} that may contain such rows, "
            "in the table and its history"
        )
    lines = [
        f"{'erased' if report.is_finished else 'erasure not finished:'} {what} "
        f"(deletion {report.deletion_id}, {report.seconds:.1f} s)",
        f"checked {looked} of the table and its history, and "
        f"{plural(report.objects_looked_at, 'other object')}",
        f"found and deleted {copies}, and {plural(report.versions, 'version')} of deleted objects",
    ]
    lists: dict[str, Any] = {
        "may still contain rows": report.open,
        "could not be checked": report.unreadable,
        "still contain rows or keys": report.backups,
        "consumers that cannot continue, because changes were erased before they read them": report.consumers,
    }
    for title, names in lists.items():
        lines += [f"{title}:", *(f"  {name}" for name in names)] if names else []
    return "\n".join(lines)
