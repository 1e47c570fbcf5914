"""Structs with parts that must not be null: a null struct is kept, and a null part is refused."""

from __future__ import annotations

from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dormouse.data.arrow_schema import arrow_type, conform
from dormouse.errors import InvalidData
from tests.support.model import (
    BYTES,
    DECIMAL,
    DOUBLE,
    LIST,
    LONG,
    MAP,
    STRING,
    STRUCT,
    DataType,
    Field,
    Schema,
)

PAIR = STRUCT([Field("must", LONG), Field("may", STRING, nullable=True)])
MUST = STRUCT(
    [Field("text", STRING), Field("list", LIST(PAIR)), Field("pair", PAIR), Field("d", DECIMAL(9, 2))]
)
KINDS = [
    PAIR,
    MUST,
    STRUCT([Field("pair", PAIR, nullable=True), Field("n", DOUBLE, nullable=True)]),
    STRUCT([Field("pair", STRUCT([Field("in", MUST, nullable=True)]))]),
    LIST(PAIR),
    LIST(LIST(MUST)),
    MAP(STRING, PAIR),
    STRUCT([Field("map", MAP(STRING, LIST(PAIR)), nullable=True), Field("b", BYTES)]),
]


def loose(kind: DataType) -> pa.DataType:
    """Returns the Arrow type in which data may come, where all parts may be null."""
    if kind.parts:
        return pa.struct([pa.field(part.name, loose(part.type)) for part in kind.parts])
    if kind.key is not None and kind.element is not None:
        return pa.map_(loose(kind.key), loose(kind.element))
    return arrow_type(kind) if kind.element is None else pa.list_(loose(kind.element))


def value_of(kind: DataType, random: Random) -> Any:
    """Returns a random value that is not null, with nulls inside wherever the type allows them."""

    def maybe(inner: DataType) -> Any:
        return None if random.random() < 0.4 else value_of(inner, random)

    if kind.parts:
        return {p.name: maybe(p.type) if p.nullable else value_of(p.type, random) for p in kind.parts}
    if kind.key is not None and kind.element is not None:
        return [(str(number), maybe(kind.element)) for number in range(random.randrange(3))]
    if kind.element is not None:
        return [maybe(kind.element) for _ in range(random.randrange(3))]
    return {STRING: "a", BYTES: b"b", DOUBLE: 0.5}.get(kind, 7)


def fitted(kind: DataType, column: pa.Array | pa.ChunkedArray) -> pa.ChunkedArray:
    schema = Schema([Field("k", LONG)], [], [Field("v", kind, nullable=True)])
    return conform(pa.table({"k": pa.array(range(len(column))), "v": column}), schema).column("v")


def written(column: pa.ChunkedArray) -> list[Any]:
    """Returns the values after a write and a read of Parquet."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"v": column}), sink)
    read: list[Any] = pq.read_table(pa.BufferReader(sink.getvalue())).column("v").to_pylist()
    return read


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_null_structs_are_kept_whatever_their_parts_are(kind: DataType, seed: int) -> None:
    random = Random(seed)
    values = [None if random.random() < 0.3 else value_of(kind, random) for _ in range(60)]
    # the parts of these nulls are null, too
    column = pa.concat_arrays([pa.array(values, loose(kind)), pa.nulls(20, loose(kind))])
    order = pa.array(random.choices(range(80), k=40))
    for given in (column, column.slice(7, 20), column.take(order), pa.chunked_array([column, column[3:9]])):
        found = fitted(kind, given)
        found.validate(full=True)
        assert found.type == arrow_type(kind)
        assert found.to_pylist() == given.to_pylist()
        assert written(found) == given.to_pylist()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_columns_of_nulls_and_absent_columns_have_null_structs(kind: DataType) -> None:
    schema = Schema([Field("k", LONG)], [], [Field("v", kind, nullable=True)])
    nothing = [pa.nulls(3), pa.nulls(3, arrow_type(kind)), pa.array([None] * 3, loose(kind))]
    for given in nothing:
        assert written(fitted(kind, given)) == [None] * 3
    absent = conform(pa.table({"k": [1, 2]}), schema)
    assert written(absent.column("v")) == [None, None]


def test_parts_below_null_structs_may_be_null() -> None:
    parts = [pa.array([1, None, None]), pa.array(["a", "b", None])]
    mask = pa.array([False, True, True])
    pairs = pa.StructArray.from_arrays(parts, ["must", "may"], mask=mask)
    assert written(fitted(PAIR, pairs)) == [{"must": 1, "may": "a"}, None, None]
    lists = pa.ListArray.from_arrays([0, 1, 3], pairs)
    assert written(fitted(LIST(PAIR), lists)) == [[{"must": 1, "may": "a"}], [None, None]]
    # the values before a slice do not count
    bad = pa.array([[{"must": None, "may": "x"}]], lists.type)
    assert written(fitted(LIST(PAIR), pa.concat_arrays([bad, lists]).slice(1))) == lists.to_pylist()


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (PAIR, {"must": None, "may": "a"}),
        (LIST(PAIR), [None, {"must": None, "may": "a"}]),
        (MAP(STRING, PAIR), [("a", None), ("b", {"must": None, "may": "a"})]),
        (STRUCT([Field("pair", PAIR, nullable=True)]), {"pair": {"must": None, "may": "a"}}),
    ],
    ids=str,
)
def test_a_null_part_is_refused_by_name(kind: DataType, value: Any) -> None:
    column = pa.array([None, value], loose(kind))
    with pytest.raises(
        InvalidData, match=r"column 'v' does not fit .*: its part 'must' is null, and must not"
    ):
        fitted(kind, column)


def test_a_dictionary_with_wrong_indices_is_refused() -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, 7]), pa.array(["a"]), safe=False)
    with pytest.raises(InvalidData, match="column 'v' does not fit string: Index 7 out of bounds"):
        fitted(STRING, column)
