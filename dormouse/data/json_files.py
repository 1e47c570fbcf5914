"""Files of JSON, an object a line or an array of objects: read by DuckDB as text, typed by the schema."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dormouse.data.data_files import DataFile
from dormouse.data.text_values import value_column
from dormouse.errors import InvalidData, not_installed, one_line
from dormouse.model.types import BOOLEAN, DATE, DOUBLE, LIST, LONG, STRING, STRUCT, TIMESTAMP, DataType, Field

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MEMORY = "1GB"
BATCH_ROWS = 65_536
_FILE = "$path, hive_partitioning = false"
"""DuckDB takes names for patterns, and has values of folders in place of those of the file."""

_OF_DUCKDB = {
    "BOOLEAN": BOOLEAN, "BIGINT": LONG, "DOUBLE": DOUBLE, "DATE": DATE, "TIMESTAMP": TIMESTAMP,
    "TIMESTAMP WITH TIME ZONE": TIMESTAMP,
}  # fmt: skip


@contextmanager
def _connected() -> Iterator[DuckDBPyConnection]:
    try:
        import duckdb
    except ImportError:
        raise not_installed("duckdb", "sql") from None
    with duckdb.connect(config={"memory_limit": MEMORY}) as connection:
        try:
            yield connection
        except duckdb.Error as error:
            raise InvalidData(one_line(error)[:300]) from None


def json_types(file: DataFile) -> dict[str, DataType]:
    """The columns of all objects, and their types; what has several, or none, is text. `InvalidData`."""
    with _connected() as connection:
        found = connection.execute(
            f"select * from read_json({_FILE}, sample_size = -1, records = true, "
            "map_inference_threshold = -1) limit 0",
            {"path": glob.escape(str(file.path))},
        )
        return {str(one[0]): _type(one[1]) for one in found.description or ()}


def _type(found: Any) -> DataType:
    """Of DuckDB's types; what has none of ours is text."""
    kind = str(found.id)
    if kind == "list":
        return LIST(_type(found.children[0][1]))
    if kind == "struct":
        return STRUCT([Field(name, _type(part), nullable=True) for name, part in found.children])
    return _OF_DUCKDB.get(str(found), STRING)


def json_batches(file: DataFile, fields: Sequence[Field]) -> Iterator[pa.RecordBatch]:
    """These columns, null in objects that have them not; `InvalidData`."""
    columns = {field.name: _as_text(field.type) for field in fields}
    with _connected() as connection:
        reader = connection.execute(
            f"select * from read_json({_FILE}, columns = {_struct(columns)})",
            {"path": glob.escape(str(file.path))},
        ).to_arrow_reader(BATCH_ROWS)
        for batch in reader:
            yield pa.RecordBatch.from_arrays(
                [value_column(batch.column(field.name), field, empties=False) for field in fields],
                names=list(columns),
            )


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
