"""Tables and instances as a person sees them in Python, and in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from dormouse.errors import DormouseError
from dormouse.model.schema import Schema
from dormouse.model.table import VERSIONS
from dormouse.model.text import COLUMNS_SHOWN, plural, shown_list

if TYPE_CHECKING:
    pass

TABLES_SHOWN = 50


class ShownTable:
    """How a table shows itself: as it is now, or, where that cannot be asked, as it was known."""

    def __repr__(self) -> str:
        schema, rows = _known(self)
        columns = [f"{column} {kind}{part}" for column, kind, part in _columns(schema)]
        about = "" if rows is None else f"; {rows}"
        return f"Table({_name(self)!r}: {shown_list(columns, COLUMNS_SHOWN)}{about})"

    def _repr_html_(self) -> str:
        schema, rows = _known(self)
        about = "" if rows is None else f": {rows}"
        return _html(f"table {_name(self)}{about}", ("column", "type", ""), _columns(schema))


class ShownInstance:
    """How an instance shows itself, with its tables."""

    def __iter__(self) -> Iterator[str]:
        """Yields the names of the tables."""
        return iter([_name(table) for table in _all_tables(self)])

    def __repr__(self) -> str:
        tables = _tables(self)
        names = [_name(table) for table in tables]
        about = f": {shown_list(names, TABLES_SHOWN)}" if names else ""
        return f"Instance({_url(self)!r}, {plural(len(names), 'table')}{about})"

    def _repr_html_(self) -> str:
        rows = [(_name(table), _known(table)[1] or "") for table in _tables(self)[:TABLES_SHOWN]]
        return _html(f"instance {_url(self)}", ("table", "rows"), rows)


def _name(table: Any) -> str:
    return str(table.known_name) + (VERSIONS if table.every_version else "")


def _url(instance: Any) -> str:
    return str(instance.objects.url)


def _all_tables(instance: Any) -> list[Any]:
    return list(instance.tables())


def _tables(instance: Any) -> list[Any]:
    """None where nothing can be asked any more."""
    try:
        return _all_tables(instance)
    except DormouseError:
        return []


def _known(table: Any) -> tuple[Schema, str | None]:
    """The columns, and the rows in words."""
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
