"""Dormouse: very large key-sorted tables, Parquet in an object store, everything transactional in PostgreSQL.

import dormouse as dm

with dm.local("./lake") as instance:
    schema = dm.Schema(row_keys=[dm.Field("id", dm.LONG)], values=[dm.Field("name", dm.STRING)])
    table = instance.create_table("people", schema)
    table.ingest("people.parquet")
    print(table.query(where={"id": dm.Range(1, 100)}).read_all())
"""

from dormouse.embedded.local import local
from dormouse.errors import DormouseError
from dormouse.instance import Instance, connect
from dormouse.model.properties import TableProperties
from dormouse.model.region import Range, Region
from dormouse.model.schema import Field, Schema
from dormouse.model.types import BOOLEAN, BYTES, DOUBLE, INT, LIST, LONG, MAP, STRING, TIMESTAMP
from dormouse.table import Table

__version__ = "0.1.0"

__all__ = [
    "BOOLEAN",
    "BYTES",
    "DOUBLE",
    "INT",
    "LIST",
    "LONG",
    "MAP",
    "STRING",
    "TIMESTAMP",
    "DormouseError",
    "Field",
    "Instance",
    "Range",
    "Region",
    "Schema",
    "Table",
    "TableProperties",
    "connect",
    "local",
]
