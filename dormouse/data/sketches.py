"""Quantile sketches of a file's row keys (Apache DataSketches, KLL), stored beside the file.

The sample is drawn in two steps, each of which divides its input into blocks of equal size (a power of two)
and draws one item at random from each block:

- 65,536 rows at most are drawn from the file's rows,
- 4,096 values at most are drawn from the sorted values of each key. They go into the sketch, and each stands
  for `stride` rows.

The draws are seeded by the number of items drawn from, so a file always has the same sample. The second step
adds a rank error below 1 / 2,048. So do both steps together for the first row key, by which the file is
sorted. For other keys, the first step is a random sample of at least 32,768 rows (0.3 % standard error). The
sketch adds about 0.5 %.

Source of the sketch: https://arxiv.org/abs/1603.05346
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasketches import PyObjectSerDe, kll_items_sketch

from dormouse.data.arrow_schema import written_schema
from dormouse.data.object_access import parquet_object
from dormouse.errors import InvalidData
from dormouse.model.file_reference import is_inlined
from dormouse.model.region import KeyValue, Range, Region, decode_value, encode_value
from dormouse.model.schema import Field, Schema
from dormouse.model.types import DATE, INT, LONG, TIMESTAMP, DataType
from dormouse.objects.names import SKETCHES_SUFFIX
from dormouse.objects.store import ObjectStore

# The ranks of values among sorted points: the number of points at or below each value, vectorised.

Ints = npt.NDArray[np.int32]
_SAMPLE_ROWS = 4_096


def rank(column: pa.Array | pa.ChunkedArray, points: Sequence[KeyValue]) -> Ints:
    """Returns, for each value, how many of the ascending `points` are at or below it.

    Integers, times and dates compare as numbers, strings and bytes by unsigned bytes (for UTF-8 this is the
    order of code points).
    """
    if isinstance(column, pa.ChunkedArray):
        ranks = [rank(chunk, points) for chunk in column.chunks]
        return np.concatenate(ranks) if ranks else np.empty(0, dtype=np.int32)
    if pa.types.is_primitive(column.type):
        # times and dates compare as the integers that they are stored as
        number = pa.int32() if column.type.bit_width == 32 else pa.int64()
        values = column.view(number).to_numpy(zero_copy_only=False)
        known = pa.array(points, column.type).view(number).to_numpy(zero_copy_only=False)
        numbers: Ints = np.searchsorted(known, values, side="right").astype(np.int32)
        return numbers
    return _rank_bytes(column, points)


def _rank_bytes(column: pa.Array, points: Sequence[KeyValue]) -> Ints:
    sorted_points = pa.array([p.encode() if isinstance(p, str) else p for p in points], pa.large_binary())
    if not pa.types.is_dictionary(column.type):
        column = column.cast(pa.large_binary())
        if not repeats(column):
            return _search(column, sorted_points)
        column = column.dictionary_encode()
    ranks = _search(column.dictionary.cast(pa.large_binary()), sorted_points)
    found: Ints = ranks[column.indices.to_numpy(zero_copy_only=False)]
    return found


def repeats(column: pa.Array) -> bool:
    """Returns whether values repeat so often that ranking only the distinct ones is faster."""
    sample = column.slice(0, _SAMPLE_ROWS)
    return bool(pc.count_distinct(sample).as_py() * 2 < len(sample))


def _search(values: pa.Array, points: pa.Array) -> Ints:
    """Returns the rank of each value among `points`, by a binary search for all values at once."""
    low = np.zeros(len(values), dtype=np.int32)
    high = np.full(len(values), len(points), dtype=np.int32)
    for _ in range(len(points).bit_length()):
        middle = (low + high) >> 1
        open_ = low < high
        pivots = points.take(pa.array(np.minimum(middle, len(points) - 1)))
        reached = pc.greater_equal(values, pivots).to_numpy(zero_copy_only=False)
        low = np.where(open_ & reached, middle + 1, low)
        high = np.where(open_ & ~reached, middle, high)
    return low


# Quantiles of a row key within a range, and the value that divides a partition best.


class KeyQuantiles:
    """The approximate distribution of one row key over some files.

    `items` are encoded values with the number of rows that each stands for. `ends` has the exact smallest and
    largest value of each file, encoded.
    """

    def __init__(
        self, type_: DataType, items: Iterable[tuple[bytes, int]], ends: Iterable[tuple[bytes, bytes]]
    ) -> None:
        ordered = sorted(items)
        self._type = type_
        self._keys = [key for key, _ in ordered]
        # reach[i]: the rows of all items before i
        self._reach = [0, *accumulate(weight for _, weight in ordered)]
        lows, highs = zip(*ends, strict=True) if (ends := list(ends)) else ((), ())
        self._ends = [min(lows), max(highs)] if lows else []

    def row_count(self, within: Range) -> int:
        """Returns approximately the number of rows whose key lies within the range."""
        start, end = self._span(within)
        return self._reach[end] - self._reach[start]

    def rank(self, value: KeyValue, within: Range) -> float:
        """Returns approximately the fraction of the rows within the range whose key is below the value."""
        start, end = self._span(within)
        at = min(max(bisect_left(self._keys, encode_value(self._type, value)), start), end)
        return (self._reach[at] - self._reach[start]) / max(1, self._reach[end] - self._reach[start])

    def split_point(self, within: Range) -> KeyValue | None:
        """Returns the value that divides the rows within the range most evenly: below it, and from it on.

        It is near the median. A value that many rows share goes to the smaller side. Returns None when no
        rows lie within the range, or all have the same value.
        """
        start, end = self._span(within)
        ends = [key for key in self._ends if within.contains(decode_value(self._type, key))]
        known = self._keys[start:end] + ends
        lowest = min(known, default=b"")
        above = [key for key in self._near_median(start, end, known) if key > lowest]
        if not above:
            return None
        half = (self._reach[start] + self._reach[end]) / 2
        best = min(above, key=lambda key: abs(self._reach[bisect_left(self._keys, key)] - half))
        return decode_value(self._type, best)

    def _near_median(self, start: int, end: int, known: list[bytes]) -> list[bytes]:
        """Returns the sampled median between two positions, and the next greater value if there is one.

        Returns `known` if there are no sampled values between the positions.
        """
        if start == end:
            return known
        median = self._keys[self._at(0.5, start, end)]
        following = [key for key in known if key > median]
        return [median, min(following)] if following else [median]

    def _at(self, fraction: float, start: int, end: int) -> int:
        target = self._reach[start] + fraction * (self._reach[end] - self._reach[start])
        return min(max(bisect_right(self._reach, target, start, end + 1) - 1, start), end - 1)

    def _span(self, within: Range) -> tuple[int, int]:
        """Returns the positions of the sampled keys within a range: the first, and the one after the last."""
        start, end = 0, len(self._keys)
        if within.min is not None:
            low = encode_value(self._type, within.min)
            start = (bisect_left if within.min_inclusive else bisect_right)(self._keys, low)
        if within.max is not None:
            high = encode_value(self._type, within.max)
            end = (bisect_right if within.max_inclusive else bisect_left)(self._keys, high)
        return start, max(start, end)


SAMPLE_ROWS_MAX = 1 << 16
SKETCHED_MAX = 1 << 12
SKETCH_K = 512
_MAGIC = b"DMSK\x01"
_COUNT_BYTES = 4
_SIGN_BITS: dict[DataType, Any] = {INT: np.uint32(1 << 31), LONG: np.uint64(1 << 63)}
_SIGN_BITS |= {DATE: _SIGN_BITS[INT], TIMESTAMP: _SIGN_BITS[LONG]}


@dataclass(frozen=True, slots=True)
class KeySketch:
    """A sketch of one row key's sample in one file, and the key's smallest and largest value (encoded)."""

    min: bytes
    max: bytes
    sketch: Any


@dataclass(frozen=True, slots=True)
class FileSketches:
    """The sketches of one file, by row key."""

    row_count: int
    stride: int
    keys: dict[str, KeySketch]

    @staticmethod
    def from_sorted(
        schema: Schema, batches: Iterable[pa.RecordBatch | pa.Table], row_count: int
    ) -> FileSketches:
        """Returns the sketches of `row_count` rows that come in key order; reads only the row keys."""
        sampler = KeySampler(schema, row_count)
        for batch in batches:
            sampler.add(batch)
        return sampler.sketches()

    def renamed(self, schema: Schema) -> FileSketches:
        """Returns the sketches under the names that the row keys have in `schema`, another version."""
        return replace(self, keys=dict(zip(schema.row_key_names, self.keys.values(), strict=False)))

    def to_bytes(self) -> bytes:
        """Encodes the sketches: magic, header length, header (JSON), a sketch for each key, checksum."""
        bodies = [key.sketch.serialize(_BytesSerDe()) for key in self.keys.values()]
        fields = [
            {"name": name, "min": key.min.hex(), "max": key.max.hex(), "bytes": len(body)}
            for (name, key), body in zip(self.keys.items(), bodies, strict=True)
        ]
        header = json.dumps({"rows": self.row_count, "stride": self.stride, "keys": fields}).encode()
        content = b"".join([_MAGIC, len(header).to_bytes(_COUNT_BYTES, "little"), header, *bodies])
        return content + zlib.crc32(content).to_bytes(_COUNT_BYTES, "little")

    @staticmethod
    def from_bytes(data: bytes, name: str = "sketches") -> FileSketches:
        """Decodes the result of `to_bytes`; raises `InvalidData`, which contains `name`, for corrupt data."""
        content, checksum = data[:-_COUNT_BYTES], data[-_COUNT_BYTES:]
        if not content.startswith(_MAGIC) or zlib.crc32(content).to_bytes(_COUNT_BYTES, "little") != checksum:
            raise InvalidData(f"{name!r} is not a file of sketches, or is corrupt")
        try:
            return _parse(content)
        except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
            raise InvalidData(f"{name!r} is not a file of sketches: {error}") from None


def merge(field: Field, files: Sequence[FileSketches]) -> KeyQuantiles:
    """Returns the distribution of a row key over several files, each weighted by its rows.

    The items that the files' sketches retain are pooled with their weights, so no further error is added: a
    rank is as exact as those of the files, even if their sizes differ. Memory: about 1,500 keys a file.
    """
    keys = [(file.keys[field.name], file.stride) for file in files]
    items = ((item, weight * stride) for key, stride in keys for item, weight in key.sketch)
    return KeyQuantiles(field.type, items, [(key.min, key.max) for key, _ in keys])


class KeySampler:
    """A sampler of a sorted file's rows as they stream by, which also checks their order."""

    def __init__(self, schema: Schema, row_count: int) -> None:
        self._fields = schema.row_keys
        self.row_count = row_count
        self._rows = _drawn(row_count, _stride(row_count, SAMPLE_ROWS_MAX))
        self._seen = 0
        self._keys = {field.name: _KeyColumn(field) for field in self._fields}
        self.first: tuple[Any, ...] | None = None
        self.last: tuple[Any, ...] | None = None

    def add(self, batch: pa.RecordBatch | pa.Table) -> None:
        if batch.num_rows == 0:
            return
        start, end = np.searchsorted(self._rows, (self._seen, self._seen + batch.num_rows))
        positions = pa.array(self._rows[start:end] - self._seen)
        for number, (name, key) in enumerate(self._keys.items()):
            key.add(batch.column(name), positions, sorted_=number == 0)
        columns = [batch.column(name) for name in self._keys]
        if self.first is None:
            self.first = tuple(column[0].as_py() for column in columns)
        self.last = tuple(column[-1].as_py() for column in columns)
        self._seen += batch.num_rows

    def sketches(self) -> FileSketches:
        """Returns the sketches of all rows; raises `InvalidData` for missing rows or an unsorted sample."""
        if self._seen != self.row_count or not self.row_count:
            raise InvalidData(f"{self._seen} rows were read where {self.row_count} were expected")
        if not self._keys[self._fields[0].name].ascends():
            raise InvalidData(f"rows are not in the order of {self._fields[0].name!r}")
        stride = _stride(self.row_count, SKETCHED_MAX)
        drawn = _drawn(len(self._rows), stride // _stride(self.row_count, SAMPLE_ROWS_MAX))
        return FileSketches(
            self.row_count, stride, {name: key.sketch(drawn) for name, key in self._keys.items()}
        )


class _KeyColumn:
    """The sample of one row key, and the key's exact smallest and largest value."""

    def __init__(self, field: Field) -> None:
        self.type = field.type
        self.values: list[pa.Array | pa.ChunkedArray] = []
        self.bounds: list[Any] = []

    def add(self, column: Any, positions: pa.Array, *, sorted_: bool) -> None:
        if len(positions):
            self.values.append(_comparable(self.type, column.take(positions)))
        ends = (column[0].as_py(), column[-1].as_py()) if sorted_ else pc.min_max(column).as_py().values()
        self.bounds += [encode_value(self.type, value) for value in ends]

    def ascends(self) -> bool:
        values = self._sample()
        return all(a <= b for a, b in zip(self.bounds, self.bounds[1:], strict=False)) and bool(
            pc.all(pc.less_equal(values[:-1], values[1:]), min_count=0).as_py()
        )

    def sketch(self, drawn: np.ndarray[Any, Any]) -> KeySketch:
        """Returns a sketch of the sample's values at the positions `drawn` in their sorted order."""
        sketch = kll_items_sketch(SKETCH_K)
        for item in _encoded(self.type, _sorted(self._sample()).take(pa.array(drawn))):
            sketch.update(item)
        return KeySketch(min(self.bounds), max(self.bounds), sketch)

    def _sample(self) -> pa.Array:
        return pa.chunked_array(self.values).combine_chunks()


def _comparable(data_type: DataType, column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Returns values in a type that Arrow compares in the order of keys."""
    if data_type in (INT, LONG):
        return column
    if data_type in _SIGN_BITS:
        return column.cast(pa.int32() if data_type == DATE else pa.int64())
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column.cast(pa.binary())


def _sorted(values: pa.Array) -> pa.Array:
    if pa.types.is_integer(values.type):
        return pa.array(np.sort(values.to_numpy()))
    return values.take(pc.sort_indices(values))


def _encoded(data_type: DataType, values: pa.Array) -> list[bytes]:
    """Returns `encode_value` of each comparable value, without a Python loop."""
    if data_type not in _SIGN_BITS:
        same: list[bytes] = values.to_pylist()
        return same
    sign = _SIGN_BITS[data_type]
    numbers = values.to_numpy().view(sign.dtype) ^ sign
    size = sign.dtype.itemsize
    encoded: list[bytes] = numbers.astype(f">u{size}").view(f"V{size}").tolist()
    return encoded


def _stride(count: int, drawn_max: int) -> int:
    """Returns the smallest power of two that is large enough as a block size.

    One item is drawn from each block, and at most `drawn_max` of `count` items may be drawn.
    """
    return 1 << max(0, (count - 1) // drawn_max).bit_length()


def _drawn(count: int, stride: int) -> np.ndarray[Any, Any]:
    """Returns the positions of the drawn items: one at random in each block of `stride` items.

    The item of a last, shorter block is drawn with a probability in proportion to the block's length.
    """
    starts = np.arange(0, count, stride, dtype=np.int64)
    if stride > 1:
        starts += np.random.default_rng(count).integers(0, stride, len(starts))
    return starts[starts < count]


def _parse(content: bytes) -> FileSketches:
    position = len(_MAGIC) + _COUNT_BYTES
    size = int.from_bytes(content[len(_MAGIC) : position], "little")
    header = json.loads(content[position : position + size])
    rest = BytesIO(content[position + size :])
    keys = {
        field["name"]: KeySketch(
            bytes.fromhex(field["min"]),
            bytes.fromhex(field["max"]),
            kll_items_sketch.deserialize(rest.read(field["bytes"]), _BytesSerDe()),
        )
        for field in header["keys"]
    }
    return FileSketches(int(header["rows"]), int(header["stride"]), keys)


class _BytesSerDe(PyObjectSerDe):  # type: ignore[misc]
    """A serializer of items as their length and their bytes."""

    def get_size(self, item: bytes) -> int:
        return _COUNT_BYTES + len(item)

    def to_bytes(self, item: bytes) -> bytes:
        return len(item).to_bytes(_COUNT_BYTES, "little") + item

    def from_bytes(self, data: bytes, offset: int) -> tuple[bytes, int]:
        start = offset + _COUNT_BYTES
        size = int.from_bytes(data[offset:start], "little")
        return data[start : start + size], _COUNT_BYTES + size


# Sketches of a file's rows within a region, made from its row keys.

_READ_ROWS = 65_536


def load_sketches(store: ObjectStore, filename: str, schema: Schema) -> FileSketches:
    """Returns the sketches stored beside a file; raises `ObjectNotFound`, or `InvalidData` if corrupt.

    Inlined files have none: these sketches are made from their rows.

    The row keys have the schema's names, which may differ from those when the file was written.
    """
    if is_inlined(filename) and (found := read_sketches(store, filename, schema, Region())) is not None:
        return found
    name = filename + SKETCHES_SUFFIX
    return FileSketches.from_bytes(store.get(name), name).renamed(schema)


def read_sketches(store: ObjectStore, filename: str, schema: Schema, region: Region) -> FileSketches | None:
    """Returns sketches of the rows that lie in the region, computed from the file; None without such rows.

    It reads the matching row groups twice: to count the rows, and to sketch them. Raises `ObjectNotFound`, or
    `InvalidData` when the file cannot be read.
    """
    written = written_schema(schema, filename)
    called = dict(zip(schema.row_key_names, written.row_key_names, strict=True))
    there = Region({called[name]: item for name, item in region.items()})
    with parquet_object(store, filename) as file:
        inside = partial(_inside, file, written, there)
        rows = sum(batch.num_rows for batch in inside())
        return FileSketches.from_sorted(written, inside(), rows).renamed(schema) if rows else None


def _inside(file: pq.ParquetFile, schema: Schema, region: Region) -> Iterator[pa.RecordBatch]:
    groups = [
        group for group in range(file.num_row_groups) if _may_have(file.metadata.row_group(group), region)
    ]
    columns = list(schema.row_key_names)
    for batch in file.iter_batches(_READ_ROWS, row_groups=groups, columns=columns) if groups else ():
        mask = np.ones(batch.num_rows, dtype=bool)
        for name, item in region.items():
            mask &= _within(batch.column(name), item)
        yield batch.filter(pa.array(mask))


def _within(column: Any, item: Range) -> npt.NDArray[np.bool_]:
    """Returns a flag for each value: true from the range's minimum on, and below its maximum."""
    points = [end for end in (item.min, item.max) if end is not None]
    if not points:
        return np.ones(len(column), dtype=bool)
    inside: npt.NDArray[np.bool_] = rank(column, points) == (item.min is not None)
    return inside


def _may_have(group: pq.RowGroupMetaData, region: Region) -> bool:
    """Returns whether a row group's statistics allow rows in the region."""
    for position in range(group.num_columns):
        column = group.column(position)
        item, known = region.get(column.path_in_schema), column.statistics
        if item is None or known is None or not known.has_min_max:
            continue
        if (item.min is not None and known.max < item.min) or (
            item.max is not None and known.min >= item.max
        ):
            return False
    return True
