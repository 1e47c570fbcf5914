"""Bloom filters of columns: a query for single values skips the row groups that surely do not have them.

Statistics tell that already of the leading row key, by which files are sorted. The filters are split block
bloom filters, which Parquet defines and DataFusion reads; a value takes about ten bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dormouse.errors import InvalidProperties
from dormouse.model.schema import Schema
from dormouse.model.table import TableProperties
from dormouse.model.text import name_of, parts_of
from dormouse.model.types import BYTES, INT, LONG, STRING

if TYPE_CHECKING:
    import pyarrow as pa

FALSE_POSITIVES = 0.01


def bloom_filter_columns(schema: Schema, properties: TableProperties) -> tuple[str, ...]:
    """The columns that the properties name; `InvalidProperties` when they do not fit the schema."""
    text = properties.bloom_filter_columns
    names = [] if text is None else [name_of(part) for part in parts_of(text)]
    for name in names:
        _check(schema, name)
        if names.count(name) > 1:
            raise InvalidProperties(f"bloom_filter_columns: {name!r} is named twice")
    return tuple(names)


def sized_filters(names: tuple[str, ...], group: pa.Table) -> dict[str, dict[str, float]] | None:
    """Filters for row groups like this one, as pyarrow's writer takes them; None for no columns."""
    import pyarrow.compute as pc

    distinct = {name: pc.count_distinct(group.column(name), mode="all").as_py() for name in names}
    return {name: {"ndv": max(1, n), "fpp": FALSE_POSITIVES} for name, n in distinct.items()} or None


def _check(schema: Schema, name: str) -> None:
    if name not in schema:
        raise InvalidProperties(
            f"bloom_filter_columns: {name!r} is not a field; the fields are {', '.join(schema.names)}"
        )
    found = schema.field(name).type
    if found not in (INT, LONG, STRING, BYTES):
        raise InvalidProperties(
            f"bloom_filter_columns: {name!r} is {found}; columns of INT, LONG, STRING and BYTES can be named"
        )
