"""`dormouse query`, `sql` and `changes`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from dormouse.cli.command import Session, command, group
from dormouse.cli.options import bounds
from dormouse.cli.output import (
    ExplainOption,
    FormatOption,
    OutputOption,
    check_output,
    format_of,
    is_plan,
    print_plan,
    show_plans,
    write,
)
from dormouse.cli.parsing import parse_moment, parse_where, read_text
from dormouse.errors import InvalidInput
from dormouse.model.cut import BEGINNING
from dormouse.verbs.reading import ChangesRequest, QueryRequest, StatementRequest
from dormouse.verbs.verb import options

app = group()


@command(
    app,
    "query",
    example="dormouse query flights --where carrier=UA --where flight=1:100 --columns flight,delay",
)
def query(
    session: Session,
    asked: QueryRequest,
    where: Annotated[
        list[str] | None,
        "column=value, column=min:max (without the maximum; column=: is not null), or JSON, like "
        "'{\"day\": null}'.",
    ] = None,
    format: FormatOption = "table",
    output: OutputOption = None,
    explain: ExplainOption = False,
) -> None:
    """The rows that meet conditions, in key order. Values with a colon: write it as \\:."""
    format = check_output(session, format, output, explain=explain)
    given = options(asked, "table")
    given["columns"] = columns = asked.columns or None
    with session.open(read_only=True) as instance:
        table, moment = instance.table(asked.table), given["as_of"]
        schema = table.schema if moment is None else table.schema_at(moment)
        condition = parse_where(schema, where or [])
        if explain:
            from dormouse.reading.where import question

            question(schema, condition, columns, asked.limit)  # its columns are there
            show_plans(session, {asked.table: table.explain(condition, as_of=moment)})
            return
        reader = table.query(**given | {"where": condition})
        write(session, reader, format, output, limited=asked.limit is not None)


@command(app, "sql", example='dormouse sql "select carrier, avg(delay) from flights group by 1 order by 1"')
def sql(
    session: Session,
    asked: StatementRequest,
    statement: Annotated[str | None, "A SELECT over the tables, by name; - reads it from stdin."] = None,
    /,
    file: Annotated[Path | None, "A file with the statement."] = None,
    limit: Annotated[int | None, "At most so many rows.", bounds(0)] = None,
    format: FormatOption = "table",
    output: OutputOption = None,
    explain: ExplainOption = False,
) -> None:
    """The answer of a SELECT over the instance's tables, in DuckDB's dialect."""
    format = check_output(session, format, output, explain=explain)
    if (statement is None) == (file is None):
        raise InvalidInput("give a statement, - to read it from stdin, or --file FILE")
    text = str(statement) if file is None and statement != "-" else read_text(file or Path("-"))
    given = options(asked)
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


@command(app, "changes", example="dormouse changes flights --consumer etl --format parquet -o new.parquet")
def changes(
    session: Session,
    asked: ChangesRequest,
    consumer: Annotated[
        str | None, "What is new to this consumer; acknowledged when all of it is written."
    ] = None,
    from_: Annotated[
        str | None, "As --after: where the consumer begins, if there is none of the name."
    ] = None,
    format: Annotated[
        Literal["lines", "json", "csv", "tsv", "arrow", "parquet"] | None,
        typer.Option(
            "--format",
            "-f",
            help="Lines, which are the default, have a JSON object each; JSON is an array of them.",
        ),
    ] = None,
    output: OutputOption = None,
) -> None:
    """The rows that came after a moment, as they were ingested, and those that were deleted, with `_change`.

    A new consumer begins now, or at --from.
    """
    form = check_output(session, format or format_of(output, "lines"), output)
    if (asked.after is None) == (consumer is None):
        raise InvalidInput("give --after, or --consumer NAME, which knows where it stands")
    if consumer is not None and asked.till is not None:
        raise InvalidInput("a consumer reads up to now: leave --till out")
    if consumer is None and from_ is not None:
        raise InvalidInput("--from is where a new consumer begins: give --consumer NAME, or --after instead")
    if asked.till == BEGINNING:
        raise InvalidInput("nothing is before the beginning: give --till another moment, or leave it out")
    given = options(asked, "table")
    with session.open(read_only=consumer is None) as instance:
        table = instance.table(asked.table)
        if consumer is None:
            given["after"] = None if asked.after == BEGINNING else given["after"]
            write(session, table.changes(**given), form, output, limited=False)
            return
        etl = table.consumer(consumer, None if from_ is None else parse_moment(from_))
        write(session, etl.read(asked.columns), form, output, limited=False)
        etl.acknowledge()
