"""The reading of JSON files (one object a line, or an array of objects) as rows of a table.

DuckDB reads all values as text, and this module converts them to the types of the schema.
"""

from __future__ import annotations

import glob
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.arrow_schema import arrow_type
from dormouse.data.transform import quoted
from dormouse.errors import InvalidData, not_installed, one_line
from dormouse.model.types import (
    DOUBLE,
    FLOAT,
    INT,
    LIST,
    LONG,
    NESTING_DEPTH_MAX,
    STRING,
    STRUCT,
    DataType,
    Field,
)
from dormouse.sources.data_files import DataFile
from dormouse.sources.odd_numbers import has_long_numbers
from dormouse.sources.text_reader import opened
from dormouse.sources.text_values import (
    TIMES,
    TYPES_OF_DUCKDB,
    UnfitRow,
    UnfitText,
    exact_decimal,
    first_unkept,
    not_null,
    value_column,
)

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    Query = Callable[[str], DuckDBPyConnection]
    """A function that runs a statement about one file, `$path`."""

# Places in JSON files: the line of each value, and the first value that is not an object.

_EMPTY = re.compile(r"\s*(\[\s*\]\s*)?")
_EMPTY_BYTES_MAX = 1 << 16
_WHOLE_CHARACTERS_MAX = 1 << 28
"""The most characters of a file that are searched for errors, unless each line is one value."""
_BETWEEN = re.compile(r"[\s,\[\]]*")
JSON_DEPTH_MAX = 100
"""The limit of nesting. At some thousands of levels, DuckDB crashes the process and Python raises."""
_DEPTH_BYTES = 1 << 20
_ESCAPED = re.compile(rb"\\.", re.DOTALL)
_NO_UTF8 = re.compile("[\udc80-\udcff]")
_SHOWN = 100
_NAMES = {
    str: "a text",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}


def is_empty(file: DataFile) -> bool:
    """Returns whether a text file has no rows: it is blank, or an empty JSON array. False for Parquet."""
    if file.kind == "parquet":
        return False
    with opened(file.path) as stream:
        begin = bytes(stream.read(_EMPTY_BYTES_MAX + 1))
    text = begin.decode("utf-8-sig", errors="replace")
    if len(begin) > _EMPTY_BYTES_MAX:
        return False
    return not text.strip() if file.kind == "csv" else _EMPTY.fullmatch(text) is not None


def check_depth(path: Path) -> None:
    """Raises `InvalidData` for a file with more than `JSON_DEPTH_MAX` levels of nesting."""
    depth, line, is_text, rest = 0, 1, False, b""
    with opened(path) as stream:
        while block := bytes(stream.read(_DEPTH_BYTES)):
            data = rest + block
            # an odd number of backslashes at the end escapes a character of the next block
            slashes = len(data) - len(data.rstrip(b"\\"))
            data, rest = (data[:-1], data[-1:]) if slashes % 2 else (data, b"")
            codes = np.frombuffer(_ESCAPED.sub(b"..", data), np.uint8)
            if not len(codes):
                continue
            in_text = (np.cumsum(codes == ord('"'), dtype=np.int32) + is_text) % 2 == 1
            folded = codes | 32  # [ and ] become { and }
            steps = (folded == ord("{")).astype(np.int8) - (folded == ord("}"))
            depths = depth + np.cumsum(np.where(in_text, 0, steps), dtype=np.int32)
            if depths.max() > JSON_DEPTH_MAX:
                line += data.count(b"\n", 0, int(np.argmax(depths > JSON_DEPTH_MAX)))
                raise InvalidData(f"line {line:,}: more than {JSON_DEPTH_MAX} levels of nesting", line=line)
            depth, is_text, line = int(depths[-1]), bool(in_text[-1]), line + data.count(b"\n")


def line_of_object(path: Path, number: int) -> int | None:
    """Returns the line, from 1, on which an object (its number from 0) begins, or None if it is not found."""
    try:
        return next((line for line, _ in islice(_values(path), number, None)), None)
    except InvalidData:
        return None


def check_objects(path: Path, fields: tuple[Field, ...] = ()) -> bool:
    """Returns whether any object has a key. It is slow, so it is used only for a file that DuckDB refuses.

    Raises `InvalidData` for the first value that is not an object, has a key twice, or has another shape than
    the type of a field.
    """
    has_keys = False
    for line, value in _values(path):
        if not isinstance(value, _Object):
            why = f"is {_named(value)}; each line, or each element of the array, must be an object"
            raise InvalidData(f"line {line:,}: {why}", line=line)
        if value.doubled is not None:
            raise InvalidData(f"line {line:,}: has {value.doubled!r} twice", line=line)
        has_keys = has_keys or bool(value)
        for field in fields:
            if (wrong := _misshapen(value.get(field.name), field.type)) is not None:
                raise InvalidData(
                    f"line {line:,}: column {field.name!r} is {field.type}, but has {_named(wrong)} there",
                    line=line,
                    column=field.name,
                )
    return has_keys


class _Object(dict[str, Any]):
    """A JSON object. `doubled` is a key that its text has twice, or None."""

    doubled: str | None = None


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    found = _Object(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        found.doubled = next(name for name in names if names.count(name) > 1)
    return found


_decoder = json.JSONDecoder(object_pairs_hook=_object)


def _values(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields each JSON value of a file with the number of its line, from 1.

    The values are the elements of an array, or the lines. Raises `InvalidData` for text that is not JSON.
    """
    with opened(path) as stream:
        text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape")
        before, first = 0, ""
        for first in text:
            before += 1
            if first.strip():
                break
        if first.lstrip().startswith("[") or not _is_whole(first):
            whole = first + text.read(_WHOLE_CHARACTERS_MAX)
            yield from _of_text(whole, before, is_cut=bool(text.read(1)))
            return
        yield from _of_text(first, before)
        for line, value in enumerate(text, before + 1):
            yield from _of_text(value, line)


def _is_whole(text: str) -> bool:
    """Returns False if the JSON value of a line continues on the next line.

    A line with an error before its end gives True, since more lines would not make it valid.
    """
    try:
        _decoder.raw_decode(text.lstrip())
    except json.JSONDecodeError as error:
        return error.pos < len(text.strip())
    return True


def _of_text(text: str, first_line: int, *, is_cut: bool = False) -> Iterator[tuple[int, Any]]:
    """Yields each JSON value of a text with the number of its line.

    The values are the elements of an array, or follow each other. `first_line` is the number of the text's
    first line. With `is_cut`, the text is only the beginning of a file, and the first incomplete value ends
    the search. Raises `InvalidData` for text that is not JSON.
    """
    at, line, counted = 0, first_line, 0
    while (at := _after(text, at)) < len(text):
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, end = _decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            if is_cut:
                return
            there = line + text.count("\n", at, error.pos)
            why = f"is not JSON: {error.msg} {_seen(text, error.pos)}"
            raise InvalidData(f"line {there:,}: {why}", line=there) from None
        except RecursionError:
            raise InvalidData(f"line {line:,}: is nested too deeply", line=line) from None
        if (wrong := _NO_UTF8.search(text, at, end)) is not None:
            there = line + text.count("\n", at, wrong.start())
            raise InvalidData(f"line {there:,}: is not UTF-8", line=there)
        yield line, value
        at = end


def _after(text: str, at: int) -> int:
    """Returns the position of the next value: skips blanks, commas and brackets from `at` on."""
    between = _BETWEEN.match(text, at)
    return between.end() if between else at


def _seen(text: str, at: int) -> str:
    rest = text[at:].split("\n", 1)[0][:20].rstrip()
    return f"at {rest!r}" if rest else "at its end"


def _named(value: Any) -> str:
    if value is None:
        return "null"
    text = json.dumps(value, ensure_ascii=False)
    return f"{_NAMES.get(type(value), 'an object')} ({text if len(text) <= _SHOWN else f'{text[:_SHOWN]}…'})"


def _misshapen(value: Any, kind: DataType) -> Any:
    """Returns the first part of a value that should be a list or object by the type but is not, or None."""
    if value is None or not kind.is_nested:
        return None
    if kind.element is not None:
        if not isinstance(value, list):
            return value
        return next((wrong for item in value if (wrong := _misshapen(item, kind.element)) is not None), None)
    if not isinstance(value, dict):
        return value
    parts = (_misshapen(value.get(part.name), part.type) for part in kind.parts)
    return next((wrong for wrong in parts if wrong is not None), None)


MEMORY = "1GB"
BATCH_ROWS = 2_048
"""The number of rows that DuckDB makes at once. Rows can be wide; the caller joins small batches."""
_FILE = "$path, hive_partitioning = false"
"""Arguments for DuckDB. Without the second, values of folder names would replace those of the file."""

_INEXACT = (pa.ArrowInvalid, TypeError, ValueError)
_ADVICE = re.compile(r" (?:Try setting|LINE 1:) ")
"""The beginning of DuckDB's advice about the statement, which the caller cannot change."""
_OF_ENGINE = re.compile(r'^[A-Za-z ]+ Error: | in file "[^"]*"')

_ROUNDED = {DOUBLE, FLOAT, INT, LONG, STRING}


class _NoColumns(InvalidData):
    """An error raised when all objects are empty."""


@contextmanager
def _queries(file: DataFile, fields: Sequence[Field] = ()) -> Iterator[Query]:
    """Yields a function that runs statements of DuckDB about the file.

    Raises `InvalidData`, with the line if it is known, if DuckDB refuses the file.
    """
    try:
        import duckdb
    except ImportError:
        raise not_installed("duckdb", "sql") from None
    with duckdb.connect(config={"memory_limit": MEMORY}) as connection:
        try:
            # escaped, since DuckDB expands patterns in paths
            yield partial(connection.execute, parameters={"path": glob.escape(str(file.path))})
        except duckdb.Error as error:
            has_keys = check_objects(file.path, tuple(fields))
            if not has_keys and isinstance(error, duckdb.BinderException):
                raise _NoColumns("has no columns") from None
            why = _OF_ENGINE.sub("", _ADVICE.split(one_line(error))[0])[:300]
            raise InvalidData(f"is not JSON with one object a line, or an array of objects: {why}") from None


def json_types(file: DataFile) -> dict[str, DataType]:
    """Returns the columns of all objects and their types. Columns with several types, or none, are text.

    Raises `InvalidData` if the file is not JSON, is nested too deeply, or has keys that differ by case only.
    """
    try:
        if is_empty(file):
            return {}
        check_depth(file.path)
        return _json_types(file)
    except _NoColumns:
        return {}


def _json_types(file: DataFile) -> dict[str, DataType]:
    with _queries(file) as query:
        nothing = query(
            f"select * from read_json({_FILE}, sample_size = -1, records = true, "
            "map_inference_threshold = -1) limit 0"
        )
        types = {str(column[0]): _type(column[1]) for column in nothing.description or ()}
        if any(_is_renamed(name, types) for name in types):
            _check_keys(query)
        return types


def inferred_json_types(file: DataFile) -> dict[str, DataType]:
    """Returns the types of `json_types` for a new table. Raises `InvalidData`.

    Differs for two kinds of columns, which are text. They have words that DuckDB reads as times, like
    infinity and epoch, or numbers with more digits than a double keeps.
    """
    types = _with_digits(file, json_types(file))
    times = [name for name, kind in types.items() if kind in TIMES]
    if not times:
        return types
    words = ", ".join(f"bool_or(not regexp_matches({quoted(name)}, '\\d'))" for name in times)
    texts = _struct(dict.fromkeys(times, "VARCHAR"))
    with _queries(file) as query:
        [have_words] = query(f"select {words} from read_json({_FILE}, columns = {texts})").fetchall()
    return types | {name: STRING for name, has_word in zip(times, have_words, strict=True) if has_word}


def _with_digits(file: DataFile, types: Mapping[str, DataType]) -> dict[str, DataType]:
    """Returns the types, with STRING in place of DOUBLE where a double would lose digits of a number."""
    doubles = [Field(name, kind) for name, kind in types.items() if _has(kind, {DOUBLE})]
    if not doubles or not has_long_numbers(file.path, even_whole=True):
        return dict(types)
    kept = {field.name: field.type for field in doubles}
    for objects in _objects(file):
        texts = _as_written(objects, doubles, {})
        kept = {name: _with_kept(texts[name], kind) for name, kind in kept.items()}
    return {**types, **kept}


def _with_kept(texts: pa.Array, kind: DataType) -> DataType:
    """Returns the type, with STRING in place of each DOUBLE in it that would lose digits of `texts`."""
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
    """Returns whether DuckDB may have added a number to a column's name, as in name_1.

    DuckDB does so for keys that differ by case only, such as Name and name.
    """
    stem = re.fullmatch(r"(.+)_\d+", name, re.DOTALL)
    return stem is not None and any(other.casefold() == stem[1].casefold() for other in names)


def _check_keys(query: Query) -> None:
    """Raises `InvalidData` if two keys differ by case only."""
    keys = query(f"select distinct unnest(json_keys(json)) from read_json_objects({_FILE})").fetchall()
    seen: dict[str, str] = {}
    for (key,) in sorted(keys):
        other = seen.setdefault(key.casefold(), key)
        if other != key:
            raise InvalidData(f"has columns {other!r} and {key!r}, which differ by case only: rename one")


def _type(duckdb_type: Any, levels: int = NESTING_DEPTH_MAX - 1) -> DataType:
    """Returns the type for a type of DuckDB. It is STRING if there is none, or below `levels` of nesting."""
    kind = str(duckdb_type.id)
    if kind in ("list", "struct") and not levels:
        return STRING
    if kind == "list":
        return LIST(_type(duckdb_type.children[0][1], levels - 1))
    if kind == "struct":
        parts = ((name, _type(part, levels - 1)) for name, part in duckdb_type.children)
        return STRUCT([Field(name, part, nullable=True) for name, part in parts])
    return TYPES_OF_DUCKDB.get(str(duckdb_type), STRING)


def json_batches(
    file: DataFile, fields: Sequence[Field], defaults: Mapping[str, Any] = {}
) -> Iterator[pa.RecordBatch]:
    """Yields the columns of the fields, in batches. An object without a key gets the default, or null.

    Raises `InvalidData`, which names the line.
    """
    columns = {field.name: _as_text(field.type) for field in fields}
    if is_empty(file):
        return
    with _queries(file, fields) as query:
        rows = query(f"select * from read_json({_FILE}, columns = {_struct(columns)})")
        reader = rows.to_arrow_reader(BATCH_ROWS)
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
                data = {**error.data, "line": line, "row": int(row + error.place)}
                raise InvalidData(f"{where}: {error.after(row)}", **data) from None
            yield pa.RecordBatch.from_arrays(arrays, names=list(columns))
            row += batch.num_rows


def _filled(
    columns: Mapping[str, pa.Array], presence: pa.RecordBatch, defaults: Mapping[Field, Any]
) -> dict[str, pa.Array]:
    """Returns the columns that have defaults, with the default in each object that lacks the key."""
    return {
        field.name: pc.if_else(
            presence.column(field.name), columns[field.name], pa.scalar(default, arrow_type(field.type))
        )
        for field, default in defaults.items()
    }


def _presence(file: DataFile, fields: Sequence[Field]) -> Iterator[pa.RecordBatch]:
    """Yields booleans, one column for each field: True if an object has the key, even with a null.

    The batches have the same rows as those of `json_batches`.
    """
    pointers = {field.name: "/" + field.name.replace("~", "~0").replace("/", "~1") for field in fields}
    columns = (f"json_exists(json, {_literal(to)}) as {quoted(name)}" for name, to in pointers.items())
    with _queries(file) as query:
        rows = query(f"select {', '.join(columns)} from read_json_objects({_FILE})")
        yield from rows.to_arrow_reader(BATCH_ROWS)


def _objects(file: DataFile) -> Iterator[pa.Array]:
    """Yields the JSON text of each object. The batches have the same rows as those of `json_batches`."""
    with _queries(file) as query:
        for batch in query(f"select json from read_json_objects({_FILE})").to_arrow_reader(BATCH_ROWS):
            yield batch.column(0)


def _as_written(
    objects: pa.Array, fields: Sequence[Field], read: Mapping[str, pa.Array]
) -> dict[str, pa.Array]:
    """Returns the columns of JSON objects with all digits of each number.

    `objects` has the text of each object. DuckDB would convert numbers to doubles and lose digits. `read` has
    columns as DuckDB read them; a value that does not fit its column's type is taken from there, or is
    null. If the type has decimals, raises `UnfitText` for such a value instead.
    """
    parsed = [json.loads(text, parse_float=str, parse_int=str) for text in objects.to_pylist()]
    written = {}
    for field in fields:
        given = [None if row is None else row.get(field.name) for row in parsed]
        try:
            written[field.name] = _exact_column(given, field)
        except _INEXACT:
            odd = [row for row, value in enumerate(given) if not _is_exact(value, field)]
            if _has_decimals(field.type):
                raise UnfitText(field, given[odd[0]], odd[0]) from None
            texts = [None if row in odd else _exact(value, field.type) for row, value in enumerate(given)]
            for row in odd if field.name in read else ():
                texts[row] = read[field.name][row].as_py()
            written[field.name] = pa.array(texts, _exact_type(field.type))
    return written


def _exact_column(given: Sequence[Any], field: Field) -> pa.Array:
    return pa.array([_exact(value, field.type) for value in given], _exact_type(field.type))


def _is_exact(value: Any, field: Field) -> bool:
    try:
        _exact_column([value], field)
    except _INEXACT:
        return False
    return True


def _exact(value: Any, kind: DataType) -> Any:
    """Returns a value with decimals as `Decimal` and all other numbers as text. Raises one of `_INEXACT`."""
    if kind.element is not None and isinstance(value, list):
        return [_exact(item, kind.element) for item in value]
    if kind.parts and isinstance(value, dict):
        return {part.name: _exact(value.get(part.name), part.type) for part in kind.parts}
    if isinstance(value, bool) and not kind.is_nested and kind.precision is None:
        return str(value).lower()
    if value is None or (isinstance(value, str) and not kind.is_nested):
        return value if value is None or kind.precision is None else exact_decimal(value.strip(), kind)
    raise TypeError(f"a {type(value).__name__} is not a value of {kind}")


def _exact_type(kind: DataType) -> pa.DataType:
    if kind.element is not None:
        return pa.list_(_exact_type(kind.element))
    if kind.parts:
        return pa.struct([(part.name, _exact_type(part.type)) for part in kind.parts])
    return pa.string() if kind.precision is None else arrow_type(kind)


def _has_decimals(kind: DataType) -> bool:
    return kind.precision is not None or any(map(_has_decimals, _inner(kind)))


def _has(kind: DataType, wanted: set[DataType]) -> bool:
    """Returns whether a type is one of `wanted`, or contains one."""
    return kind in wanted or any(_has(inner, wanted) for inner in _inner(kind))


def _inner(kind: DataType) -> list[DataType]:
    return ([] if kind.element is None else [kind.element]) + [part.type for part in kind.parts]


def _as_text(kind: DataType) -> str:
    """Returns DuckDB's type for reading without loss: VARCHAR, also within lists and structs.

    Raises `InvalidData` for a map.
    """
    if kind.key is not None:
        raise InvalidData(f"JSON cannot be read into a {kind}; use Parquet")
    if kind.element is not None:
        return f"{_as_text(kind.element)}[]"
    if kind.parts:
        parts = ", ".join(f"{quoted(part.name)} {_as_text(part.type)}" for part in kind.parts)
        return f"STRUCT({parts})"
    return "VARCHAR"


def _struct(columns: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{_literal(name)}: {_literal(kind)}" for name, kind in columns.items()) + "}"


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
