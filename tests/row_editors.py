"""A process that edits a row table for a while, beside others like it, and logs each accepted change as a
line.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import dormouse as dm
from dormouse.api.row_table import RowTable
from dormouse.errors import IndexNotReady, PageExpired, RowConflict, RowNotFound
from dormouse.rows.changes import Change, Changed, changes_json

SHARED = 60
"""The number of names for upserts. It is small, so that the upserts of all editors find the same rows."""

PAGE_ROWS = 500
NOTE = dm.Column("note", "STRING", default="none")
QUERY = "select flight, dep_delay from flights where carrier = 'UA' order by dep_delay desc"
Row = dict[str, Any]


class Editor:
    """An editor that reads rows and changes them. A change is refused if another editor was faster."""

    def __init__(self, table: RowTable, number: int, rows: int, log: TextIO) -> None:
        self._table = table
        self._number = number
        self._ids = rows
        self._log = log
        self._chance = random.Random(number)
        self._made = 0
        self._accepted: set[str] = set()
        self.conflicts = 0

    def edit(self, until: float) -> None:
        steps: list[Callable[[], None]] = [self.update, self.patch, self.patch, self.remove, self.insert]
        steps += [self.upsert, self.upsert] + [self.page] * (3 if self._number % 4 == 0 else 1)
        middle = (time.time() + until) / 2
        while time.time() < until:
            self._add_column(middle)
            self._chance.choice(steps)()
        # a busy machine may have had time for only a few steps: do each kind at least once
        self._add_column(middle)
        for step in dict.fromkeys(steps):
            while step.__name__ not in self._accepted:
                step()

    def _add_column(self, after: float) -> None:
        if self._number == 0 and time.time() > after and "note" not in self._names():
            self._commit(dm.AddColumn(NOTE))

    def _names(self) -> list[str]:
        return [column.name for column in self._table.columns()]

    def update(self) -> None:
        rows = [{**row, "dep_delay": self._value(), "dest": "XXX"} for row in self._some()]
        self._commit(dm.Update(rows))

    def patch(self) -> None:
        cells: Row = {self._chance.choice(["arr_delay", "hour"]): self._value()}
        if "note" in self._names():
            cells["note"] = f"by {self._number}"
        keys = ("ROW_ID", "ROW_VERSION")
        self._commit(dm.Patch([{**{key: row[key] for key in keys}, **cells} for row in self._some()]))

    def remove(self) -> None:
        self._commit(dm.Remove([(row["ROW_ID"], row["ROW_VERSION"]) for row in self._some(2)]))

    def insert(self) -> None:
        self._commit(dm.Insert([{"carrier": "UA", "dep_delay": self._value()} for _ in range(3)]))

    def upsert(self) -> None:
        names = self._chance.sample(range(SHARED), 3)
        rows = [{"tailnum": f"shared {n}", "dep_delay": self._value() % 3, "carrier": "UA"} for n in names]
        try:
            done = self._table.upsert(rows, on=["tailnum"])
        except IndexNotReady:
            return
        self._note({"upsert": rows}, done)

    def page(self) -> None:
        """Reads all pages of a query, which must all show one version although other editors change rows."""
        try:
            page = self._table.query(QUERY, PAGE_ROWS, wait_seconds=30)
            rows, ids = list(page.rows), list(page.row_ids or ())
            while page.next_page is not None:
                page = self._table.query(page=page.next_page)
                rows += page.rows
                ids += page.row_ids or ()
        except (IndexNotReady, PageExpired):
            return
        self._accepted.add("page")
        self._write({"query": [[i, *row] for i, row in zip(ids, rows, strict=True)], "version": page.version})

    def _some(self, count_max: int = 5) -> list[Row]:
        found = []
        for row_id in self._chance.sample(range(1, self._ids + 1), self._chance.randint(1, count_max)):
            try:
                found.append(self._table.row(row_id))
            except RowNotFound:
                continue
        return found

    def _value(self) -> int:
        """Returns a number that no cell has, as a row whose cells stay the same keeps its version."""
        self._made += 1
        return (1 + self._number) * 1_000_000 + self._made

    def _commit(self, change: Change) -> None:
        if getattr(change, "rows", True) == []:
            return
        try:
            done = self._table.change([change])
        except RowConflict:
            self.conflicts += 1
            return
        self._note(changes_json([change])[0], done)

    def _note(self, change: Any, done: Changed) -> None:
        self._accepted |= change.keys() if done.versions else set()
        self._write({"change": change, "versions": list(done.versions), "ids": list(done.row_ids)})

    def _write(self, line: Any) -> None:
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()


def main() -> None:
    folder, number, rows, until, path = sys.argv[1:]
    with dm.local(folder) as instance, Path(path).open("w") as log:
        editor = Editor(instance.row_table("flights"), int(number), int(rows), log)
        editor.edit(float(until))
        log.write(json.dumps({"conflicts": editor.conflicts}) + "\n")


if __name__ == "__main__":
    main()
