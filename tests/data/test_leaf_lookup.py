"""The leaves of rows: the vectorized look-up compared with a walk down the tree."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import leaf_of, tree_of

from dormouse.data.arrow_schema import arrow_type
from dormouse.data.leaf_sorter import LeafLookup
from dormouse.errors import InvalidRange
from tests.large_tree import balanced_arrays
from tests.support.model import (
    BYTES,
    INT,
    LONG,
    STRING,
    DataType,
    Field,
    Partition,
    PartitionTree,
    Region,
    Schema,
    Split,
    split_partition,
    tree_from_split_points,
)

_VALUES: dict[DataType, st.SearchStrategy[Any]] = {
    INT: st.integers(-(1 << 31), (1 << 31) - 1) | st.integers(-2, 2),
    LONG: st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-2, 2),
    STRING: st.text(st.sampled_from(["\x00", "a", "b", "ß", "\uffff", "\U0001f42d"]), max_size=3),
    BYTES: st.binary(max_size=3) | st.sampled_from([b"", b"\x00", b"\x7f", b"\x80", b"\xff", b"\xff\x00"]),
}


@st.composite
def _trees_and_rows(draw: st.DrawFn) -> tuple[PartitionTree, pa.RecordBatch]:
    types = draw(st.lists(st.sampled_from([INT, LONG, STRING, BYTES]), min_size=1, max_size=3))
    schema = Schema([Field(f"k{i}", t) for i, t in enumerate(types)])
    ids = itertools.count()
    leaves, nodes = [Partition("root", None, Region())], []
    for _ in range(draw(st.integers(0, 12))):
        field = draw(st.sampled_from(schema.row_keys))
        leaf = leaves.pop(draw(st.integers(0, len(leaves) - 1)))
        split = Split(field.name, draw(_VALUES[field.type]))
        try:
            parent, *children = split_partition(schema, leaf, split, f"p{next(ids)}", f"p{next(ids)}")
        except InvalidRange:
            leaves.append(leaf)
            continue
        nodes.append(parent)
        leaves += children
    rows = draw(st.integers(0, 20))
    columns = [
        pa.array(draw(st.lists(_VALUES[f.type], min_size=rows, max_size=rows)), arrow_type(f.type))
        for f in schema.row_keys
    ]
    return tree_of(schema, nodes + leaves), pa.RecordBatch.from_arrays(columns, list(schema.names))


@given(_trees_and_rows())
def test_every_row_gets_the_same_leaf_as_from_the_tree(case: tuple[PartitionTree, pa.RecordBatch]) -> None:
    tree, batch = case
    lookup = pickle.loads(pickle.dumps(LeafLookup(tree)))  # noqa: S301
    found = [str(lookup.leaf_ids[i]) for i in lookup.indexes(batch).to_pylist()]
    assert found == [leaf_of(tree, row).partition_id for row in batch.to_pylist()]


def _tree(points: list[Any], data_type: DataType = STRING) -> PartitionTree:
    schema = Schema([Field("key", data_type)])
    ids = itertools.count()
    return tree_of(schema, tree_from_split_points(schema, points, lambda: f"p{next(ids)}"))


@pytest.mark.parametrize(
    "form", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_other_arrow_types_of_a_key_give_the_same_leaves(form: pa.DataType) -> None:
    lookup = LeafLookup(_tree(["b", "d"]))
    column = pa.array(["a", "b", "c", "d", "z"]).cast(form)
    assert lookup.indexes(pa.table({"key": column})).to_pylist() == [0, 1, 1, 2, 2]


def test_repeated_and_distinct_keys_give_the_same_leaves() -> None:
    """The look-up ranks a repeated key once, and distinct keys row by row."""
    lookup = LeafLookup(_tree([f"k{i:05d}" for i in range(10, 5_000, 10)]))
    numbers = list(range(5_000))
    for repeat in (1, 7):
        rows = [n for n in numbers for _ in range(repeat)]
        batch = pa.table({"key": pa.array([f"k{n:05d}" for n in rows])})
        assert lookup.indexes(batch).to_pylist() == [n // 10 for n in rows]


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [13_200, pytest.param(132_000, marks=pytest.mark.slow)])
def test_a_large_tree_needs_little_memory(leaves: int) -> None:
    arrays = balanced_arrays(leaves)
    assert arrays.byte_size < 190 * leaves
    lookup = LeafLookup(PartitionTree(arrays, 0))
    batch = pa.record_batch({"key": pa.array([-5, 0, 1, leaves // 2, leaves - 1, 1 << 40])})
    assert len(lookup.leaf_ids) == leaves
    assert lookup.indexes(batch).to_pylist() == [0, 0, 1, leaves // 2, leaves - 1, leaves - 1]
    assert len(pickle.dumps(lookup)) < 76 * leaves


def test_a_tree_of_one_partition_receives_every_row() -> None:
    assert LeafLookup(_tree([])).indexes(pa.table({"key": ["x", "y"]})).to_pylist() == [0, 0]
