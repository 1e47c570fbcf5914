"""The sinks, asked as Spark asks them, without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import dormouse as dm
from dormouse.data.arrow_schema import arrow_schema
from dormouse.datasource.options import StreamOptions, TableOptions, WriteOptions
from dormouse.datasource.sink import Load, TableWriter
from dormouse.datasource.streams import StreamWriter
from dormouse.errors import NotARowTable
from dormouse.instance import Instance
from dormouse.spark.frames import struct_of
from tests.state import query

Of = Callable[[str], TableOptions]


@pytest.fixture
def of(instance: Instance, dsn: str) -> Of:
    return lambda table: TableOptions(table, None, dsn, instance.objects.url)


def attempts(instance: Instance) -> list[Any]:
    return query(instance._supplier, "select attempt_id from write_attempt where table_id > 0")


def test_rows_that_are_edited_are_changed_by_their_table_alone(instance: Instance, of: Of) -> None:
    instance.create_row_table("r", [dm.Column("n", "INTEGER")])
    context = instance.table("r")._context
    columns = struct_of(arrow_schema(context.schema))
    begins: list[Callable[[], object]] = [
        lambda: TableWriter.begun(WriteOptions(of("r")), columns),
        lambda: StreamWriter(StreamOptions(of("r"), "s"), columns),
        lambda: Load.begun(context, columns),
    ]
    for begin in begins:
        with pytest.raises(NotARowTable, match="table 'r' is a row table"):
            begin()
    assert attempts(instance) == []
