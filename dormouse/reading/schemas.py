"""Work that begins with the columns that a table has now, and keeps them while others change them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from dormouse.errors import InvalidInput, InvalidSchema, QueryOvertaken, TableBusy
from dormouse.errors.moved import SchemaMoved
from dormouse.model.reshaping import seen_with
from dormouse.model.schema import Schema
from dormouse.state.context import TableContext

T = TypeVar("T")
SCHEMAS_CHASED_MAX = 20
"""Changes of a table's columns while work begins."""


def on_current(context: TableContext, work: Callable[[TableContext], T]) -> T:
    """What work gives that begins with the table's columns and properties, as they are now.

    It begins again when they are others than is known here; also when it does not fit those that are known.
    """

    def once() -> T:
        nonlocal context
        try:
            return work(context)
        except SchemaMoved:
            context = context.followed()
            raise
        except InvalidInput as error:
            now = context.followed()
            if now is context:
                raise
            context = now
            raise SchemaMoved(str(error)) from error

    return again_if_moved(once)


def again_if_moved(work: Callable[[], T]) -> T:
    """What work gives that asks for columns itself; again when they were changed meanwhile. `TableBusy`."""
    for _ in range(SCHEMAS_CHASED_MAX):
        try:
            return work()
        except SchemaMoved as error:
            last = error
    raise TableBusy(f"{last}, and again and again: nothing was done, try again later") from last


def keeping_columns(context: TableContext) -> TableContext:
    """A table's services, with the columns that are known here, of files that came since, too.

    `QueryOvertaken` when one of the columns was dropped.
    """
    try:
        return seen_by(context, context.followed().table.schema)
    except InvalidSchema as error:
        raise QueryOvertaken(
            f"{error} from table {context.table.name!r} while the query ran, and files that have it were "
            "collected; run it again, or raise the table's property gc_delay_seconds"
        ) from None


def seen_by(context: TableContext, later: Schema) -> TableContext:
    """Likewise, of files up to a version; `InvalidSchema` when one of the columns is not there any more."""
    if later.version <= context.schema.version:
        return context
    return replace(context, table=replace(context.table, schema=seen_with(context.table.schema, later)))
