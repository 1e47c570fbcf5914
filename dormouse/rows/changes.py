"""Changes of row tables, and their results, as values. Rows may come as dicts, DataFrames or Arrow."""

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
"""The longest time for which a change may wait for the table's lock, in seconds."""


def check_wait(seconds: object, seconds_max: float) -> None:
    """Raises `InvalidInput` if a wait is not a number from 0 to `seconds_max`."""
    if not isinstance(seconds, int | float) or not 0 <= seconds <= seconds_max:
        raise InvalidInput(f"wait_seconds must be from 0 to {seconds_max:,.0f}, not {seconds!r}")


def as_dicts(rows: Any) -> Any:
    """Returns the rows of a DataFrame or of Arrow data as dicts. Returns other values unchanged.

    The rows of an Arrow reader can be read only once. Raises `InvalidData` for a column of mixed types.
    """
    if rows is None or isinstance(rows, Mapping | str | bytes | list | tuple | Iterator):
        return rows
    import pyarrow as pa

    from dormouse.sources.given_rows import as_arrow, is_of

    data = as_arrow(rows)
    if data is None:
        return rows
    if isinstance(data, pa.RecordBatchReader) and is_of(rows, "polars"):
        data = data.read_all()
    if isinstance(data, pa.RecordBatchReader):
        return (row for batch in data for row in batch.to_pylist())
    return ArrowRows(data if isinstance(data, pa.Table) else pa.Table.from_batches([data]))


class ArrowRows(Sequence[Mapping[str, Any]]):
    """The rows of an Arrow table, as a sequence of dicts. A dict is made when a caller asks for its row."""

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
"""The longest change id, in bytes. Jobs of earlier releases recorded "job:" and an id of up to 200 bytes."""
Row = Mapping[str, Any]


@dataclass(frozen=True)
class _Rows:
    """A change with rows: in a list, in a DataFrame of pandas or Polars, or in Arrow data."""

    rows: Iterable[Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", as_dicts(self.rows))


@dataclass(frozen=True)
class Insert(_Rows):
    """New rows, each a dict of cells. A cell that is missing or null gets the column's default."""

    rows: Iterable[Row]


@dataclass(frozen=True)
class Update(_Rows):
    """Whole rows, each with ROW_ID and ROW_VERSION. A row without other cells is deleted."""

    rows: Iterable[Row]


@dataclass(frozen=True)
class Patch(_Rows):
    """Some cells of rows, each with ROW_ID and optionally ROW_VERSION.

    With ROW_VERSION, a row that was changed since raises a conflict. A row without cells is skipped. A row
    may also be a tuple (ROW_ID, ROW_VERSION or None, cells); if its cells are None, the row is deleted.
    """

    rows: Iterable[Row | tuple[int, int | None, Row | None]]


@dataclass(frozen=True)
class Remove(_Rows):
    """Rows to delete: pairs of ROW_ID and ROW_VERSION."""

    rows: Iterable[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class AddColumn:
    """A new column. Existing rows get its default."""

    column: Column


@dataclass(frozen=True, slots=True)
class RenameColumn:
    """A new name for a column."""

    name: str
    new_name: str


@dataclass(frozen=True, slots=True)
class RetypeColumn:
    """A new type, `size_max`, default or enum for a column.

    A field that is left out gets the value that it has in a new column, except that a STRING keeps its
    `size_max`. The change is refused if a value of a current row does not fit.
    """

    name: str
    type: str
    size_max: int | None = None
    default: Any = None
    enum: Sequence[Any] | None = None


@dataclass(frozen=True, slots=True)
class DropColumn:
    """A column to drop. Older versions of rows keep it."""

    name: str


@dataclass(frozen=True, slots=True)
class LoadCsv:
    """The rows of a CSV or TSV file.

    - Rows without ROW_ID are inserted. In rows with ROW_ID, the columns that the file has are updated.
    - A row that has only the cells ROW_ID and ROW_VERSION is deleted.
    - With `as_new`, ROW_ID and ROW_VERSION are ignored, and all rows are inserted.
    - `columns` names the file's columns, in place of its header.
    - `null` is a text, or several, that means null where it is not quoted, for example "NA".
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
    """Raises `InvalidInput` for an invalid change id."""
    check_text("change_id", change_id, CHANGE_ID_BYTES_MAX)


def checked_number(what: str, value: object) -> int:
    """Returns a value that is a ROW_ID or ROW_VERSION.

    Raises `RowNotFound` for a value that cannot be one.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= INTEGER_MAX:
        raise RowNotFound(f"{what} is a whole number from 1 to {INTEGER_MAX:,}, not {value!r}")
    return value


def checked_reference(value: object) -> tuple[int, int]:
    """Returns the id and version of a reference to a row. Raises `InvalidRow` and `RowNotFound`."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise InvalidRow(f"a row is named by (ROW_ID, ROW_VERSION), not {value!r}")
    return checked_number(ROW_ID, value[0]), checked_number(ROW_VERSION, value[1])


class RowIds(Sequence[int]):
    """Consecutive ids of rows, in order. The sequence equals a list of the same ids."""

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
    """The result of a change: the ids of inserted rows in order, the new versions, and counts of rows.

    `changed` has the numbers of "inserted", "updated", "deleted" and "unchanged" rows. Unchanged rows had the
    given values already and were not written.
    """

    row_ids: Sequence[int] = field(default_factory=RowIds)
    versions: Sequence[int] = ()
    changed: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns the result as a JSON object.

        In place of the consecutive ids, it has the first id and their number.
        """
        first = self.row_ids[0] if self.row_ids else None
        return {
            "first_row_id": first,
            "row_ids": len(self.row_ids),
            "versions": list(self.versions),
            "changed": dict(self.changed),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Changed:
        """Returns the result of an object that `to_json` made."""
        ids = RowIds(value["first_row_id"] or 1, value["row_ids"])
        return Changed(ids, list(value["versions"]), dict(value["changed"]))


# Changes as JSON: the content of a file of changes, or of a request to a service.

_ROWS: dict[str, type[Insert | Update | Patch | Remove]] = {
    "insert": Insert, "update": Update, "patch": Patch, "remove": Remove,
}  # fmt: skip
_OBJECTS: dict[str, type[RenameColumn | RetypeColumn | LoadCsv]] = {
    "rename_column": RenameColumn, "retype_column": RetypeColumn, "load_csv": LoadCsv,
}  # fmt: skip
KINDS = (*_ROWS, "add_column", *_OBJECTS, "drop_column")
_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")


def parse_changes(value: object, path_of: Callable[[str], Any] | None = None) -> list[Change]:
    """Returns the changes of a JSON list.

    `path_of` returns the path of a file that `load_csv` names. Without `path_of`, `load_csv` is refused.
    Raises `InvalidInput`, which names the change by its number, and `InvalidColumn`.
    """
    if not isinstance(value, list) or not value:
        raise InvalidInput('changes are a list, like [{"insert": [{"name": "a"}]}]')
    return [_change(change, f"change {number}", path_of) for number, change in enumerate(value, 1)]


def _change(value: object, where: str, path_of: Callable[[str], Any] | None) -> Change:
    if not isinstance(value, dict) or len(value) != 1:
        raise InvalidInput(f"{where}: it must be an object of one name, one of {', '.join(KINDS)}")
    [(kind, given)] = value.items()
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
        if names is not None and not (
            isinstance(names, list) and all(isinstance(name, str) for name in names)
        ):
            raise InvalidInput(f"{where}: the columns of load_csv are a list of names")
        return LoadCsv(**{**given, "path": path_of(str(given["path"]))})
    return made(**given)


def changes_json(changes: Sequence[Change]) -> list[dict[str, Any]]:
    """Returns changes as a JSON list that `parse_changes` can read.

    Raises `InvalidInput` for other values.
    """
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
    raise InvalidInput(f"{change!r} is not a change: use dm.Insert, dm.Update, …")


def _row(row: Any) -> Any:
    return (
        dict(row) if isinstance(row, Mapping) else list(row) if isinstance(row, Sequence | Iterator) else row
    )
