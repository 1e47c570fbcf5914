"""`dormouse query`, `sql` and `changes`."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from dormouse.cli.command import ParamOption, Session, TableName, command, group
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
from dormouse.cli.parsing import parse_moment, parse_parameters, parse_where, read_text
from dormouse.errors import InvalidInput
from dormouse.model.cut import BEGINNING
from dormouse.model.text import listed

app = group()

LimitOption = Annotated[int | None, "At most so many rows.", bounds(0)]
VerifyOption = Annotated[bool, "Compare the digest of each file before its rows are given."]
AsOfOption = Annotated[
    str | None, "The rows of a moment: a time, in this machine's time zone if it names none, or a cut's name."
]
ColumnsOption = Annotated[str | None, "Comma-separated; all when not given."]


@command(
    app,
    "query",
    example="dormouse query flights --where carrier=UA --where flight=1:100 --columns flight,delay",
)
def query(
    session: Session,
    table: TableName,
    /,
    where: Annotated[
        list[str] | None,
        "column=value, column=min:max (without the maximum; column=: is not null), or JSON, like "
        "'{\"day\": null}'.",
    ] = None,
    columns: ColumnsOption = None,
    limit: LimitOption = None,
    offset: Annotated[int, "Leave out so many rows first.", bounds(0)] = 0,
    descending: Annotated[bool, "The largest keys first."] = False,
    as_of: AsOfOption = None,
    verify: VerifyOption = False,
    format: FormatOption = "table",
    output: OutputOption = None,
    explain: ExplainOption = False,
) -> None:
    """The rows that meet conditions, in key order. Values with a colon: write it as \\:."""
    format = check_output(session, format, output, explain=explain)
    with session.open(read_only=True) as instance:
        of = instance.table(table)
        moment = moment_of(as_of)
        schema = of.schema if moment is None else of.schema_at(moment)
        condition, named = parse_where(schema, where or []), listed(columns) if columns else None
        if explain:
            from dormouse.reading.where import question

            question(schema, condition, named, limit)  # its columns are there
            show_plans(session, {table: of.explain(condition, as_of=moment)})
            return
        reader = of.query(
            condition,
            named,
            limit=limit,
            offset=offset,
            descending=descending,
            as_of=moment,
            verify=verify,
        )
        write(session, reader, format, output, limited=limit is not None)


@command(app, "sql", example='dormouse sql "select carrier, avg(delay) from flights group by 1 order by 1"')
def sql(
    session: Session,
    statement: Annotated[str | None, "A SELECT over the tables, by name; - reads it from stdin."] = None,
    /,
    file: Annotated[Path | None, "A file with the statement."] = None,
    param: ParamOption = None,
    limit: LimitOption = None,
    as_of: AsOfOption = None,
    verify: VerifyOption = False,
    format: FormatOption = "table",
    output: OutputOption = None,
    explain: ExplainOption = False,
) -> None:
    """The answer of a SELECT over the instance's tables, in DuckDB's dialect."""
    format = check_output(session, format, output, explain=explain)
    if (statement is None) == (file is None):
        raise InvalidInput("give a statement, - to read it from stdin, or --file FILE")
    text = str(statement) if file is None and statement != "-" else read_text(file or Path("-"))
    parameters = parse_parameters(param or [])
    with session.open(read_only=True) as instance:
        if explain:
            show_plans(session, instance.explain_sql(text, parameters, as_of=moment_of(as_of)))
            return
        reader = instance.sql(text, parameters, as_of=moment_of(as_of), verify=verify)
        if is_plan(reader) and output is None and format == "table" and not session.as_json:
            print_plan(reader)
            return
        if limit is not None:
            from dormouse.reading.streams import first_rows

            reader = first_rows(reader, limit)
        write(session, reader, format, output, limited=limit is not None)


def moment_of(as_of: str | None) -> str | datetime | None:
    return None if as_of is None else parse_moment(as_of)


@command(app, "changes", example="dormouse changes flights --consumer etl --format parquet -o new.parquet")
def changes(
    session: Session,
    table: TableName,
    /,
    after: Annotated[
        str | None,
        "A time, in this machine's time zone if it names none, or a cut's name; from the beginning: "
        "'beginning'.",
    ] = None,
    till: Annotated[str | None, "As --after; now when not given."] = None,
    consumer: Annotated[
        str | None, "What is new to this consumer; acknowledged when all of it is written."
    ] = None,
    from_: Annotated[
        str | None, "As --after: where the consumer begins, if there is none of the name."
    ] = None,
    columns: ColumnsOption = None,
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
    if (after is None) == (consumer is None):
        raise InvalidInput("give --after, or --consumer NAME, which knows where it stands")
    if consumer is not None and till is not None:
        raise InvalidInput("a consumer reads up to now: leave --till out")
    if consumer is None and from_ is not None:
        raise InvalidInput("--from is where a new consumer begins: give --consumer NAME, or --after instead")
    if consumer is None and till == BEGINNING:
        raise InvalidInput("nothing is before the beginning: give --till another moment, or leave it out")
    names = None if columns is None else listed(columns)
    with session.open(read_only=consumer is None) as instance:
        of = instance.table(table)
        if consumer is None:
            start, end = (None if text == BEGINNING else moment_of(text) for text in (after, till))
            write(session, of.changes(start, end, names), form, output, limited=False)
            return
        etl = of.consumer(consumer, moment_of(from_))
        write(session, etl.read(names), form, output, limited=False)
        etl.acknowledge()
