"""The domain: types, schemas, ranges of keys, partition trees, properties."""

from __future__ import annotations

from dormouse.model.cut import Cut, Position
from dormouse.model.edits import WhenMatched, WhenNotMatched, WhenNotMatchedBySource, sql
from dormouse.model.file_reference import is_inlined
from dormouse.model.json_values import json_value
from dormouse.model.locks import process_lock
from dormouse.model.partition_tree import (
    ROOT,
    Partition,
    PartitionTree,
    Split,
    TreeArrays,
    split_partition,
    tree_from_split_points,
)
from dormouse.model.region import Range, Region, decode_key, decode_value, encode_key, encode_value
from dormouse.model.schema import Field, Schema
from dormouse.model.table import KEPT_SECONDS, TableProperties, TableRecord
from dormouse.model.text import narrow_id
from dormouse.model.types import (
    BOOLEAN,
    BYTES,
    DATE,
    DECIMAL,
    DOUBLE,
    FLOAT,
    INT,
    LIST,
    LONG,
    MAP,
    STRING,
    STRUCT,
    TIMESTAMP,
    DataType,
)

__all__ = [
    "BOOLEAN",
    "BYTES",
    "DATE",
    "DECIMAL",
    "DOUBLE",
    "FLOAT",
    "INT",
    "KEPT_SECONDS",
    "LIST",
    "LONG",
    "MAP",
    "ROOT",
    "STRING",
    "STRUCT",
    "TIMESTAMP",
    "Cut",
    "DataType",
    "Field",
    "Partition",
    "PartitionTree",
    "Position",
    "Range",
    "Region",
    "Schema",
    "Split",
    "TableProperties",
    "TableRecord",
    "TreeArrays",
    "WhenMatched",
    "WhenNotMatched",
    "WhenNotMatchedBySource",
    "decode_key",
    "decode_value",
    "encode_key",
    "encode_value",
    "is_inlined",
    "json_value",
    "narrow_id",
    "process_lock",
    "split_partition",
    "sql",
    "tree_from_split_points",
]
