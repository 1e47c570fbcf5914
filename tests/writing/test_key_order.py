"""The order of keys, the same in Python, PostgreSQL, pyarrow and DataFusion; Spark has its own test."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import datafusion
import psycopg
import pyarrow as pa
import pytest

from dormouse.postgres import ConnectionSupplier
from tests.support.model import (
    BYTES,
    INT,
    LONG,
    STRING,
    DataType,
    Field,
    Schema,
    decode_key,
    decode_value,
    encode_key,
    encode_value,
)
from tests.support.reading import arrow_schema

ROWS = 2_000
LETTERS = "\x00\x01aAzZ~\x7f\x80ßé\ud7ff\ue000\uffff\U00010000\U0001f42d\U0010ffff"
STRINGS = [
    "",
    "\x00",
    "\x00\x00",
    "a",
    "a\x00",
    "a\x00\x00",
    "ab",
    "e\u0301",
    "\xe9",
    "\uffff",
    "\U00010000",
    " a",
    "A",
]
BINARIES = [b"", b"\x00", b"\x00\x00", b"\x00\xff", b"\x7f", b"\x80", b"\xff", b"\xff\x00", b"\xff\xff"]


def a_value(chance: random.Random, type_: DataType) -> Any:
    if type_ in (INT, LONG):
        bits = 31 if type_ == INT else 63
        edges = [-(1 << bits), -(1 << bits) + 1, -256, -1, 0, 1, 255, (1 << bits) - 1]
        return chance.choice(edges) if chance.random() < 0.3 else chance.randrange(-(1 << bits), 1 << bits)
    if type_ == STRING:
        text = "".join(chance.choices(LETTERS, k=chance.randrange(5)))
        return chance.choice(STRINGS) if chance.random() < 0.5 else text
    data = bytes(chance.choices([0, 1, 127, 128, 255], k=chance.randrange(5)))
    return chance.choice(BINARIES) if chance.random() < 0.5 else data


def keys(schema: Schema, seed: int) -> list[tuple[Any, ...]]:
    """Returns distinct keys in random order, with many equal values in their first fields."""
    chance = random.Random(seed)
    pools = [[a_value(chance, f.type) for _ in range(60)] for f in schema.row_keys[:-1]]
    last = schema.row_keys[-1].type
    found = {(*(chance.choice(pool) for pool in pools), a_value(chance, last)) for _ in range(ROWS)}
    shuffled = sorted(found)
    chance.shuffle(shuffled)
    return shuffled


def by(types: list[DataType]) -> Schema:
    return Schema([Field(f"k{n}", type_) for n, type_ in enumerate(types)])


SCHEMAS = {
    "int": by([INT]),
    "long": by([LONG]),
    "string": by([STRING]),
    "bytes": by([BYTES]),
    "string, int": by([STRING, INT]),
    "bytes, string, long": by([BYTES, STRING, LONG]),
    "int, bytes, string": by([INT, BYTES, STRING]),
    "string, string": by([STRING, STRING]),
}
EVERY = pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())


def as_arrow(schema: Schema, rows: list[tuple[Any, ...]]) -> pa.Table:
    names = schema.names
    return pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows], arrow_schema(schema))


def rows_of(table: pa.Table) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in table.to_pylist()]


@pytest.fixture(scope="module")
def postgresql(shared_supplier: tuple[str, ConnectionSupplier]) -> Any:
    with psycopg.connect(shared_supplier[0]) as conn:
        yield conn


@EVERY
def test_postgresql_sorts_encoded_keys_as_python_sorts_keys(schema: Schema, postgresql: Any) -> None:
    rows = keys(schema, 1)
    encoded = [encode_key(schema.row_keys, row) for row in rows]
    query = "select key from unnest(%s::bytea[]) as t (key) order by key"
    found = [decode_key(schema.row_keys, bytes(key)) for (key,) in postgresql.execute(query, [encoded])]
    assert found == sorted(rows)


@pytest.mark.parametrize("type_", [INT, LONG, STRING, BYTES], ids=str)
def test_postgresql_sorts_single_values_and_ids_as_python_does(type_: DataType, postgresql: Any) -> None:
    """Values are sorted in the form in which partitions store their bounds."""
    values = [row[0] for row in keys(by([type_]), 2)]
    query = "select value from unnest(%s::bytea[]) as t (value) order by value"
    encoded = [encode_value(type_, value) for value in values]
    assert [decode_value(type_, bytes(v)) for (v,) in postgresql.execute(query, [encoded])] == sorted(values)
    if type_ == STRING:
        texts = [v for v in values if "\x00" not in v]
        query = 'select value from unnest(%s::text[]) as t (value) order by value collate "C"'
        assert [v for (v,) in postgresql.execute(query, [texts])] == sorted(texts)


@EVERY
def test_pyarrow_sorts_as_python_does(schema: Schema) -> None:
    rows = keys(schema, 3)
    table = as_arrow(schema, rows)
    assert rows_of(table.sort_by([(name, "ascending") for name in schema.names])) == sorted(rows)


@EVERY
def test_datafusion_sorts_and_compares_as_python_does(schema: Schema) -> None:
    rows = keys(schema, 4)
    context = datafusion.SessionContext()
    context.from_arrow(as_arrow(schema, rows), name="t")
    order = ", ".join(schema.names)
    found = context.sql(f"select * from t order by {order}").to_arrow_table()
    assert rows_of(found) == sorted(rows)
    names = schema.names
    column = context.table("t").filter(datafusion.col(names[0]) < datafusion.lit(rows[0][0]))
    assert sorted(rows_of(column.to_arrow_table())) == sorted(r for r in rows if r[0] < rows[0][0])


@pytest.mark.parametrize("make", [sorted, lambda rows: sorted(rows, reverse=True)])
def test_the_sample_has_values_whose_order_is_often_wrong(make: Callable[..., Any]) -> None:
    """UTF-16 order puts supplementary characters before U+FFFF; signed bytes put 0x80 before 0x00."""
    texts = {row[0] for row in make(keys(SCHEMAS["string"], 1))}
    assert {"", "\x00", "a", "a\x00", "\uffff", "\U00010000"} <= texts
    by_utf16 = sorted(texts, key=lambda text: text.encode("utf-16-be"))
    assert by_utf16 != sorted(texts)
    assert {b"", b"\x80", b"\x7f"} <= {row[0] for row in keys(SCHEMAS["bytes"], 1)}
