"""Changes of a row table as values, also of rows that a DataFrame holds; and what came of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from typing import TYPE_CHECKING, Any, overload

from dormouse.errors import InvalidInput, InvalidRow, RowNotFound
from dormouse.model.table import ROW_ID, ROW_VERSION
from dormouse.model.text import check_text
from dormouse.rows.columns import INTEGER_MAX, Column

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_AT_ONCE = 10_000
LOCK_SECONDS_MAX = 6 * 3_600.0
"""How long a change waits for others, at most."""


def check_wait(seconds: object, seconds_max: float) -> None:
    """Raises `InvalidInput` for what is no time to wait."""
    if not isinstance(seconds, int | float) or not 0 <= seconds <= seconds_max:
        raise InvalidInput(f"wait_seconds must be from 0 to {seconds_max:,.0f}, not {seconds!r}")


def as_dicts(rows: Any) -> Any:
    """Returns the rows of a DataFrame, or of what speaks Arrow, as dicts; all else as it is.

    Rows of a reader can be read once, those of others again. `InvalidData` for a column of several types.
    """
    if rows is None or isinstance(rows, Mapping | str | bytes | list | tuple | Iterator):
        return rows
    import pyarrow as pa

    from dormouse.sources.given_rows import as_arrow, is_of

    found = as_arrow(rows)
    if found is None:
        return rows
    if isinstance(found, pa.RecordBatchReader) and is_of(rows, "polars"):
        found = found.read_all()
    if isinstance(found, pa.RecordBatchReader):
        return (row for batch in found for row in batch.to_pylist())
    return ArrowRows(found if isinstance(found, pa.Table) else pa.Table.from_batches([found]))


class ArrowRows(Sequence[Mapping[str, Any]]):
    """The rows of an Arrow table, each a dict that is made when it is asked for."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        numbers = range(len(self))[index]
        if isinstance(numbers, int):
            return self._table.slice(numbers, 1).to_pylist()[0]
        import pyarrow as pa

        return ArrowRows(self._table.take(pa.array(numbers, pa.int64())))

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for batch in self._table.to_batches(_ROWS_AT_ONCE):
            yield from batch.to_pylist()


CHANGE_ID_BYTES_MAX = 204
"""Jobs of earlier releases recorded "job:" and their id, of 200 bytes."""
Row = Mapping[str, Any]


@dataclass(frozen=True)
class _Rows:
    """Rows in a list, in a DataFrame of pandas or Polars, or in what speaks Arrow."""

    rows: Iterable[Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", as_dicts(self.rows))


@dataclass(frozen=True)
class Insert(_Rows):
    """New rows: a dict of cells each; a cell that is missing, or null, has the column's default."""

    rows: Iterable[Row]


@dataclass(frozen=True)
class Update(_Rows):
    """Whole rows, each with ROW_ID and ROW_VERSION; one without other cells is deleted."""

    rows: Iterable[Row]


@dataclass(frozen=True)
class Patch(_Rows):
    """Some cells of rows, each with ROW_ID and, so that a conflict is told, ROW_VERSION.

    One without cells is left alone. As (ROW_ID, ROW_VERSION or None, cells) it is deleted when the cells are
    None.
    """

    rows: Iterable[Row | tuple[int, int | None, Row | None]]


@dataclass(frozen=True)
class Remove(_Rows):
    """Rows to delete: pairs of ROW_ID and ROW_VERSION."""

    rows: Iterable[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class AddColumn:
    """A column more; rows that are there have its default."""

    column: Column


@dataclass(frozen=True, slots=True)
class RenameColumn:
    """Another name for a column."""

    name: str
    new_name: str


@dataclass(frozen=True, slots=True)
class RetypeColumn:
    """Another type, limit, default or enum for a column.

    What is left out is as of a new column of the type, but that a STRING of now keeps its `size_max`.
    Refused when a value of a current row does not fit.
    """

    name: str
    type: str
    size_max: int | None = None
    default: Any = None
    enum: Sequence[Any] | None = None


@dataclass(frozen=True, slots=True)
class DropColumn:
    """A column less; older versions of rows still have it."""

    name: str


@dataclass(frozen=True, slots=True)
class LoadCsv:
    """The rows of a CSV or TSV file: without ROW_ID inserts, with it updates of the columns that it has.

    A row of only ROW_ID and ROW_VERSION is deleted. With `as_new`, ROW_ID and ROW_VERSION of the file are
    left out, and all rows are inserted. `columns` are the names of the file's columns, in place of its
    header's. `null` is a text that stands for nothing, like NA, where it is not quoted, or several.
    """

    path: str | PathLike[str] | Any
    separator: str = ","
    quote: str = '"'
    escape: str | None = None
    header: bool = True
    skip_lines: int = 0
    columns: Sequence[str] | None = None
    null: str | Sequence[str] | None = None
    as_new: bool = False
    encoding: str = "utf-8"


Change = Insert | Update | Patch | Remove | AddColumn | RenameColumn | RetypeColumn | DropColumn | LoadCsv
SchemaChange = AddColumn | RenameColumn | RetypeColumn | DropColumn


def check_change_id(change_id: object) -> None:
    """Raises `InvalidInput` for what can be no id of a change."""
    check_text("change_id", change_id, CHANGE_ID_BYTES_MAX)


def checked_number(what: str, value: object) -> int:
    """Returns a ROW_ID or ROW_VERSION; `RowNotFound` for what can be none."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= INTEGER_MAX:
        raise RowNotFound(f"{what} is a whole number from 1 to {INTEGER_MAX:,}, not {value!r}")
    return value


def checked_reference(value: object) -> tuple[int, int]:
    """Returns the id and version that name a row. `InvalidRow`, `RowNotFound`."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise InvalidRow(f"a row is named by (ROW_ID, ROW_VERSION), not {value!r}")
    return checked_number(ROW_ID, value[0]), checked_number(ROW_VERSION, value[1])


class RowIds(Sequence[int]):
    """Ids of rows in their order, which follow each other; equal to a list of them."""

    def __init__(self, first: int = 1, count: int = 0) -> None:
        self._range = range(first, first + count)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self._range[index]

    def __len__(self) -> int:
        return len(self._range)

    def __iter__(self) -> Iterator[int]:
        return iter(self._range)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RowIds):
            return self._range == other._range
        return isinstance(other, list | tuple | range) and list(self._range) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self._range[:10]))
        return f"[{shown}{', …' if len(self) > 10 else ''}]"


@dataclass(frozen=True, slots=True)
class Changed:
    """What a change did: the ids of its inserts in their order, the versions that it made, and how many rows.

    `changed` has "inserted", "updated", "deleted" and "unchanged" (found equal, and left alone).
    """

    row_ids: Sequence[int] = field(default_factory=RowIds)
    versions: Sequence[int] = ()
    changed: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As an object of JSON: the ids as their first and how many, since they follow each other."""
        first = self.row_ids[0] if self.row_ids else None
        return {
            "first_row_id": first,
            "row_ids": len(self.row_ids),
            "versions": list(self.versions),
            "changed": dict(self.changed),
        }

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Changed:
        """The result of `to_json`."""
        ids = RowIds(found["first_row_id"] or 1, found["row_ids"])
        return Changed(ids, list(found["versions"]), dict(found["changed"]))


# Changes as JSON: what a file of changes has, and what travels to a service.

_ROWS: dict[str, type[Insert | Update | Patch | Remove]] = {
    "insert": Insert, "update": Update, "patch": Patch, "remove": Remove,
}  # fmt: skip
_OBJECTS: dict[str, type[RenameColumn | RetypeColumn | LoadCsv]] = {
    "rename_column": RenameColumn, "retype_column": RetypeColumn, "load_csv": LoadCsv,
}  # fmt: skip
KINDS = (*_ROWS, "add_column", *_OBJECTS, "drop_column")
_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")


def parse_changes(found: object, path_of: Callable[[str], Any] | None = None) -> list[Change]:
    """The changes of JSON; `path_of` says where the file of a `load_csv` is, without it there may be none.

    Raises `InvalidInput`, which names the change by its number, and `InvalidColumn`.
    """
    if not isinstance(found, list) or not found:
        raise InvalidInput('changes are a list, like [{"insert": [{"name": "a"}]}]')
    return [_change(one, f"change {number}", path_of) for number, one in enumerate(found, 1)]


def _change(found: object, where: str, path_of: Callable[[str], Any] | None) -> Change:
    if not isinstance(found, dict) or len(found) != 1:
        raise InvalidInput(f"{where}: it must be an object of one name, one of {', '.join(KINDS)}")
    [(kind, given)] = found.items()
    if kind in _ROWS:
        if not isinstance(given, list):
            raise InvalidInput(f"{where}: {kind} has a list of rows")
        rows: list[Any] = [tuple(row) if isinstance(row, list) else row for row in given]
        return _ROWS[kind](rows)
    if kind == "add_column":
        return AddColumn(Column.from_json(given))
    if kind == "drop_column":
        if not isinstance(given, str):
            raise InvalidInput(f"{where}: drop_column has the name of a column")
        return DropColumn(given)
    if kind not in _OBJECTS:
        raise InvalidInput(f"{where}: {str(kind)[:80]!r} is none of {', '.join(KINDS)}")
    return _of_object(kind, given, where, path_of)


def _of_object(kind: str, given: object, where: str, path_of: Callable[[str], Any] | None) -> Change:
    made = _OBJECTS[kind]
    known = {field.name for field in fields(made)}
    needed = {"rename_column": {"name", "new_name"}, "retype_column": {"name", "type"}}.get(kind, {"path"})
    if not isinstance(given, dict) or not needed <= given.keys() <= known:
        raise InvalidInput(
            f"{where}: {kind} is an object with {', '.join(sorted(needed))}, and may have "
            f"{', '.join(sorted(known - needed)) or 'nothing else'}"
        )
    if made is LoadCsv:
        if path_of is None:
            raise InvalidInput(f"{where}: load_csv is not taken here: upload the file")
        names = given.get("columns")
        if names is not None and not (isinstance(names, list) and all(isinstance(one, str) for one in names)):
            raise InvalidInput(f"{where}: the columns of load_csv are a list of names")
        return LoadCsv(**{**given, "path": path_of(str(given["path"]))})
    return made(**given)


def changes_json(changes: Sequence[Change]) -> list[dict[str, Any]]:
    """As `parse_changes` takes them; `InvalidInput` for what is no change."""
    return [dict([_json(change)]) for change in changes]


def _json(change: Change) -> tuple[str, Any]:
    name = _CAPITAL.sub("_", type(change).__name__).lower()
    match change:
        case Insert() | Update() | Patch() | Remove():
            return name, [_row(row) for row in change.rows]
        case AddColumn():
            return name, change.column.to_json()
        case DropColumn():
            return name, change.name
        case RenameColumn() | RetypeColumn() | LoadCsv():
            return name, {key: value for key, value in asdict(change).items() if value is not None}
    raise InvalidInput(f"{change!r} is no change: dm.Insert, dm.Update, … are")


def _row(row: Any) -> Any:
    return (
        dict(row) if isinstance(row, Mapping) else list(row) if isinstance(row, Sequence | Iterator) else row
    )
