"""A table's name and columns, as users hold them: they are those of now, whoever changed them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dormouse.api.tables import Tables
from dormouse.model.cut import When
from dormouse.model.schema import Schema
from dormouse.model.table import check_not_edited, is_edited
from dormouse.model.types import DataType, Field
from dormouse.state.context import TableContext
from dormouse.state.files.shapes import SchemaChange
from dormouse.state.history.moments import position_of

if TYPE_CHECKING:
    from types import ModuleType


class ShapedTable:
    """What a `Table` is of, by its id: whoever renames it, or changes its columns, open handles follow."""

    def __init__(
        self,
        context: TableContext,
        tables: Tables,
        check_writable: Callable[[], None],
        *,
        every_version: bool = False,
    ) -> None:
        self._known = context
        self.every_version = every_version
        """Whether readers of a row table see every version of its rows."""
        self._tables = tables
        self._check_writable = check_writable

    @property
    def name(self) -> str:
        return self._followed().table.name

    @property
    def known_name(self) -> str:
        """As `name`, of when the table was looked up last; of many tables that were just listed."""
        return self._context.table.name

    @property
    def is_row_table(self) -> bool:
        """Whether its rows are edited: `instance.row_table` opens it as such."""
        return is_edited(self._context.properties)

    @property
    def schema(self) -> Schema:
        """The columns of now; what another process changed is seen at once."""
        return self._reading_of(self._followed()).schema

    @property
    def known_schema(self) -> Schema:
        """As `schema`, of when the table was looked up last."""
        return self.reading.schema

    def schema_at(self, when: When) -> Schema:
        """The columns that it had at a moment: a cut, a cut's name, or an aware time; as `query` raises."""
        return self.reading.as_of(position_of(self._context, when)).schema

    def schema_changes(self) -> list[SchemaChange]:
        """What was done to the columns since the table was made, in its order."""
        return self._context.shapes.changes()

    def add_column(self, field: Field, default: Any = None) -> Schema:
        """Adds a value column: one row in the database, at once, for every reader; rewrites nothing.

        Rows that are there have the `default`, a value of the field's type as Python has it, or null. So have
        rows of writers that began before and commit later. A column that must not be null needs a default.
        Gives the schema of now, as do all changes of columns.

        Raises `InvalidSchema` for a name that is taken, or a default that does not fit, `TableNotFound`,
        `TableBusy`; then nothing is changed.
        """
        return self._reshaped(lambda to: to.add_column(self._context, field, default))

    def rename_column(self, name: str, new_name: str) -> Schema:
        """Gives a column another name, which may be a key's; properties and deletions follow.

        Raises `InvalidSchema` for an unknown column and a name that is taken, `TableNotFound`, `TableBusy`.
        """
        return self._reshaped(lambda to: to.rename_column(self._context, name, new_name))

    def widen_column(self, name: str, to_type: DataType) -> Schema:
        """Gives a value column a wider type: LONG for INT, DOUBLE for FLOAT, a DECIMAL of more digits.

        Raises `InvalidSchema` for an unknown column, a key, and a type that has not all values of the one of
        now; `TableNotFound`, `TableBusy`.
        """
        return self._reshaped(lambda to: to.widen_column(self._context, name, to_type))

    def drop_column(self, name: str, *, dry_run: bool = False) -> Schema:
        """Drops a value column. Moments before still have it; one of its name that is added is another.

        Its values stay in the files until these are compacted, and collected. `dry_run` only says whether it
        can be. Raises `InvalidSchema` for an unknown column, a key, and one that properties or pending
        deletions name; `TableNotFound`, `TableBusy`.
        """
        if dry_run:
            from dormouse.reading import schemas

            return schemas.drop_column(self._context, name, dry_run=True).schema
        return self._reshaped(lambda to: to.drop_column(self._context, name))

    @property
    def _context(self) -> TableContext:
        """The table's services, as newly as they are known here."""
        self._known = self._known.newest_known
        return self._known

    @_context.setter
    def _context(self, context: TableContext) -> None:
        self._known = context

    @property
    def reading(self) -> TableContext:
        """The services that readers have, with the current rows of a row table."""
        return self._reading_of(self._context)

    def _reading_of(self, context: TableContext) -> TableContext:
        return context if self.every_version else context.shown

    def _followed(self) -> TableContext:
        """The services of the table as it is now; of an instance that is closed, as it was known."""
        if not self._tables.is_closed:
            self._context.followed()
        return self._context

    def _reshaped(self, change: Callable[[ModuleType], Any]) -> Schema:
        from dormouse.reading import schemas

        self._check_not_edited("use dm.AddColumn, dm.RenameColumn, dm.RetypeColumn or dm.DropColumn")
        with self.changing():
            self._context = change(schemas)
        return self._context.schema

    def _check_not_edited(self, instead: str) -> None:
        """`NotARowTable` for what its rows do not survive; no table becomes one, or is one no longer."""
        check_not_edited(self.known_name, self._context.properties, instead)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Of what may have changed something also when it raises."""
        self._check_writable()
        try:
            yield
        finally:
            self._tables.note_activity()
