"""The sorting of rows, whose order is that of Arrow for keys of any type."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dormouse.data.leaf_sorter import sort_indices

ROWS = 1_500
Values = Callable[[Random], object]
NUMBERS: dict[str, tuple[pa.DataType, Values]] = {
    "int": (pa.int32(), lambda r: r.choice([r.randrange(-(1 << 31), 1 << 31), -1, 0, (1 << 31) - 1])),
    "long": (pa.int64(), lambda r: r.choice([r.randrange(-(1 << 63), 1 << 63), -1, 0, (1 << 63) - 1])),
    "skewed": (pa.int64(), lambda r: r.choice([r.randrange(500), r.randrange(500), 1 << 62, -(1 << 62)])),
    "few": (pa.int64(), lambda r: r.randrange(3)),
    "one": (pa.int64(), lambda r: 7),
    "date": (pa.date32(), lambda r: r.randrange(-(10**5), 10**5)),
    "timestamp": (pa.timestamp("us", "UTC"), lambda r: r.randrange(-(10**15), 10**15)),
}
TEXTS: dict[str, tuple[pa.DataType, Values]] = {
    "words": (pa.string(), lambda r: r.choice(["", "a", "a\0", "b", "é", "\uffff", "\U00010000"])),
    "text": (pa.string(), lambda r: "a\0" * r.randrange(3) + "".join(r.choices("a\0é", k=r.randrange(9)))),
    "id": (pa.string(), lambda r: f"customer-{r.getrandbits(128):032x}"),
    "late": (pa.string(), lambda r: f"{'x' * 20}{r.random()}"),
    "bytes": (pa.binary(), lambda r: r.randbytes(r.randrange(12))),
    "empty": (pa.string(), lambda r: ""),
}  # fmt: skip
KINDS = NUMBERS | TEXTS


def rows_of(kinds: tuple[str, ...], seed: int) -> pa.Table:
    random = Random(seed)
    columns = [pa.array([KINDS[kind][1](random) for _ in range(ROWS)], KINDS[kind][0]) for kind in kinds]
    table = pa.table(columns, names=[f"c{number}" for number in range(len(kinds))])
    # slices in several chunks, like batches
    return pa.concat_tables([table.slice(700), table.slice(100, 600), table.slice(0, 100)])


@pytest.mark.parametrize(
    "kinds",
    [
        *((kind,) for kind in KINDS),
        *((first, "int", "words") for first in KINDS),
        *(("few", second, "long") for second in KINDS),
        ("one", "one"),
        ("words", "few", "date", "timestamp", "long"),
    ],
)
def test_keys_of_all_types_are_sorted_stably(kinds: tuple[str, ...]) -> None:
    rows = rows_of(kinds, 3)
    expected = pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in rows.column_names])
    found = sort_indices(rows, rows.column_names)
    assert (np.arange(ROWS) if found is None else found.to_numpy()).tolist() == expected.to_pylist()
    again = sort_indices(rows.take(expected), rows.column_names)
    assert again is None or again.to_pylist() == list(range(ROWS))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_equal_keys_are_sorted_descending_by_the_other_columns(kind: str) -> None:
    rows = rows_of(("few", kind, "few", "int"), 5).rename_columns(["a", "b", "c", "d"])
    keys = [("a", "ascending"), ("b", "ascending"), ("c", "descending"), ("d", "descending")]
    found = sort_indices(rows, ["a", "b"], ["c", "d"])
    assert found is not None
    assert found.to_pylist() == pc.sort_indices(rows, sort_keys=keys).to_pylist()


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("runs", [2, 40, 300])
def test_rows_of_sorted_runs_are_sorted_stably(kind: str, runs: int) -> None:
    rows = rows_of((kind,), 9).combine_chunks()
    pieces = [rows.slice(start, ROWS // runs).sort_by("c0") for start in range(0, ROWS, ROWS // runs)]
    joined = pa.concat_tables(pieces)
    found = sort_indices(joined, ["c0"])
    expected = pc.sort_indices(joined, sort_keys=[("c0", "ascending")])
    assert (np.arange(ROWS) if found is None else found.to_numpy()).tolist() == expected.to_pylist()


@pytest.mark.parametrize("kinds", [("long",), ("few", "date"), ("words", "few")])
def test_sorted_rows_are_not_sorted_again(kinds: tuple[str, ...]) -> None:
    rows = rows_of(kinds, 7)
    order = pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in rows.column_names])
    assert sort_indices(rows.take(order), rows.column_names) is None


@pytest.mark.parametrize("kinds", [("id",), ("long", "few")])
def test_sorted_rows_of_distinct_keys_need_no_other_columns(kinds: tuple[str, ...]) -> None:
    """Covers equal keys, of which the descending columns decide the order."""
    rows = rows_of((*kinds, "int"), 11)
    *keys, other = rows.column_names
    order = [(name, "ascending") for name in keys]
    rows = rows.take(pc.sort_indices(rows, sort_keys=order))
    assert (sort_indices(rows, keys, [other]) is None) == (kinds == ("id",))
