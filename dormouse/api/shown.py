"""Texts and HTML of tables and instances, for Python's `repr`, notebooks and Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from dormouse.errors import DormouseError
from dormouse.model.schema import Schema
from dormouse.model.table import VERSIONS
from dormouse.model.text import COLUMNS_SHOWN, plural, shown_list

if TYPE_CHECKING:
    from dormouse.durability.maintaining import Number

TABLES_SHOWN = 50


def table_text(table: Any) -> str:
    """Returns one line about a table: its name, columns and row count.

    The line has no row count if the database cannot be read.
    """
    schema, rows = _known(table)
    columns = [f"{column} {kind}{part}" for column, kind, part in _columns(schema)]
    about = "" if rows is None else f"; {rows}"
    return f"Table({shown_name(table)!r}: {shown_list(columns, COLUMNS_SHOWN)}{about})"


def table_html(table: Any) -> str:
    """Returns an HTML table, for a notebook, of a table's columns."""
    schema, rows = _known(table)
    about = "" if rows is None else f": {rows}"
    return _html(f"table {shown_name(table)}{about}", ("column", "type", ""), _columns(schema))


def instance_text(instance: Any) -> str:
    """Returns one line about an instance: its object store and the names of its tables."""
    names = [shown_name(table) for table in _tables(instance)]
    about = f": {shown_list(names, TABLES_SHOWN)}" if names else ""
    return f"Instance({instance.objects.url!r}, {plural(len(names), 'table')}{about})"


def instance_html(instance: Any) -> str:
    """Returns an HTML table, for a notebook, of an instance's tables and their row counts."""
    rows = [(shown_name(table), _known(table)[1] or "") for table in _tables(instance)[:TABLES_SHOWN]]
    return _html(f"instance {instance.objects.url}", ("table", "rows"), rows)


def numbers(instance: Any) -> Iterator[Number]:
    """Yields the numbers of an instance's jobs and indexes, for Prometheus."""
    from dormouse.durability.maintaining import Number
    from dormouse.rows.cluster import Placements

    for one in instance.jobs.kinds():
        of = {"kind": one.kind}
        yield Number("jobs_waiting", "Jobs that wait; at most 10,000 are counted.", one.waiting, of)
        yield Number("jobs_running", "Jobs that run.", one.running, of)
        yield Number("job_workers", "Workers that take jobs of a kind.", one.workers, of)
        what = "Seconds for which the oldest waiting job has waited; 0: none waits."
        yield Number("job_oldest_waiting_seconds", what, one.oldest_waiting_seconds or 0, of)
        what = "Jobs that ended within a day, by state; at most 10,000 are counted."
        for state, count in one.ended.items():
            yield Number("jobs_ended", what, count, {**of, "state": state})
    if Placements(instance._supplier).all():  # without indexes, do not connect to their database
        what = "Versions of a row table that its index lacks; +Inf: the index does not answer."
        for table, behind in instance.row_indexes.indexing.lags():
            yield Number("row_index_versions_behind", what, behind, {"table": table})


def shown_name(table: Any) -> str:
    return str(table.known_name) + (VERSIONS if table.every_version else "")


def _tables(instance: Any) -> list[Any]:
    """Returns the tables of an instance, or an empty list if it is closed or cannot be read."""
    try:
        return list(instance.tables())
    except DormouseError:
        return []


def _known(table: Any) -> tuple[Schema, str | None]:
    """Returns the columns, and a text with the number of rows, or None if the database cannot be read."""
    try:
        found = table.status()
    except DormouseError:
        return table.known_schema, None
    what = "version" if table.every_version else "row"
    rows = f"{'' if found.rows_exact else '~'}{plural(found.row_count, what)}"
    return table.known_schema, rows


def _columns(schema: Schema) -> list[tuple[str, str, str]]:
    parts = ((schema.row_keys, " (key)"), (schema.sort_keys, " (sort key)"), (schema.values, ""))
    return [
        (field.name, f"{field.type}{'?' if field.nullable else ''}", part)
        for fields, part in parts
        for field in fields
    ]


def _html(title: str, heads: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    shown = f"<caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f"<table>{shown}</table>"
