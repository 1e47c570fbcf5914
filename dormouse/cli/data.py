"""`dormouse delete`, `query` and `sql`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import islice
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dormouse.cli.parsing import parse_moment, parse_parameters, parse_where
from dormouse.cli.verbs import ParamOption, Session, TableName, agreed, plural, verb
from dormouse.errors import InvalidInput
from dormouse.model.loops import Progress
from dormouse.model.text import listed
from dormouse.objects.staging import whole_file

if TYPE_CHECKING:
    import pyarrow as pa

    from dormouse.api.table import Table
    from dormouse.reading.planner import PlanSummary
    from dormouse.reading.where import DeleteWhere
    from dormouse.writing.deleting import DeleteReport

ROWS_SHOWN = 20
"""On a terminal; elsewhere all are."""
TABLE_ROWS = 10_000
"""Of one table: more rows are several tables, so that they need not fit into memory."""
_BINARY = {"arrow", "parquet"}


Format = Literal["table", "csv", "tsv", "json", "lines", "arrow", "parquet"]
FormatOption = Annotated[
    Format, typer.Option("--format", "-f", help="How rows are written; lines have a JSON object each.")
]
RowsToGo = Annotated[
    list[str] | None,
    typer.Option(
        help="column=value, column=min:max with at least one end, or JSON, like "
        "'{\"day\": null}'; rows must meet all."
    ),
]
AllRows = Annotated[bool, typer.Option("--all", help="All rows.")]
LimitOption = Annotated[int | None, typer.Option(min=0, help="At most so many rows.")]
VerifyOption = Annotated[
    bool, typer.Option("--verify", help="Compare the digest of each file before its rows are given.")
]
ExplainOption = Annotated[bool, typer.Option("--explain", help="Say what would be read, and read nothing.")]
AsOfOption = Annotated[
    str | None,
    typer.Option(
        "--as-of",
        help="The rows of a moment: a time, in this machine's time zone if it names none, or a cut's name.",
        show_default=False,
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="Write to this file; its name tells the format, like x.parquet or x.csv.gz."
    ),
]


def add_to(app: typer.Typer) -> None:
    verb(app, "delete", example="dormouse delete flights --where carrier=UA --dry-run")(delete)
    verb(
        app,
        "query",
        example="dormouse query flights --where carrier=UA --where flight=1:100 --columns flight,delay",
    )(query)
    verb(app, "sql", example='dormouse sql "select carrier, avg(delay) from flights group by 1 order by 1"')(
        sql
    )


def delete(
    session: Session,
    table: TableName,
    where: RowsToGo = None,
    all: AllRows = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count the rows that match, and change nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete rows, at once, for every reader. Asks first on a terminal; elsewhere it needs --yes."""
    check_said("delete", where, all)
    with session.open(read_only=dry_run) as instance:
        found = instance.table(table)
        condition, what = rows_to_go(found, table, where)
        if not (dry_run or yes) and not agreed(f"delete {what}", f"Delete {what}?"):
            raise InvalidInput("nothing was deleted")
        report = found.delete(condition, dry_run=dry_run)
    session.show(
        report,
        lambda: (
            f"would delete {plural(report.rows or 0, 'row')} of table {table}"
            if dry_run
            else f"deleted {what} ({_deletion(report)})"
        ),
    )


def check_said(verb: str, where: list[str] | None, all: bool) -> None:
    """Rows go when it is said which: by conditions, or all of them."""
    if all == bool(where):
        raise InvalidInput(f"say which rows to {verb} by --where, or --all of them")


def rows_to_go(found: Table, table: str, where: list[str] | None) -> tuple[DeleteWhere, str]:
    """Their condition, and in words; without conditions it is all rows."""
    from dormouse.reading.where import ALL

    if not where:
        return ALL, f"all rows of table {table}"
    return parse_where(found.schema, where), f"the rows of table {table} with {' '.join(where)}"


def _deletion(report: DeleteReport) -> str:
    return plural(report.rows or 0, "row") if report.deletion_id is None else f"deletion {report.deletion_id}"


def query(
    session: Session,
    table: TableName,
    where: Annotated[
        list[str] | None,
        typer.Option(
            help="column=value, column=min:max (without the maximum; column=: is not null), "
            "or JSON, like '{\"day\": null}'."
        ),
    ] = None,
    columns: Annotated[str | None, typer.Option(help="Comma-separated; all when not given.")] = None,
    limit: LimitOption = None,
    offset: Annotated[int, typer.Option(min=0, help="Leave out so many rows first.")] = 0,
    descending: Annotated[bool, typer.Option("--descending", help="The largest keys first.")] = False,
    as_of: AsOfOption = None,
    verify: VerifyOption = False,
    format: FormatOption = "table",
    output: OutputOption = None,
    explain: ExplainOption = False,
) -> None:
    """The rows that meet conditions, in key order. Values with a colon: write it as \\:."""
    format = check_output(session, format, output, explain=explain)
    with session.open(read_only=True) as instance:
        found = instance.table(table)
        moment = moment_of(as_of)
        schema = found.schema if moment is None else found.schema_at(moment)
        condition, named = parse_where(schema, where or []), listed(columns) if columns else None
        if explain:
            from dormouse.reading.where import question

            question(schema, condition, named, limit)  # its columns are there
            show_plans(session, {table: found.explain(condition, as_of=moment)})
            return
        reader = found.query(
            condition,
            named,
            limit=limit,
            offset=offset,
            descending=descending,
            as_of=moment,
            verify=verify,
        )
        write(session, reader, format, output, limited=limit is not None)


def sql(
    session: Session,
    statement: Annotated[
        str | None,
        typer.Argument(help="A SELECT over the tables, by name; - reads it from stdin.", show_default=False),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="A file with the statement.", show_default=False)
    ] = None,
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
    text, parameters = read_statement(statement, file), parse_parameters(param or [])
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


def read_statement(statement: str | None, file: Path | None) -> str:
    """What was given, or what a file or stdin has."""
    if (statement is None) == (file is None):
        raise InvalidInput("give a statement, - to read it from stdin, or --file FILE")
    try:
        if file is not None:
            return file.read_text("utf-8")
        return sys.stdin.buffer.read().decode() if statement == "-" else str(statement)
    except OSError as error:
        raise InvalidInput(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{file or 'stdin'} is not UTF-8 text") from None


def is_plan(reader: pa.RecordBatchReader) -> bool:
    """Whether it is the answer of EXPLAIN."""
    return list(reader.schema.names) == ["plan_type", "plan"]


def print_plan(reader: pa.RecordBatchReader) -> None:
    """Each part of a plan under its name: in a table, its lines would be cut off."""
    for batch in reader:
        for row in batch.to_pylist():
            sys.stdout.write(f"{row['plan_type']}\n{indent(row['plan'].rstrip(), '  ')}\n")


def show_plans(session: Session, plans: Mapping[str, PlanSummary]) -> None:
    """What would be read of each table."""
    from dormouse.cli.console import byte_size, grid

    columns = ("table", "partitions", "of", "files", "files pruned", "size")
    session.show(
        plans,
        lambda: grid(
            columns,
            [
                (
                    name,
                    one.partitions,
                    one.partitions_total,
                    one.files,
                    one.files_pruned,
                    byte_size(one.byte_count),
                )
                for name, one in plans.items()
            ],
        ),
    )


def check_output(
    session: Session, file_format: Format, output: Path | None, *, explain: bool = False
) -> Format:
    """Returns the format of the output, by the file's name if none is given, before any work is done."""
    if explain and (output is not None or file_format != "table"):
        raise InvalidInput("--explain reads no rows that --output or --format could be of: leave these out")
    if output is not None and file_format == "table":
        file_format = format_of(output, file_format)
        if file_format == "table":
            raise InvalidInput(
                f"the name of {str(output)!r} tells no format: give --output {output.stem}.parquet, or "
                "--format csv, tsv, json, lines, arrow or parquet"
            )
    if output is not None and file_format != "table":
        from dormouse.sources.export import check_compression

        check_compression(output, file_format)
    if output is None and file_format in _BINARY and sys.stdout.isatty():
        raise InvalidInput(f"--format {file_format} is not for a terminal: give --output FILE, or a pipe")
    if session.as_json and output is None and file_format in {"csv", "tsv", *_BINARY}:
        raise InvalidInput(f"--json and --format {file_format} contradict each other")
    return file_format


def format_of(output: Path | None, otherwise: Format) -> Format:
    """Returns the format that the name of a file tells."""
    if output is None:
        return otherwise
    from dormouse.sources.export import format_of_name

    return format_of_name(output) or otherwise


def write(
    session: Session,
    reader: pa.RecordBatchReader,
    file_format: Format,
    output: Path | None,
    *,
    limited: bool,
) -> None:
    """Rows on stdout, or in a file with a line about it on stdout."""
    from dormouse.sources.export import export

    if output is not None:
        from dormouse.cli.console import progress

        with progress(f"write {output.name}", unit="rows") as moved:
            rows = _to_file(_followed(reader, moved), file_format, output)
        session.show({"file": str(output), "rows": rows}, lambda: f"wrote {plural(rows, 'row')} to {output}")
    elif session.as_json or file_format != "table":
        export(reader, sys.stdout.buffer, "json" if session.as_json else file_format)
    else:
        _print_table(reader, None if limited or not sys.stdout.isatty() else ROWS_SHOWN)


def _followed(reader: pa.RecordBatchReader, moved: Progress) -> pa.RecordBatchReader:
    """The same rows, which tell how many they are as they pass."""

    def batches() -> Iterator[pa.RecordBatch]:
        done = 0
        for batch in reader:
            done += batch.num_rows
            moved(done, None)
            yield batch

    return reader.from_batches(reader.schema, batches())


def _to_file(reader: pa.RecordBatchReader, file_format: str, output: Path) -> int:
    """Whole, or not at all; devices and pipes are written to as they are."""
    from dormouse.sources.export import compressed, export

    if not output.exists() or output.is_file():
        with whole_file(output) as file, compressed(file, output) as sink:
            return export(reader, sink, file_format)
    try:
        with output.open("wb") as file, compressed(file, output) as sink:
            return export(reader, sink, file_format)
    except OSError as error:
        raise InvalidInput(f"cannot write {str(output)!r}: {error.strerror}") from None


def _print_table(reader: pa.RecordBatchReader, rows_max: int | None) -> None:
    from dormouse.cli.console import rows_table, stderr, stdout

    rows = (row for batch in reader for row in rows_of(batch))
    portion, done, is_over = TABLE_ROWS if rows_max is None else rows_max + 1, 0, False
    while not is_over:
        shown = list(islice(rows, portion))
        if shown or not done:
            stdout().print(rows_table(reader.schema.names, shown[:rows_max]))
        done += len(shown)
        is_over = rows_max is not None or len(shown) < portion
    if rows_max is not None and done > rows_max:
        stderr().print(f"the first {plural(rows_max, 'row')}; --limit or --format for more", highlight=False)
    else:
        stderr().print(plural(done, "row"), highlight=False)


def rows_of(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Returns the rows with values that a terminal shows."""
    from dormouse.sources.export import python_values

    names = batch.schema.names
    return (
        dict(zip(names, row, strict=True)) for row in zip(*map(python_values, batch.columns), strict=True)
    )
