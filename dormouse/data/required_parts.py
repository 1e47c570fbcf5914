"""Parts of structs that must not be null, in any Arrow type.

The parts of a struct that is null have no meaning, yet Arrow stores a value or a null for each. Its cast and
its Parquet writer refuse a null there. So these nulls are replaced by empty values, which no reader sees.
"""

from __future__ import annotations

from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

Column: TypeAlias = pa.Array | pa.ChunkedArray


def has_required(kind: pa.DataType) -> bool:
    """Returns whether a struct in the type has a part that must not be null."""
    if pa.types.is_struct(kind):
        return any(not part.nullable or has_required(part.type) for part in kind)
    if pa.types.is_map(kind):
        return has_required(kind.item_type)
    return pa.types.is_list(kind) and has_required(kind.value_type)


def relaxed(kind: pa.DataType) -> pa.DataType:
    """Returns the type in which all parts of structs may be null."""
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(part.name, relaxed(part.type)) for part in kind])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, relaxed(kind.item_type))
    return pa.list_(kind.value_field.with_type(relaxed(kind.value_type))) if pa.types.is_list(kind) else kind


def required(column: Column, kind: pa.DataType) -> Column:
    """Returns a column of the type `relaxed(kind)` in the type `kind`.

    Raises `pa.ArrowInvalid` if a part that must not be null is null in a struct that is not.
    """
    if not has_required(kind):
        return column
    if isinstance(column, pa.ChunkedArray):
        return pa.chunked_array([required(chunk, kind) for chunk in column.chunks], kind)
    # a copy of one array has no offset, and no values outside its slice
    whole = pa.concat_arrays([column])
    if pa.types.is_struct(kind):
        missing = pc.is_null(whole)
        parts = [_part(whole.field(number), part, missing) for number, part in enumerate(kind)]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=missing)
    if pa.types.is_map(kind):
        items = [whole.keys, required(whole.items, kind.item_type)]
        child = pa.StructArray.from_arrays(items, fields=[kind.key_field, kind.item_field])
    else:
        child = required(whole.values, kind.value_type)
    return pa.Array.from_buffers(kind, len(whole), whole.buffers()[:2], children=[child])


def _part(values: pa.Array, part: pa.Field, missing: pa.BooleanArray) -> pa.Array:
    import numpy as np  # the client imports this module and does not need NumPy

    found = required(values, part.type)
    if part.nullable or not found.null_count:
        return found
    nulls = pc.is_null(found)
    if pc.any(pc.and_not(nulls, missing)).as_py():
        raise pa.ArrowInvalid(f"its part {part.name!r} is null, and must not be")
    # Arrow fills the required parts of a null struct with empty values
    empty = pa.array([None], pa.struct([part])).field(0)
    places = np.arange(len(found))
    places[nulls.to_numpy(zero_copy_only=False)] = len(found)
    return pa.concat_arrays([found, empty]).take(pa.array(places))
