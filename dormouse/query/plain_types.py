"""Arrow's types without views, which not every reader of Arrow knows."""

from __future__ import annotations

import pyarrow as pa


def plain(found: pa.DataType) -> pa.DataType:
    """The type with plain strings and bytes in place of views, within nested types too."""
    if pa.types.is_string_view(found):
        return pa.string()
    if pa.types.is_binary_view(found):
        return pa.binary()
    if pa.types.is_list(found):
        return pa.list_(found.value_field.with_type(plain(found.value_type)))
    if pa.types.is_map(found):
        return pa.map_(plain(found.key_type), found.item_field.with_type(plain(found.item_type)))
    if pa.types.is_struct(found):
        return pa.struct([field.with_type(plain(field.type)) for field in found])
    return found
