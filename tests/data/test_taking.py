"""Rows that are put in order, which have the values that Arrow takes, and columns joined from pieces."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dormouse.data.taking import RowsInOrder, at, joined

ROWS = 500
TEXTS: dict[str, Callable[[Random], str]] = {
    "short": lambda r: r.choice(["", "a", "é", "a\0", "twelve bytes"]),
    "long": lambda r: "x" * r.choice([0, 11, 12, 13, 400]),
    "of one size": lambda r: f"{r.getrandbits(64):016x}",
    "of one short size": lambda r: r.choice("abc"),
    "empty": lambda r: "",
}
COLUMNS: dict[str, tuple[pa.DataType, Callable[[Random], Any]]] = {
    "long integers": (pa.int64(), lambda r: r.randrange(-(1 << 63), 1 << 63)),
    "dates": (pa.date32(), lambda r: r.randrange(10_000)),
    "doubles": (pa.float64(), lambda r: r.choice([0.0, -0.0, float("inf"), 1.5])),
    "booleans": (pa.bool_(), lambda r: r.random() < 0.5),
    "decimals": (pa.decimal128(9, 2), lambda r: r.randrange(1000)),
    "lists": (pa.list_(pa.string()), lambda r: ["a"] * r.randrange(3)),
    "structs": (pa.struct([("a", pa.string())]), lambda r: {"a": r.choice(["a", None])}),
} | {f"texts: {name}": (pa.string(), value) for name, value in TEXTS.items()}
COLUMNS |= {f"bytes: {name}": (pa.binary(), value) for name, value in TEXTS.items()}


def table_of(nulls: float) -> pa.Table:
    random = Random(7)
    columns = [
        pa.array([None if random.random() < nulls else value(random) for _ in range(ROWS)], kind)
        for kind, value in COLUMNS.values()
    ]
    return pa.table(columns, names=list(COLUMNS))


@pytest.mark.parametrize("view_bytes_max", [0, 16 * ROWS, 1 << 20])
@pytest.mark.parametrize("nulls", [0.0, 0.1, 1.0])
def test_rows_are_put_in_order_as_arrow_takes_them(nulls: float, view_bytes_max: int) -> None:
    whole = table_of(nulls)
    taken = whole.take(pa.array(np.arange(ROWS)[::-1]))  # these columns have validity buffers without nulls
    pieces = pa.concat_tables([whole.slice(200, 100), whole.slice(300, 50), taken.slice(3, 70)])
    for rows in (whole, taken, whole.slice(13, 300), pieces):
        order = pa.array(np.random.default_rng(1).permutation(len(rows)))
        ordered = RowsInOrder(rows, order, view_bytes_max)
        found = [ordered.piece(start, 64) for start in range(0, len(rows), 64)]
        for batch in found:
            batch.validate(full=True)
        assert pa.Table.from_batches(found).equals(rows.take(order))


def test_texts_without_nulls_have_no_validity_buffer() -> None:
    rows = table_of(0).select([name for name in COLUMNS if "texts" in name])
    order = pa.array(np.arange(ROWS)[::-1])
    piece = RowsInOrder(rows.take(order), order, 1 << 20).piece(0, ROWS)
    assert [column.buffers()[0] for column in piece.columns] == [None] * len(piece.columns)


@pytest.mark.parametrize("nulls", [0.0, 0.1])
@pytest.mark.parametrize("name", COLUMNS)
def test_pieces_are_joined(name: str, nulls: float) -> None:
    column = table_of(nulls).column(name).chunk(0)
    other = pa.array(column.to_pylist(), column.type)
    for pieces in (
        [column.slice(5, 8), column.slice(13, 100), column.slice(113, 0), column.slice(113)],
        [column.slice(5, 8), column.slice(14, 100)],
        [column.slice(14, 100), column.slice(5, 9)],
        [column.slice(0, 100), other.slice(100)],
        [column.slice(0, 0)],
    ):
        assert joined(pieces).equals(pa.concat_arrays(pieces))
        joined(pieces).validate(full=True)


def test_consecutive_slices_are_joined_without_a_copy() -> None:
    for name in ("long integers", "texts: long", "booleans"):
        column = table_of(0.1).column(name).chunk(0)
        pieces = [column.slice(start, 64) for start in range(9, ROWS, 64)]
        whole = joined(pieces)
        assert [buffer.address for buffer in whole.buffers()] == [
            buffer.address for buffer in column.buffers()
        ]


def test_numbers_are_taken_at_places() -> None:
    for kind in (np.uint16, np.uint32, np.int64, np.uint64):
        values = np.arange(100, dtype=kind)
        places = np.random.default_rng(1).permutation(100)
        assert at(values, places).tolist() == values[places].tolist()
        assert at(values, places).dtype == kind
