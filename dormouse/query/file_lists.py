"""One scan of many Parquet files: DataFusion's Python API has it for whole folders and for single files only.

A union of single scans costs DataFusion some milliseconds and 100 kB a file, and reads all of them at once; a
scan of a list reads its files one after the other, a few at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from datafusion import DataFrame, SessionContext
from datafusion.expr import SortExpr
from datafusion.plan import LogicalPlan

_LISTING_SCAN = 0x0A
"""Field 1 of `LogicalPlanNode`, a message."""
_PATH = 0x12
"""Field 2 of `ListingTableScanNode`, a repeated string."""


def scan_of(
    ctx: SessionContext, urls: Sequence[str], schema: pa.Schema, order: Sequence[SortExpr] | None = None
) -> DataFrame:
    """The rows of Parquet files of one schema, given by URL, at least one; in no order.

    Each file is sorted by `order`, if that is given. In a session of at least as many partitions as there are
    files, each is then a sorted stream of its own.

    It is the scan of the first file, as DataFusion serializes it, with the other paths appended: protocol
    buffers take the items of a repeated field wherever they stand in the message. Sources:
    https://github.com/apache/datafusion/blob/main/datafusion/proto/proto/datafusion.proto and
    https://protobuf.dev/programming-guides/encoding/
    """
    sorted_by = None if order is None else [list(order)]
    first = ctx.read_parquet(urls[0], file_extension="", schema=schema, file_sort_order=sorted_by)
    if len(urls) == 1:
        return first
    written = first.logical_plan().to_bytes(ctx)
    length, start = _unvarint(written, 1)
    if written[0] != _LISTING_SCAN or start + length != len(written):
        raise RuntimeError("this DataFusion serializes the scan of a file in another way")
    node = written[start:] + b"".join(_string(_PATH, url) for url in urls[1:])
    plan = LogicalPlan.from_bytes(ctx, bytes([_LISTING_SCAN]) + _varint(len(node)) + node)
    return ctx.create_dataframe_from_logical_plan(plan)


def _string(tag: int, text: str) -> bytes:
    encoded = text.encode()
    return bytes([tag]) + _varint(len(encoded)) + encoded


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the highest bit says that more follow."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _unvarint(data: bytes, start: int) -> tuple[int, int]:
    """The number at a position, and the position after it."""
    number = shift = 0
    for position in range(start, len(data)):
        number |= (data[position] & 0x7F) << shift
        shift += 7
        if data[position] < 0x80:
            return number, position + 1
    raise ValueError("the number does not end")
