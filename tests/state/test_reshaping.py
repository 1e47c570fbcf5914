"""Tests that added, renamed, widened and dropped columns show at once, to every reader of every file."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest

import dormouse as dm
from dormouse.objects.names import schema_version_of
from tests.reshaped import (
    CHANGES,
    ROWS,
    SCHEMA,
    TWO,
    Shaped,
    add_default,
    add_whole,
    drop_and_add,
    ingest,
    newer_rows,
    readers,
    rename_keys,
    rename_value,
    stored,
    swap_names,
    widen,
)
from tests.support.api import Instance
from tests.support.model import DataType
from tests.support.state import LAYOUTS


@pytest.fixture
def shaped(instance: Instance) -> Shaped:
    return Shaped.begun(instance)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_every_reader_reads_files_of_every_version_with_the_current_columns(
    shaped: Shaped, change: Callable[[Shaped], None]
) -> None:
    change(shaped)
    shaped.check()
    shaped.cut("changed")
    newer_rows(shaped)
    shaped.check()
    # with deletions of old files and new ones, and compacted into one
    shaped.delete(next(iter(shaped.model.names)), 1)
    shaped.check()
    assert shaped.table.compact().jobs_run
    shaped.check()
    assert shaped.instance.check(deep=True).problems == ()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_reader_agrees_after_each_kind_of_change_in_turn(instance: Instance, layout: str) -> None:
    """Makes all kinds of changes in turn, so that the table has files of all versions.

    Compares all readers, also as of a cut after each change.
    """
    shaped = Shaped.made(instance, SCHEMA, layout=layout, properties=dm.TableProperties(**TWO))
    shaped.ingest(*ROWS)
    shaped.cut("first")
    for change in (add_whole, rename_keys, swap_names, drop_and_add):
        change(shaped)
        newer_rows(shaped)
        shaped.cut(change.__name__)
    shaped.check()
    # the newest shape, with defaults as values
    while shaped.table.compact().jobs_run:
        shaped.check()
    [(file, found)] = stored(shaped)
    assert schema_version_of(file) == shaped.table.schema.version
    assert found.names == list(shaped.model.names)
    assert shaped.instance.check(deep=True).problems == ()
    shaped.check()


DEFAULTS: list[tuple[DataType, Any]] = [
    (dm.INT, -(1 << 31)),
    (dm.LONG, (1 << 63) - 1),
    (dm.STRING, "it's \0 \U0001f400"),
    (dm.BYTES, b"\0\xff"),
    (dm.DOUBLE, float("nan")),
    (dm.DOUBLE, -0.0),
    (dm.FLOAT, float("-inf")),
    (dm.BOOLEAN, False),
    (dm.TIMESTAMP, datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)),
    (dm.DATE, date(1, 1, 1)),
    (dm.DECIMAL(38, 3), Decimal("-12345678901234567890.125")),
]


@pytest.mark.slow
def test_every_reader_returns_the_defaults_of_each_type(shaped: Shaped) -> None:
    """Old rows show a new column's default. After a compaction, the default is stored in the file."""
    for number, (kind, default) in enumerate(DEFAULTS):
        shaped.table.add_column(dm.Field(f"whole{number}", kind), default)
        shaped.table.add_column(dm.Field(f"nullable{number}", kind, nullable=True), default)
    shaped.table.add_column(dm.Field("list", dm.LIST(dm.LONG), nullable=True))
    shaped.table.add_column(
        dm.Field("struct", dm.STRUCT([dm.Field("x", dm.STRING, nullable=True)]), nullable=True)
    )
    wanted = [repr(default) for _, default in DEFAULTS for _ in range(2)] + ["None", "None"]

    def check() -> None:
        for reader, found in readers(shaped.table, shaped.instance):
            assert len(found) == len(ROWS), reader
            for row in found:
                seen = [repr(value).replace("zoneinfo.ZoneInfo(key='UTC')", "datetime.timezone.utc")
                        for value in list(row.values())[len(SCHEMA.names) :]]  # fmt: skip
                assert seen == wanted, reader

    check()
    shaped.table.set_properties(deletions_max=1)
    for key in (1, 3):
        ingest(shaped.table, [{**shaped.table.query().read_all().to_pylist()[0], "k": key, "s": "gone"}])
    shaped.table.delete({"s": "gone"})
    assert shaped.table.compact().jobs_run
    assert {schema_version_of(name) for name, _ in stored(shaped)} == {shaped.table.schema.version}
    check()


def test_files_know_their_columns_by_ids(shaped: Shaped) -> None:
    """Ingests and compactions store the ids of columns in files. A dropped column's id is not reused."""
    drop_and_add(shaped)
    newer_rows(shaped)
    shaped.table.compact()
    for name, columns in stored(shaped):
        ids = {field.name: int(field.metadata[b"PARQUET:field_id"]) for field in columns}
        by_name = {name: number for name, number in shaped.model.names.items() if name in ids}
        assert (schema_version_of(name) == 1) == (ids["note"] == 5)
        if schema_version_of(name) > 1:
            assert ids == by_name
    assert shaped.model.names["note"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("change", [add_default, add_whole, rename_value, rename_keys, swap_names, widen])
def test_conditions_prune_no_matching_rows(shaped: Shaped, change: Callable[[Shaped], None]) -> None:
    """Old files have statistics under old names and types, or none. Pruning by them must lose no row."""
    change(shaped)
    newer_rows(shaped)
    table, instance = shaped.table, shaped.instance
    there = shaped.model.shown()
    with instance.duckdb() as opened:
        for name in [shaped.table.schema.names[0], *shaped.table.schema.names[3:]]:
            values = list({repr(row[name]): row[name] for row in there}.values())
            text = f"select * from t where {name} is not distinct from $1 order by 1"
            for value in values:
                wanted = [row for row in there if row[name] == value]
                assert table.query({name: value}).read_all().to_pylist() == wanted, (name, value)
                if isinstance(value, str) and "\0" in value:
                    continue  # no statement can name such a column
                assert instance.sql(text, [value]).read_all().to_pylist() == wanted, (name, value)
                seen = opened.execute(text, [value]).to_arrow_table()
                assert seen.to_pylist() == wanted, (name, value)
            low = sorted(value for value in values if value is not None)[len(values) // 2]
            above = [row for row in there if row[name] is not None and row[name] >= low]
            assert table.query({name: dm.Range(min=low)}).read_all().to_pylist() == above, (name, low)
            text = f"select * from t where {name} >= $1 order by 1"
            assert instance.sql(text, [low]).read_all().to_pylist() == above, (name, low)
