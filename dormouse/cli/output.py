"""The output of rows: a table on the terminal, a format on stdout, or a file; and of the reports of edits."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dormouse.cli.command import Session, plural
from dormouse.cli.console import byte_size, progress, rows_table, stderr, stdout
from dormouse.errors import InvalidInput
from dormouse.model.loops import Progress
from dormouse.objects.staging import whole_file

if TYPE_CHECKING:
    import pyarrow as pa

    from dormouse.model.edits import ExecuteReport, MergeReport
    from dormouse.reading.planner import PlanSummary

ROWS_SHOWN = 20
"""The most rows of a table on a terminal. Without a terminal, all rows are printed."""
TABLE_ROWS = 10_000
"""The most rows of one printed table. More rows become several tables, to limit memory."""
_BINARY = {"arrow", "parquet"}

Format = Literal["table", "csv", "tsv", "json", "lines", "arrow", "parquet"]
FormatOption = Annotated[
    Format, typer.Option("--format", "-f", help="The format of the rows; lines: one JSON object per line.")
]
ExplainOption = Annotated[bool, "Show what would be read, and read nothing."]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="Write to this file; its name gives the format, like x.parquet or x.csv.gz."
    ),
]


def is_plan(reader: pa.RecordBatchReader) -> bool:
    """Returns whether rows are the answer of EXPLAIN."""
    return list(reader.schema.names) == ["plan_type", "plan"]


def print_plan(reader: pa.RecordBatchReader) -> None:
    """Prints each part of a query plan below its name, not as a table, which would cut lines off."""
    for batch in reader:
        for row in batch.to_pylist():
            sys.stdout.write(f"{row['plan_type']}\n{indent(row['plan'].rstrip(), '  ')}\n")


def show_plans(session: Session, plans: Mapping[str, PlanSummary]) -> None:
    """Prints the plan summary of each table."""
    columns = ("table", "partitions", "of", "files", "files pruned", "size")
    rows = (
        (name, one.partitions, one.partitions_total, one.files, one.files_pruned, byte_size(one.byte_count))
        for name, one in plans.items()
    )
    session.table(plans, columns, rows)


def check_output(
    session: Session, file_format: Format, output: Path | None, *, explain: bool = False
) -> Format:
    """Returns the format of the output, which the file's name decides if no format is given.

    Called before any work is done. Raises `InvalidInput` for options that contradict each other.
    """
    if explain and (output is not None or file_format != "table"):
        raise InvalidInput("--explain reads no rows: leave --output and --format out")
    if output is not None and file_format == "table":
        file_format = format_of(output, file_format)
        if file_format == "table":
            raise InvalidInput(
                f"the name {str(output)!r} does not give a format: write --output {output.stem}.parquet, or "
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
    """Returns the format that a file's name implies, or `otherwise` without a file or a known ending."""
    if output is None:
        return otherwise
    from dormouse.sources.export import format_of_name

    return format_of_name(output) or otherwise


def write(
    session: Session, reader: pa.RecordBatchReader, file_format: Format, output: Path | None, *, limited: bool
) -> None:
    """Writes rows to stdout, or to the file `output`. For a file, prints its name and row count.

    With `limited`, the query has a limit, and a table on the terminal shows all rows.
    """
    from dormouse.sources.export import export

    if output is not None:
        with progress(f"write {output.name}", unit="rows") as moved:
            rows = _to_file(reader, file_format, output, moved)
        show_written(session, str(output), rows)
    elif session.as_json or file_format != "table":
        export(reader, sys.stdout.buffer, "json" if session.as_json else file_format)
    else:
        _print_table(reader, None if limited or not sys.stdout.isatty() else ROWS_SHOWN)


def show_written(session: Session, file: str, rows: int) -> None:
    """Prints the name and the row count of a written file."""
    session.show({"file": file, "rows": rows}, f"wrote {plural(rows, 'row')} to {file}")


def _to_file(reader: pa.RecordBatchReader, file_format: str, output: Path, moved: Progress) -> int:
    """Writes rows to a file, and returns their number. A failure leaves no part of a file.

    Writes directly to devices and pipes.
    """
    from dormouse.sources.export import compressed, export

    if not output.exists() or output.is_file():
        with whole_file(output) as file, compressed(file, output) as sink:
            return export(reader, sink, file_format, moved)
    try:
        with output.open("wb") as file, compressed(file, output) as sink:
            return export(reader, sink, file_format, moved)
    except OSError as error:
        raise InvalidInput(f"cannot write {str(output)!r}: {error.strerror}") from None


def _print_table(reader: pa.RecordBatchReader, rows_max: int | None) -> None:
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
    """Yields the rows as dicts with values in the form that a terminal shows."""
    from dormouse.sources.export import python_values

    names = batch.schema.names
    return (
        dict(zip(names, row, strict=True)) for row in zip(*map(python_values, batch.columns), strict=True)
    )


# What edits did.


def executed_said(report: ExecuteReport) -> str:
    """Returns the line that `dormouse sql --write` prints."""
    verb, of = report.statement, f"table {report.table}"
    numbers = {"insert": report.inserted, "update": report.updated, "delete": report.deleted}
    number = numbers.pop(verb, 0)
    if verb == "merge" or any(numbers.values()):
        counts = f"into {of}: {counts_said(report)}"
        return said(report, f"{verb} {counts}", f"{verb.removesuffix('e')}ed {counts}")
    rows = "the matching rows" if number is None else plural(number, "row")
    rows += f" {'into' if verb == 'insert' else 'of'} {of}"
    return said(report, f"{verb} {rows}", f"{verb.removesuffix('e')}ed {rows}")


def said(report: Any, would: str, done: str) -> str:
    """Returns the line about an edit: what it did, or would do in a dry run."""
    if report.applied:
        return f"{done} ({plural(report.attempts, 'attempt')})" if report.attempts > 1 else done
    is_repeated = report.edit_id is not None  # a dry run has no id
    return (
        f"nothing was changed: the id {report.edit_id!r} was used before" if is_repeated else f"would {would}"
    )


def counts_said(report: MergeReport | ExecuteReport) -> str:
    """Returns the numbers of changed rows as text."""
    counted = {"inserted": report.inserted, "updated": report.updated, "deleted": report.deleted}
    return ", ".join(f"{plural(number or 0, 'row')} {what}" for what, number in counted.items())
