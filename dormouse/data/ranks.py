"""Where values stand among sorted points: how many points are at or below each value, vectorised."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dormouse.model.keys import KeyValue

Ints = npt.NDArray[np.int32]
_SAMPLE_ROWS = 4_096


def rank(column: pa.Array | pa.ChunkedArray, points: Sequence[KeyValue]) -> Ints:
    """For each value, how many of the ascending `points` are at or below it.

    Integers, times and dates compare as numbers, strings and bytes by unsigned bytes (which for UTF-8 is code
    point order).
    """
    if isinstance(column, pa.ChunkedArray):
        ranks = [rank(chunk, points) for chunk in column.chunks]
        return np.concatenate(ranks) if ranks else np.empty(0, dtype=np.int32)
    if pa.types.is_primitive(column.type):
        # times and dates as the numbers that they are
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
    """Whether ranking each distinct value once saves more than finding the distinct ones costs."""
    sample = column.slice(0, _SAMPLE_ROWS)
    return bool(pc.count_distinct(sample).as_py() * 2 < len(sample))


def _search(values: pa.Array, points: pa.Array) -> Ints:
    """Binary search for all values at once."""
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
