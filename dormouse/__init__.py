"""Dormouse: very large key-sorted tables of Parquet in an object store, with transactions in PostgreSQL.

import dormouse as dm

with dm.local("./lake") as instance:
    schema = dm.Schema(row_keys=[dm.Field("id", dm.LONG)], values=[dm.Field("name", dm.STRING)])
    table = instance.create_table("people", schema)
    table.ingest("people.parquet")
    print(table.query(where={"id": dm.Range(1, 100)}).read_all())
"""

import logging  # noqa: F401  # registered first, so that a fork takes its lock after ours
import os
import threading
from importlib import import_module
from typing import TYPE_CHECKING

from dormouse import errors as errors
from dormouse.errors import *  # noqa: F403  # the errors are names of this module, too
from dormouse.errors import DormouseError as DormouseError

if TYPE_CHECKING:
    from dormouse.api.instance import Instance, connect
    from dormouse.api.row_table import RowTable
    from dormouse.api.table import Table
    from dormouse.embedded.local import local
    from dormouse.embedded.restoring import backups, restore
    from dormouse.model.cut import Cut
    from dormouse.model.edits import WhenMatched, WhenNotMatched, WhenNotMatchedBySource, sql
    from dormouse.model.region import Range, Region
    from dormouse.model.schema import Field, Schema
    from dormouse.model.table import TableProperties
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
    )
    from dormouse.reading.changes import Consumer
    from dormouse.reading.where import ALL
    from dormouse.rows.changes import (
        AddColumn,
        DropColumn,
        Insert,
        LoadCsv,
        Patch,
        Remove,
        RenameColumn,
        RetypeColumn,
        Update,
    )
    from dormouse.rows.columns import Column
    from dormouse.sources.data_files import Files

__version__ = errors.VERSION

__all__ = [
    "ALL",
    "BOOLEAN",
    "BYTES",
    "DATE",
    "DECIMAL",
    "DOUBLE",
    "FLOAT",
    "INT",
    "LIST",
    "LONG",
    "MAP",
    "STRING",
    "STRUCT",
    "TIMESTAMP",
    "AddColumn",
    "Column",
    "Consumer",
    "Cut",
    "DormouseError",
    "DropColumn",
    "Field",
    "Files",
    "Insert",
    "Instance",
    "LoadCsv",
    "Patch",
    "Range",
    "Region",
    "Remove",
    "RenameColumn",
    "RetypeColumn",
    "RowTable",
    "Schema",
    "Table",
    "TableProperties",
    "Update",
    "WhenMatched",
    "WhenNotMatched",
    "WhenNotMatchedBySource",
    "backups",
    "connect",
    "local",
    "restore",
    "sql",
]

_TYPES = "dormouse.model.types"
_HOMES = {
    "ALL": "dormouse.reading.where",
    "Column": "dormouse.rows.columns",
    "Consumer": "dormouse.reading.changes",
    "Cut": "dormouse.model.cut",
    "Field": "dormouse.model.schema",
    "Files": "dormouse.sources.data_files",
    "Instance": "dormouse.api.instance",
    "Range": "dormouse.model.region",
    "Region": "dormouse.model.region",
    "RowTable": "dormouse.api.row_table",
    "Schema": "dormouse.model.schema",
    "Table": "dormouse.api.table",
    "TableProperties": "dormouse.model.table",
    "backups": "dormouse.embedded.restoring",
    "connect": "dormouse.api.instance",
    "local": "dormouse.embedded.local",
    "restore": "dormouse.embedded.restoring",
    "WhenMatched": "dormouse.model.edits",
    "WhenNotMatched": "dormouse.model.edits",
    "WhenNotMatchedBySource": "dormouse.model.edits",
    "sql": "dormouse.model.edits",
    **dict.fromkeys(
        (
            "AddColumn",
            "DropColumn",
            "Insert",
            "LoadCsv",
            "Patch",
            "Remove",
            "RenameColumn",
            "RetypeColumn",
            "Update",
        ),
        "dormouse.rows.changes",
    ),
}
"""The modules of the names that are loaded at their first use; a name that is not listed is a type."""


# A child that is forked while a thread loads modules would wait for it forever, so the fork waits instead.
_loading = threading.RLock()
os.register_at_fork(
    before=_loading.acquire, after_in_parent=_loading.release, after_in_child=_loading.release
)


def __getattr__(name: str) -> object:
    # imported at the first use: not every process that imports a module needs psycopg and pydantic
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _loading:
        value = globals()[name] = getattr(import_module(_HOMES.get(name, _TYPES)), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
