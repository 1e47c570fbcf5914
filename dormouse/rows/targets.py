"""The tables and files that cells of ENTITY and FILE columns refer to."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from dormouse.errors import InvalidRow
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup
from dormouse.rows.cell_files import CellFiles
from dormouse.rows.columns import Column
from dormouse.rows.values import Label
from dormouse.state.context import TableContext
from dormouse.state.files.put_files import PutFiles

_QUERIES = load(__package__ or "", "targets")


class Targets:
    """A check that what cells of one change refer to is there."""

    def __init__(self, context: TableContext) -> None:
        self._supplier = context.supplier
        self._files = CellFiles(
            context.objects, PutFiles(context.supplier, context.table), context.table.name
        )
        self._known: set[tuple[str, str]] = set()

    def check(self, column: Column, cells: pa.Array, label: Label) -> None:
        """Raises `InvalidRow`, which names the first cell whose table or file is not there."""
        if column.type not in ("ENTITY", "FILE"):
            return
        texts = [one for one in pc.unique(cells).to_pylist() if one is not None]
        wanted = [one for one in texts if (column.type, one) not in self._known]
        lacking = self._lacking_tables(wanted) if column.type == "ENTITY" else self._files.lacking(wanted)
        if lacking:
            number = min(pc.index(cells, one).as_py() for one in lacking)
            why = (
                "refers to a table that is not there"
                if column.type == "ENTITY"
                else "refers to a file that was not put into this table: put it with put_file"
            )
            shown = cells[number].as_py()
            said = f"{label(number)}, column {column.name!r} ({column.type}): {shown!r} {why}"
            raise InvalidRow(said, column=column.name)
        self._known.update((column.type, one) for one in wanted)

    def _lacking_tables(self, cells: Iterable[str]) -> list[str]:
        tables = {one: one.partition(":")[0] for one in cells}
        if not tables:
            return []
        names = rows_of(_QUERIES["tables"], {"names": sorted(set(tables.values()))})
        found = {name for (name,) in run_lookup(self._supplier, names, operation="look for tables")}
        return [one for one, name in tables.items() if name not in found]
