"""The rows by which two arrays of equal length and type differ, nested types included."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Flags = npt.NDArray[np.bool_]


def differ(wanted: pa.Array, there: pa.Array) -> Flags:
    """Returns for each row whether its two values differ.

    Two nulls are equal, and so are two NaNs; 0.0 and -0.0 differ, as a copy of the values would.
    """
    kind = wanted.type
    one_is_null = _flags(pc.xor(pc.is_null(wanted), pc.is_null(there)))
    both = _flags(pc.and_(pc.is_valid(wanted), pc.is_valid(there)))
    if pa.types.is_null(kind):
        return one_is_null
    if pa.types.is_struct(kind):
        # flatten() gives a field of a null struct as null
        pairs = zip(wanted.flatten(), there.flatten(), strict=True)
        parts: Flags = np.logical_or.reduce([one_is_null, *(differ(*pair) for pair in pairs)])
        return parts
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        return one_is_null | _lists_differ(wanted, there, both)
    differs = _flags(pc.fill_null(pc.not_equal(wanted, there), False))
    if pa.types.is_floating(kind):
        nan = _flags(pc.fill_null(pc.and_(pc.is_nan(wanted), pc.is_nan(there)), False))
        same_sign = pc.equal(_sign(wanted), _sign(there))
        differs = (differs | ~_flags(pc.fill_null(same_sign, True))) & ~nan
    return differs | one_is_null


def _lists_differ(wanted: pa.Array, there: pa.Array, both: Flags) -> Flags:
    """Returns which rows are lists or maps of another length or with another element; null rows are not."""
    counts, others = (np.diff(np.asarray(one.offsets)) for one in (wanted, there))
    differs: Flags = both & (counts != others)
    alike = both & ~differs
    elements = differ(*(_elements(one, alike) for one in (wanted, there)))
    rows = np.repeat(np.flatnonzero(alike), counts[alike])
    differs[rows[elements]] = True
    return differs


def _elements(lists: pa.Array, of: Flags) -> pa.Array:
    """Returns the elements of some rows; those of maps are structs of a key and a value."""
    starts = np.asarray(lists.offsets)
    counts = np.diff(starts)[of]
    # positions of the elements: each row's first, and on from there
    ends = np.cumsum(counts)
    places = np.arange(counts.sum()) + np.repeat(starts[:-1][of] - (ends - counts), counts)
    if not pa.types.is_map(lists.type):
        return lists.values.take(pa.array(places))
    columns = [part.take(pa.array(places)) for part in (lists.keys, lists.items)]
    return pa.StructArray.from_arrays(columns, ["key", "value"])


def _sign(values: pa.Array) -> pa.Array:
    bits = values.cast(pa.float64()).view(pa.int64())
    return pc.less(bits, 0)


def _flags(found: pa.Array) -> Flags:
    flags: Flags = found.to_numpy(zero_copy_only=False)
    return flags
