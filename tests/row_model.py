"""A naive model of a row table: dicts that replay each change row by row and keep every version."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import dormouse as dm
from dormouse.errors import InvalidColumn, InvalidRow, RowConflict

Cells = Mapping[int, Any]


@dataclass(frozen=True)
class Known:
    """A column with a number of its own, which is never reused."""

    number: int
    name: str
    type: str
    size_max: int | None = None
    default: Any = None

    def fits(self, value: Any) -> bool:
        if value is None:
            return True
        kinds = {"INTEGER": int, "DOUBLE": float, "STRING": str}
        is_long = self.type == "STRING" and isinstance(value, str) and len(value) > (self.size_max or 50)
        return type(value) is kinds[self.type] and not is_long


@dataclass
class RowModel:
    """A model of a row table.

    - `rows`: each row's versions, with None for a deletion.
    - `columns`: the columns, by the version since which they were valid.
    """

    columns: list[tuple[int, tuple[Known, ...]]]
    rows: dict[int, dict[int, Cells | None]] = field(default_factory=dict)
    version: int = 0
    numbers: int = 100
    added: dict[int, Any] = field(default_factory=dict)
    """The values, by column number, that a row has in columns that were added after it."""

    @staticmethod
    def of(columns: Sequence[dm.Column]) -> RowModel:
        known = [Known(n, c.name, c.type, c.size_max, c.default) for n, c in enumerate(columns)]
        return RowModel([(0, tuple(known))])

    def columns_at(self, version: int | None = None) -> tuple[Known, ...]:
        wanted = self.version if version is None else version
        return [columns for since, columns in self.columns if since <= wanted][-1]

    def newest(self, row_id: int, version: int | None = None) -> int:
        """Returns the newest version of a row, or the newest up to a table version; 0 if there is none."""
        wanted = self.version if version is None else version
        return max((v for v in self.rows.get(row_id, {}) if v <= wanted), default=0)

    def read(self, row_id: int, version: int, as_of: int | None = None) -> dict[str, Any] | None:
        """Returns a version of a row, with the columns that the table then had; None if it is a deletion."""
        cells = self.rows[row_id][version]
        if cells is None:
            return None
        values = {
            c.name: cells.get(c.number, self.added.get(c.number)) for c in self.columns_at(as_of or version)
        }
        return {"ROW_ID": row_id, "ROW_VERSION": version, **values}

    def current(self, version: int | None = None) -> list[dict[str, Any]]:
        wanted = self.version if version is None else version
        found = [(i, self.newest(i, wanted)) for i in sorted(self.rows)]
        rows = [self.read(i, v, wanted) for i, v in found if v]
        return [row for row in rows if row is not None]

    def changed(self, after: int, till: int) -> list[tuple[int, int, bool]]:
        return [
            (i, v, self.rows[i][v] is None)
            for i in sorted(self.rows)
            for v in sorted(self.rows[i])
            if after < v <= till
        ]

    def change(self, changes: Sequence[Any]) -> dict[str, int]:
        """Applies a change and returns its counts.

        Raises `InvalidColumn`, `InvalidRow` or `RowConflict`; the model is then unchanged.
        """
        trial = copy.deepcopy(self)
        counts = _Replay(trial, list(changes)).run()
        self.__dict__.update(trial.__dict__)
        return counts


class _Replay:
    """The replay of one transaction, on a copy of the model."""

    def __init__(self, model: RowModel, changes: list[Any]) -> None:
        self.model, self.changes = model, changes
        self.before = copy.deepcopy(model)
        self.seen: set[int] = set()
        self.conflicts: list[tuple[int, int, int]] = []
        self.counts = {"inserted": 0, "updated": 0, "deleted": 0, "unchanged": 0}
        self.retyped: list[tuple[Known, Known, Callable[[Any], Any]]] = []
        self.columns = model.columns_at()

    def run(self) -> dict[str, int]:
        for number, change in enumerate(self.changes):
            if hasattr(change, "rows"):
                continue
            self._column(number, change)
        self.columns = self.before.columns_at()
        for change in self.changes:
            self._apply(change)
        if self.conflicts:
            raise RowConflict("model", self.conflicts)
        self._rewrite()
        return self.counts

    def _column(self, number: int, change: Any) -> None:
        """Applies a change of the columns. It raises its errors before any row is checked."""
        columns = list(self.columns)
        names = {c.name.lower(): c for c in columns}
        if isinstance(change, dm.AddColumn):
            if change.column.name.lower() in names:
                raise InvalidColumn("there already")
            self.model.numbers += 1
            c = change.column
            columns.append(Known(self.model.numbers, c.name, c.type, c.size_max, c.default))
            self.model.added[self.model.numbers] = c.default
        else:
            known = next((c for c in columns if c.name == change.name), None)
            if known is None:
                raise InvalidColumn("not there")
            at = columns.index(known)
            if isinstance(change, dm.DropColumn):
                del columns[at]
            elif isinstance(change, dm.RenameColumn):
                other = names.get(change.new_name.lower())
                if change.new_name == known.name or other not in (None, known):
                    raise InvalidColumn("there already")
                columns[at] = replace(known, name=change.new_name)
            else:
                columns[at] = self._retype(known, change)
        self.columns = tuple(columns)
        self.changes[number] = (change, self.columns)

    def _retype(self, known: Known, change: Any) -> Known:
        size = change.size_max or (known.size_max or 50 if change.type == "STRING" else None)
        new = Known(known.number, known.name, change.type, size, change.default)
        if change.type != known.type:
            self.model.numbers += 1
            new = replace(new, number=self.model.numbers)
        self.retyped.append((known, new, lambda value: _converted(known.type, new.type, value)))
        return new

    def _apply(self, change: Any) -> None:
        if isinstance(change, tuple):
            self.columns = change[1]
            self.model.version += 1
            self.model.columns.append((self.model.version, self.columns))
            return
        rows = [row for row in change.rows if not (isinstance(change, dm.Patch) and _is_empty(row))]
        touched = [self._row(change, row) for row in rows]
        changed = [(known, cells) for known, cells in touched if not self._is_unchanged(known, cells)]
        self.counts["unchanged"] += len(touched) - len(changed)
        self.model.version += bool(changed)
        for known, cells in changed:
            kind = "inserted" if known is None else "deleted" if cells is None else "updated"
            self.counts[kind] += 1
            row_id = len(self.model.rows) + 1 if known is None else known
            self.model.rows.setdefault(row_id, {})[self.model.version] = cells

    def _is_unchanged(self, row_id: int | None, cells: Cells | None) -> bool:
        """Returns whether cells equal the row's present values; False if a column is retyped.

        With a retyped column, all rows are rewritten.
        """
        if row_id is None or cells is None or self.retyped:
            return False
        old, added = self.before.rows[row_id][self.before.newest(row_id)] or {}, self.model.added
        numbers = [c.number for c in self.columns]
        return all(cells.get(n, added.get(n)) == old.get(n, added.get(n)) for n in numbers)

    def _row(self, change: Any, row: Any) -> tuple[int | None, Cells | None]:
        if isinstance(change, dm.Remove):
            return self._known(*row), None
        cells = {name: value for name, value in row.items() if name not in ("ROW_ID", "ROW_VERSION")}
        by_name = {c.name: c for c in self.columns}
        for name, value in cells.items():
            if name not in by_name or not by_name[name].fits(value):
                raise InvalidRow("does not fit")
        if isinstance(change, dm.Insert):
            return None, self._whole(cells)
        row_id = self._known(row["ROW_ID"], row.get("ROW_VERSION"))
        if isinstance(change, dm.Update):
            return row_id, self._whole(cells) if cells else None
        old = self.before.rows.get(row_id, {}).get(self.before.newest(row_id)) or {}
        kept = {c.number: old.get(c.number, self.model.added.get(c.number)) for c in self.before.columns_at()}
        whole = {**kept, **{n: v for n, v in self.model.added.items() if n not in kept and n not in old}}
        given = {by_name[name].number: value for name, value in cells.items()}
        return row_id, {**whole, **self._defaults(given)}

    def _whole(self, cells: Mapping[str, Any]) -> Cells:
        whole = {n: v for n, v in self.model.added.items() if n not in self.before.added}
        return {**whole, **self._defaults({c.number: cells.get(c.name) for c in self.columns})}

    def _defaults(self, cells: Cells) -> Cells:
        defaults = {c.number: c.default for c in self.columns}
        return {n: defaults[n] if value is None else value for n, value in cells.items()}

    def _known(self, row_id: int, sent: int | None) -> int:
        if row_id not in self.before.rows or row_id in self.seen:
            raise InvalidRow("unknown, or twice")
        self.seen.add(row_id)
        now = self.before.newest(row_id)
        if sent is not None and sent < now:
            self.conflicts.append((row_id, sent, now))
        elif self.before.rows[row_id][now] is None or (sent or 0) > now:
            raise InvalidRow("deleted, or never so far")
        return row_id

    def _rewrite(self) -> None:
        """Converts the values of retyped columns, and gives each rewritten row a new version."""
        versions = [v for versions in self.model.rows.values() for v in versions]
        new = {v for v in versions if v > self.before.version}
        for row_versions in self.model.rows.values():
            for version in new & row_versions.keys():
                if (cells := row_versions[version]) is not None:
                    row_versions[version] = self._convert(cells)
        rewrites = any(a.number != b.number for a, b, _ in self.retyped)
        untouched = [row["ROW_ID"] for row in self.before.current() if row["ROW_ID"] not in self.seen]
        if rewrites and untouched:
            self.model.version += 1
        for row_id in untouched:
            old = self.before.rows[row_id][self.before.newest(row_id)] or {}
            added = self.before.added
            known = {c.number: old.get(c.number, added.get(c.number)) for c in self.before.columns_at()}
            cells = self._convert({**{n: v for n, v in self.model.added.items() if n not in old}, **known})
            if rewrites:
                self.model.rows[row_id][self.model.version] = cells
                self.counts["updated"] += 1

    def _convert(self, cells: Cells) -> Cells:
        made = dict(cells)
        for before, after, convert in self.retyped:
            if before.number in made and (after.number == before.number or after.number not in cells):
                value = convert(made[before.number])
                if not after.fits(value):
                    raise InvalidRow("does not fit its new type")
                made[after.number] = value
        return made


def _is_empty(row: Mapping[str, Any]) -> bool:
    return not row.keys() - {"ROW_ID", "ROW_VERSION"}


def _converted(before: str, after: str, value: Any) -> Any:
    if value is None or before == after:
        return value
    try:
        if after == "STRING":
            return str(value)
        if after == "DOUBLE":
            return float(value)
        if before == "DOUBLE":
            return int(value) if value == int(value) else "no whole number"
        return int(value)
    except ValueError:
        return object()
