"""The digest of a load's data. It depends on the values, not on their buffers or batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dormouse.sources.source import PIECE_BYTES, PIECES_MAX, STREAM, GivenData

NESTED: dict[str, Any] = {
    "text": ["a", None, "", "öß"],
    "number": [1, None, -1, 2**60],
    "flag": [True, None, False, True],
    "list": [[1, None], None, [], [3]],
    "part": [{"a": 1, "b": "x"}, None, {"a": None, "b": ""}, {"a": 2, "b": None}],
}


def _nested() -> pa.Table:
    table = pa.table(NESTED)
    pairs = pa.array([[("k", 1)], None, [], [("l", None)]], pa.map_(pa.string(), pa.int64()))
    return table.append_column("map", pairs).append_column("words", table["text"].dictionary_encode())


def test_equal_values_have_the_same_digest_in_any_layout() -> None:
    """The layouts differ in chunks, offsets and the order of columns."""
    table = _nested()
    digest = GivenData(table).digest()
    padded = pa.concat_tables([table.slice(3), table, table.slice(0, 1)]).combine_chunks().slice(1, 4)
    cut = pa.concat_tables([table.slice(0, 1), table.slice(1, 2), table.slice(3)])
    for same in (padded, cut, table.select(table.column_names[::-1]), pa.table(padded)):
        assert same.sort_by("number").num_rows == 4
        assert GivenData(same).digest() == digest
    assert GivenData(table.to_batches()[0]).digest() == digest
    # duplicate names are refused by another check
    assert GivenData(pa.table([[1], [2]], names=["n", "n"])).digest() is not None


@pytest.mark.parametrize("name", [*NESTED, "map", "words"])
def test_another_value_or_null_has_another_digest(name: str) -> None:
    table = _nested()
    number = table.column_names.index(name)
    moved = pa.concat_tables([table.slice(1), table.slice(0, 1)])[name]
    assert GivenData(table.set_column(number, name, moved)).digest() != GivenData(table).digest()


def test_the_buffer_value_behind_a_null_makes_no_difference() -> None:
    def with_null(behind: int) -> pa.Table:
        values = pa.array([1, behind], pa.int64()).buffers()[1]
        return pa.table({"n": pa.Array.from_buffers(pa.int64(), 2, [pa.py_buffer(b"\x01"), values])})

    assert with_null(7)["n"].to_pylist() == [1, None]
    assert GivenData(with_null(7)).digest() == GivenData(with_null(8)).digest()


def test_the_digest_depends_on_rows_types_and_names(tmp_path: Path) -> None:
    digests = [
        GivenData(pa.table({"n": pa.array([], pa.int64())})).digest(),
        GivenData({"n": [1]}).digest(),
        GivenData([{"n": 1}]).digest(),
        GivenData({"n": [1.0]}).digest(),
        GivenData({"m": [1]}).digest(),
        GivenData({"n": [1]}, "gone").digest(),
    ]
    assert digests[1] == digests[2]
    assert len(set(digests)) == 5
    assert None not in digests


def test_a_stream_has_a_constant_digest_and_is_not_read() -> None:
    given = GivenData(pa.table({"n": [1, 2]}).to_reader())
    assert given.digest() == STREAM
    assert given.data.read_all().num_rows == 2


def test_the_digest_of_a_large_file_is_that_of_some_pieces(tmp_path: Path) -> None:
    """The digest includes the size, the beginning and the end of the file, and some pieces between."""
    path = tmp_path / "large.csv"
    size = PIECE_BYTES * PIECES_MAX + 1
    path.write_bytes(bytes(size))
    digest = GivenData(path).digest()
    for offset in (0, size // 2 - PIECE_BYTES, size - 1):
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(b"x")
        assert GivenData(path).digest() != digest
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(b"\0")
    assert GivenData(path).digest() == digest
    path.write_bytes(bytes(size + 1))
    assert GivenData(path).digest() != digest
    assert GivenData(tmp_path / "missing.csv").digest() is None
