"""Page locations and dictionaries are read with the same result as by pyarrow and a general Thrift reader."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from dormouse.reading.page_index import (
    STRUCT,
    NotUnderstood,
    RowGroup,
    footer_bytes,
    listed,
    page_header,
    pages,
    row_groups,
    struct_of,
    zigzag,
)
from dormouse.reading.page_values import TEXTS_MAX, is_plain, plain_page, values_of_dictionary

ROWS = 5_000
KINDS = {
    "int32": pa.array(np.arange(ROWS, dtype=np.int32) % 9 - 4),
    "int64": pa.array(np.arange(ROWS) % 9 - (1 << 62)),
    "float": pa.array(np.array([0.5, -0.0, np.nan, np.inf], np.float32)[np.arange(ROWS) % 4]),
    "double": pa.array(np.array([0.5, -0.0, np.nan, -np.inf])[np.arange(ROWS) % 4]),
    "text": pa.array([["", "é", "a\0b", None, "x" * 300][n % 5] for n in range(ROWS)]),
    "bytes": pa.array([[b"", b"\xff\x00", None][n % 3] for n in range(ROWS)]),
}
OTHERS = {
    "date": KINDS["int32"].cast(pa.date32()),
    "time": KINDS["int64"].cast(pa.timestamp("us", "UTC")),
    "decimal": pa.array(np.arange(ROWS) % 9).cast(pa.decimal128(21, 2)),
    "many texts": pa.array([f"{n % (TEXTS_MAX + 1)}" for n in range(ROWS)]),
}


def written(columns: dict[str, pa.Array], **how: Any) -> tuple[bytes, RowGroup]:
    to = io.BytesIO()
    how = {"data_page_size": 1_000, "write_batch_size": 100, "write_page_index": True, **how}
    pq.write_table(pa.table(columns), to, **how)
    data = to.getvalue()
    end = len(data) - 8
    [group] = row_groups(data[end - footer_bytes(data[end:]) : end])
    return data, group


def dictionary_of(data: bytes, group: RowGroup, name: str) -> tuple[bytes, Any]:
    chunk = group.chunks[name]
    assert chunk.dictionary is not None
    at, size = chunk.dictionary
    return data[at : at + size], chunk


@pytest.mark.parametrize("compression", ["zstd", "snappy", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_dictionary_has_the_values_that_pyarrow_reads(kind: str, compression: str) -> None:
    data, group = written(KINDS, compression=compression)
    found = values_of_dictionary(*dictionary_of(data, group, kind))
    # compared as text, since NaN equals no NaN, and zeros have signs
    expected = KINDS[kind].dictionary_encode().dictionary
    assert found is not None
    assert (found.type, list(map(repr, found.to_pylist()))) == (
        expected.type,
        list(map(repr, expected.to_pylist())),
    )


@pytest.mark.parametrize("kind", OTHERS)
def test_dictionaries_of_other_types_are_left_to_pyarrow(kind: str) -> None:
    data, group = written(OTHERS)
    assert values_of_dictionary(*dictionary_of(data, group, kind)) is None


@pytest.mark.parametrize("kind", ["int64", "text"])
def test_a_damaged_dictionary_is_refused(kind: str) -> None:
    data, group = written(KINDS, compression="none")
    page, chunk = dictionary_of(data, group, kind)
    for cut in range(1, len(page)):
        with pytest.raises((NotUnderstood, LookupError)):
            values_of_dictionary(page[:-cut], chunk)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["zstd", "snappy", "none"])
def test_plain_numbers_are_those_that_pyarrow_reads(compression: str, version: str) -> None:
    nulls = pa.array([n % 3 == 1 for n in range(ROWS)])
    columns = {name: KINDS[name] for name in ("int32", "int64", "float", "double")}
    columns |= {f"{name}?": pc.if_else(nulls, None, column) for name, column in columns.items()}
    columns["text"] = KINDS["text"]
    data, group = written(
        columns,
        compression=compression,
        data_page_version=version,
        use_dictionary=False,
        data_page_size=1 << 30,
    )
    for name, column in columns.items():
        chunk = group.chunks[name]
        start, length = chunk.offset_index
        located = pages(data[start : start + length], ROWS)
        page = data[located.offsets[0] :][: located.sizes[0]]
        assert is_plain(page, chunk, ROWS) == (name != "text")
        found = plain_page(page, chunk, ROWS)
        if found is None:
            assert name == "text"
            continue
        for row in [0, 1, 2, 3, 777, 778, 779, ROWS - 1]:
            value = found.value(row)
            assert value.type == column.type
            assert repr(value.to_pylist()) == repr([column[row].as_py()])
        with pytest.raises(NotUnderstood):
            plain_page(page, chunk, ROWS - 1)


def test_page_locations_equal_those_of_a_general_thrift_reader() -> None:
    data, group = written(KINDS | OTHERS)
    counts = set()
    for chunk in group.chunks.values():
        at, size = chunk.offset_index
        index = data[at : at + size]
        found, expected = pages(index, ROWS), struct_of(index)[1]
        places = zip(found.offsets, found.sizes, found.first_rows, strict=False)
        assert list(places) == [(one[1], one[2], one[3]) for one in expected]
        assert found.first_rows[-1] == ROWS
        counts.add(len(expected))
    assert len(counts) > 3


def test_page_locations_may_be_any_numbers() -> None:
    some = random.Random(31)
    for count in (0, 1, 14, 15, 200):
        numbers = [tuple(some.getrandbits(some.randrange(1, 62)) for _ in range(3)) for _ in range(count)]
        heads = (b"\x16", b"\x15", b"\x16")
        parts = [
            b"".join(head + zigzag(one) for head, one in zip(heads, place, strict=True)) + b"\0"
            for place in numbers
        ]
        index = b"".join([b"\x19", listed(count, STRUCT), *parts, b"\0"])
        found = pages(index, 7)
        assert [*zip(found.offsets, found.sizes, found.first_rows, strict=False)] == numbers
        for cut in range(2, len(index) if count else 0):
            with pytest.raises((NotUnderstood, LookupError)):
                pages(index[: len(index) - cut], 7)


def test_usual_page_headers_are_read_as_by_the_general_reader() -> None:
    for number in (0, 1, 63, 64, 127, 8_191, 8_192, 1 << 20, 1 << 40):
        one = b"\x15" + zigzag(number)
        for levels in (3, 4):  # only RLE is usual
            last = b"".join(b"\x15" + zigzag(n) for n in (8, levels, 3))
            header = b"\x15\x00" + one + one + b"\x2c" + one + last + b"\x00\x00"
            assert page_header(header + b"\x15values") == (struct_of(header), len(header))
