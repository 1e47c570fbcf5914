"""Files of JSON, an object a line or an array of objects: read by DuckDB as text, typed by the schema."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.arrow_schema import arrow_type
from dormouse.errors import InvalidData, not_installed, one_line
from dormouse.model.types import (
    BOOLEAN,
    DATE,
    DOUBLE,
    FLOAT,
    INT,
    LIST,
    LONG,
    NESTING_DEPTH_MAX,
    STRING,
    STRUCT,
    TIMESTAMP,
    DataType,
    Field,
)
from dormouse.sources.data_files import DataFile
from dormouse.sources.json_places import check_depth, check_objects, is_empty, line_of_object
from dormouse.sources.odd_numbers import has_long_numbers
from dormouse.sources.text_values import (
    TIMES,
    UnfitRow,
    UnfitText,
    exact_decimal,
    first_unkept,
    not_null,
    value_column,
)

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MEMORY = "1GB"
BATCH_ROWS = 2_048
"""As many as DuckDB makes at once: rows may be of any width, and who reads them puts small ones together."""
_FILE = "$path, hive_partitioning = false"
"""DuckDB takes names for patterns, and has values of folders in place of those of the file."""

_INEXACT = (pa.ArrowInvalid, TypeError, ValueError)
_ADVICE = re.compile(r" (?:Try setting|LINE 1:) ")
"""What DuckDB adds for statements of ours, which no caller can change."""
_OF_ENGINE = re.compile(r'^[A-Za-z ]+ Error: | in file "[^"]*"')

_ROUNDED = {DOUBLE, FLOAT, INT, LONG, STRING}
_OF_DUCKDB = {
    "BOOLEAN": BOOLEAN, "BIGINT": LONG, "DOUBLE": DOUBLE, "DATE": DATE, "TIMESTAMP": TIMESTAMP,
    "TIMESTAMP WITH TIME ZONE": TIMESTAMP,
}  # fmt: skip


class _NoColumns(InvalidData):
    """All objects are empty."""


@contextmanager
def _connected(file: DataFile, fields: Sequence[Field] = ()) -> Iterator[DuckDBPyConnection]:
    """Yields a connection; raises `InvalidData`, with the line, for what DuckDB refuses of the file."""
    try:
        import duckdb
    except ImportError:
        raise not_installed("duckdb", "sql") from None
    with duckdb.connect(config={"memory_limit": MEMORY}) as connection:
        try:
            yield connection
        except duckdb.Error as error:
            has_keys = check_objects(file.path, tuple(fields))
            if not has_keys and isinstance(error, duckdb.BinderException):
                raise _NoColumns("has no columns") from None
            why = _OF_ENGINE.sub("", _ADVICE.split(one_line(error))[0])[:300]
            raise InvalidData(f"is no JSON of an object a line, or of an array of objects: {why}") from None


def json_types(file: DataFile) -> dict[str, DataType]:
    """The columns of all objects, and their types; what has several, or none, is text. `InvalidData`."""
    try:
        if is_empty(file):
            return {}
        check_depth(file.path)
        return _json_types(file)
    except _NoColumns:
        return {}


def _json_types(file: DataFile) -> dict[str, DataType]:
    with _connected(file) as connection:
        found = connection.execute(
            f"select * from read_json({_FILE}, sample_size = -1, records = true, "
            "map_inference_threshold = -1) limit 0",
            {"path": glob.escape(str(file.path))},
        )
        types = {str(one[0]): _type(one[1]) for one in found.description or ()}
        if any(_is_renamed(name, types) for name in types):
            _check_keys(connection, file)
        return types


def inferred_json_types(file: DataFile) -> dict[str, DataType]:
    """Returns the types of `json_types` for a new table; `InvalidData`.

    Columns are text if they have words that DuckDB takes for times, like infinity and epoch, or numbers with
    more digits than a double keeps.
    """
    types = _with_digits(file, json_types(file))
    times = [name for name, kind in types.items() if kind in TIMES]
    if not times:
        return types
    words = ", ".join(f"bool_or(not regexp_matches({_quoted(name)}, '\\d'))" for name in times)
    texts = _struct(dict.fromkeys(times, "VARCHAR"))
    with _connected(file) as connection:
        statement = f"select {words} from read_json({_FILE}, columns = {texts})"
        found = connection.execute(statement, {"path": glob.escape(str(file.path))}).fetchall()[0]
    return types | {name: STRING for name, has_word in zip(times, found, strict=True) if has_word}


def _with_digits(file: DataFile, types: Mapping[str, DataType]) -> dict[str, DataType]:
    """Returns the types, with STRING for each DOUBLE that does not keep the digits of all its numbers."""
    doubles = [Field(name, kind) for name, kind in types.items() if _has(kind, {DOUBLE})]
    if not doubles or not has_long_numbers(file.path, even_whole=True):
        return dict(types)
    kept = {field.name: field.type for field in doubles}
    for objects in _objects(file):
        texts = _as_written(objects, doubles, {})
        kept = {name: _with_kept(texts[name], kind) for name, kind in kept.items()}
    return {**types, **kept}


def _with_kept(texts: pa.Array, kind: DataType) -> DataType:
    if kind.element is not None:
        return LIST(_with_kept(texts.flatten(), kind.element))
    if kind.parts:
        parts = zip(kind.parts, texts.flatten(), strict=True)
        return STRUCT([replace(part, type=_with_kept(some, part.type)) for part, some in parts])
    if kind != DOUBLE:
        return kind
    numbers = texts.cast(pa.float64())
    return DOUBLE if first_unkept(texts, numbers, DOUBLE, pc.is_valid(numbers)) < 0 else STRING


def _is_renamed(name: str, names: Iterable[str]) -> bool:
    """Whether DuckDB may have called it so: it sees no difference between Name and name."""
    stem = re.fullmatch(r"(.+)_\d+", name, re.DOTALL)
    return stem is not None and any(one.casefold() == stem[1].casefold() for one in names)


def _check_keys(connection: DuckDBPyConnection, file: DataFile) -> None:
    """Refuses keys that differ by case only."""
    keys = f"select distinct unnest(json_keys(json)) from read_json_objects({_FILE})"
    found = connection.execute(keys, {"path": glob.escape(str(file.path))}).fetchall()
    seen: dict[str, str] = {}
    for (key,) in sorted(found):
        other = seen.setdefault(key.casefold(), key)
        if other != key:
            raise InvalidData(f"has columns {other!r} and {key!r}, which differ by case only: rename one")


def _type(found: Any, levels: int = NESTING_DEPTH_MAX - 1) -> DataType:
    """Returns our type for one of DuckDB's; text for one that has none, or is below the last level."""
    kind = str(found.id)
    if kind in ("list", "struct") and not levels:
        return STRING
    if kind == "list":
        return LIST(_type(found.children[0][1], levels - 1))
    if kind == "struct":
        parts = ((name, _type(part, levels - 1)) for name, part in found.children)
        return STRUCT([Field(name, part, nullable=True) for name, part in parts])
    return _OF_DUCKDB.get(str(found), STRING)


def json_batches(
    file: DataFile, fields: Sequence[Field], defaults: Mapping[str, Any] = {}
) -> Iterator[pa.RecordBatch]:
    """Yields these columns, in objects that lack them with their defaults, or null; `InvalidData`."""
    columns = {field.name: _as_text(field.type) for field in fields}
    if is_empty(file):
        return
    with _connected(file, fields) as connection:
        path = {"path": glob.escape(str(file.path))}
        reader = connection.execute(
            f"select * from read_json({_FILE}, columns = {_struct(columns)})", path
        ).to_arrow_reader(BATCH_ROWS)
        is_odd = has_long_numbers(file.path)
        exact = [
            field for field in fields if _has_decimals(field.type) or (is_odd and _has(field.type, _ROUNDED))
        ]
        inferred = file.given.is_inferred and is_odd
        objects = _objects(file) if exact else repeat(None)
        given = {field: defaults[field.name] for field in fields if defaults.get(field.name) is not None}
        presence = _presence(file, list(given)) if given else repeat(None)
        row = 0
        for batch, texts, there in zip(reader, objects, presence, strict=bool(exact and given)):
            try:
                found = {name: batch.column(name) for name in columns}
                if texts is not None:
                    found |= _as_written(texts, exact, found)
                typed = {
                    f.name: value_column(
                        found[f.name],
                        f,
                        empties=False,
                        keeps_digits=inferred and f.name not in file.given.types,
                    )
                    for f in fields
                }
                if there is not None:
                    typed |= _filled(typed, there, given)
                arrays = [not_null(typed[f.name], f) for f in fields]
            except UnfitRow as error:
                line = line_of_object(file.path, row + error.place)
                where = f"object {row + error.place + 1:,}" if line is None else f"line {line:,}"
                told = {**error.data, "line": line, "row": int(row + error.place)}
                raise InvalidData(f"{where}: {error.after(row)}", **told) from None
            yield pa.RecordBatch.from_arrays(arrays, names=list(columns))
            row += batch.num_rows


def _filled(
    columns: Mapping[str, pa.Array], there: pa.RecordBatch, defaults: Mapping[Field, Any]
) -> dict[str, pa.Array]:
    """Returns columns with their defaults in the objects that lack them."""
    return {
        field.name: pc.if_else(
            there.column(field.name), columns[field.name], pa.scalar(default, arrow_type(field.type))
        )
        for field, default in defaults.items()
    }


def _presence(file: DataFile, fields: Sequence[Field]) -> Iterator[pa.RecordBatch]:
    """Yields which objects have these columns, be they null, in batches as of `json_batches`."""
    pointers = {field.name: "/" + field.name.replace("~", "~0").replace("/", "~1") for field in fields}
    columns = (f"json_exists(json, {_literal(to)}) as {_quoted(name)}" for name, to in pointers.items())
    with _connected(file) as connection:
        path = {"path": glob.escape(str(file.path))}
        found = connection.execute(f"select {', '.join(columns)} from read_json_objects({_FILE})", path)
        yield from found.to_arrow_reader(BATCH_ROWS)


def _objects(file: DataFile) -> Iterator[pa.Array]:
    """The texts of all objects, in batches as of `json_batches`."""
    with _connected(file) as connection:
        path = {"path": glob.escape(str(file.path))}
        found = connection.execute(f"select json from read_json_objects({_FILE})", path)
        for batch in found.to_arrow_reader(BATCH_ROWS):
            yield batch.column(0)


def _as_written(
    objects: pa.Array, fields: Sequence[Field], read: Mapping[str, pa.Array]
) -> dict[str, pa.Array]:
    """These columns of objects, with numbers as they are written: DuckDB makes doubles of them first.

    A value without decimals that is none of its column's type is as DuckDB `read` it, or null.
    """
    parsed = [json.loads(text, parse_float=str, parse_int=str) for text in objects.to_pylist()]
    found = {}
    for field in fields:
        given = [None if one is None else one.get(field.name) for one in parsed]
        try:
            found[field.name] = _exact_column(given, field)
        except _INEXACT:
            odd = [row for row, one in enumerate(given) if not _is_exact(one, field)]
            if _has_decimals(field.type):
                raise UnfitText(field, given[odd[0]], odd[0]) from None
            texts = [None if row in odd else _exact(one, field.type) for row, one in enumerate(given)]
            for row in odd if field.name in read else ():
                texts[row] = read[field.name][row].as_py()
            found[field.name] = pa.array(texts, _exact_type(field.type))
    return found


def _exact_column(given: Sequence[Any], field: Field) -> pa.Array:
    return pa.array([_exact(one, field.type) for one in given], _exact_type(field.type))


def _is_exact(value: Any, field: Field) -> bool:
    try:
        _exact_column([value], field)
    except _INEXACT:
        return False
    return True


def _exact(value: Any, kind: DataType) -> Any:
    """Returns decimals, and texts of all else."""
    if kind.element is not None and isinstance(value, list):
        return [_exact(one, kind.element) for one in value]
    if kind.parts and isinstance(value, dict):
        return {part.name: _exact(value.get(part.name), part.type) for part in kind.parts}
    if isinstance(value, bool) and not kind.is_nested and kind.precision is None:
        return str(value).lower()
    if value is None or (isinstance(value, str) and not kind.is_nested):
        return value if value is None or kind.precision is None else exact_decimal(value.strip(), kind)
    raise TypeError(f"there is a {type(value).__name__} where {kind} is wanted")


def _exact_type(kind: DataType) -> pa.DataType:
    if kind.element is not None:
        return pa.list_(_exact_type(kind.element))
    if kind.parts:
        return pa.struct([(part.name, _exact_type(part.type)) for part in kind.parts])
    return pa.string() if kind.precision is None else arrow_type(kind)


def _has_decimals(kind: DataType) -> bool:
    return kind.precision is not None or any(map(_has_decimals, _inner(kind)))


def _has(kind: DataType, wanted: set[DataType]) -> bool:
    """Returns whether a type is, or has within, one of these."""
    return kind in wanted or any(_has(inner, wanted) for inner in _inner(kind))


def _inner(kind: DataType) -> list[DataType]:
    return ([] if kind.element is None else [kind.element]) + [part.type for part in kind.parts]


def _as_text(kind: DataType) -> str:
    """The type of DuckDB which loses nothing: text, in lists and structs, too."""
    if kind.key is not None:
        raise InvalidData(f"JSON is not read into a {kind}; use Parquet")
    if kind.element is not None:
        return f"{_as_text(kind.element)}[]"
    if kind.parts:
        parts = ", ".join(f"{_quoted(part.name)} {_as_text(part.type)}" for part in kind.parts)
        return f"STRUCT({parts})"
    return "VARCHAR"


def _struct(columns: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{_literal(name)}: {_literal(kind)}" for name, kind in columns.items()) + "}"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
