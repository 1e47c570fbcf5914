"""Row tables, whose rows are edited: what nobody does to the table below one."""

from __future__ import annotations

from dormouse.errors import NotARowTable
from dormouse.model.properties import TableProperties


def is_edited(properties: TableProperties) -> bool:
    """Whether it is the table of a row table."""
    return properties.rows == "edited"


def check_not_edited(name: str, properties: TableProperties, instead: str) -> None:
    """`NotARowTable` for what would leave the versions of rows wrong; `instead` is what to do."""
    if is_edited(properties):
        raise NotARowTable(
            f"table {name!r} is a row table, whose rows and columns are changed as such alone: {instead}"
        )
