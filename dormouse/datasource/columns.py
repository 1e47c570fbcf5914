"""Which columns a read has, and whether they are those that it was given."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql.types import StructType

from dormouse.datasource.options import ReadOptions
from dormouse.errors import InvalidInput
from dormouse.reading.changes import columns_of_changes
from dormouse.reading.executor import columns_of
from dormouse.reading.where import Question, parse_where, question
from dormouse.spark.frames import struct_of
from dormouse.state.context import TableContext
from dormouse.state.history.moments import position_of


def asked_of(context: TableContext, options: ReadOptions) -> Question:
    """What is asked of the rows of a moment, whose services these are."""
    return question(context.schema, parse_where(context.schema, options.where), options.columns, None)


def columns_of_rows(context: TableContext, asked: Question) -> StructType:
    return struct_of(columns_of(context.schema, asked.columns))


def changed_columns(context: TableContext, columns: Sequence[str] | None) -> StructType:
    """`context` is of the later moment."""
    return struct_of(columns_of_changes(context, columns))


def columns_now(context: TableContext, options: ReadOptions) -> StructType:
    """Those of the moment that the options name, or of now."""
    _, till = options.changes or (None, None)
    when = options.as_of if options.changes is None else till
    then = context if when is None else context.as_of(position_of(context, when))
    if options.changes is not None:
        return changed_columns(then, options.columns)
    return columns_of_rows(then, asked_of(then, options))


def check_given(given: StructType, found: StructType, table: str) -> None:
    """`InvalidInput` when a read was given other columns than it has, by `schema` or by an earlier `load`."""
    if given.jsonValue() != found.jsonValue():
        raise InvalidInput(
            f"the columns of the read are not those of table {table!r}, which are {found.simpleString()}: if "
            "they were changed since load(), load it again; leave .schema(…) out, and name columns by the "
            "option columns"
        )
