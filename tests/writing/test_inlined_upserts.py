"""Small upserts: their attempts are announced without a flush, and one statement adds their files."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from keyed_tables import data, keyed, seen, upsert

import dormouse as dm
from dormouse.errors import AttemptAbandoned, CommitOutcomeUnknown
from dormouse.model.table import DELETED_AT, SEQUENCE, stored_schema
from dormouse.state.files import updates
from dormouse.writing import ingest
from tests.ingested import attempts
from tests.stored import query
from tests.support.api import Instance
from tests.support.state import WriteAttempts
from tests.support.writing import InlinedLeaves

WATCHED = """
alter database {database} set synchronous_commit = on;
create table noted (number bigint generated always as identity, of text, flushes text);
create function note() returns trigger language plpgsql as $$
    begin
        insert into noted (of, flushes) values (tg_table_name, current_setting('synchronous_commit'));
        return null;
    end
$$;
create trigger noted after insert or update on write_attempt for each row execute function note();
create trigger noted after insert on {files} for each row execute function note();
"""


@pytest.fixture
def noted(dsn: str, tmp_path: Path) -> Callable[..., list[tuple[str, str]]]:
    """Returns a function that makes an upsert and returns, for each change, its table and its flush."""

    def upserted(**properties: Any) -> list[tuple[str, str]]:
        url = (tmp_path / "objects").as_uri()
        with dm.connect(dsn, url) as instance:
            context = keyed(instance, **properties).context
            files = context.store.own.layout.tables(context.table.table_id)["file"]
            database = query(context.supplier, "select current_database()")[0][0]
            query(context.supplier, WATCHED.format(database=database, files=files))
        with dm.connect(dsn, url) as instance:
            table = instance.table("t")
            upsert(table, *((key, 0) for key in range(100)))
            assert len(seen(table, instance)) == 100
            assert attempts(table.context) == 0
            found = query(table.context.supplier, "select of, flushes from noted order by number")
            return [("file" if of == files else of, flushes) for of, flushes in found]

    return upserted


def test_only_the_statement_that_adds_the_files_flushes_the_disk(
    noted: Callable[..., list[tuple[str, str]]],
) -> None:
    assert noted() == [("write_attempt", "off"), ("write_attempt", "off"), ("file", "on")]


def test_an_attempt_is_on_the_disk_before_its_first_object(
    noted: Callable[..., list[tuple[str, str]]],
) -> None:
    """The rows looked as if they were few, but are larger than the limit of the table."""
    assert noted(inline_bytes_max=100) == [
        *[("write_attempt", "off")] * 2,
        ("write_attempt", "on"),
        ("file", "on"),
    ]


def test_an_attempt_that_the_database_lost_adds_nothing(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = WriteAttempts.begin

    def lost(self: WriteAttempts, *args: Any, **how: Any) -> Any:
        attempt = begin(self, *args, **how)
        assert how["durable"] is False
        query(instance._supplier, "delete from write_attempt")
        return attempt

    monkeypatch.setattr(WriteAttempts, "begin", lost)
    for inline_bytes_max in (65_536, 100):
        table = keyed(instance, f"t{inline_bytes_max}", inline_bytes_max=inline_bytes_max)
        with pytest.raises(AttemptAbandoned):
            upsert(table, *((key, 0) for key in range(100)))
        assert seen(table, instance) == {}
    assert not list(instance.objects.list("data"))


def test_an_upsert_whose_answer_is_lost_is_applied_once(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, whole, lost = keyed(instance), updates._apply_whole, list[bool]()

    def losing(*args: Any) -> bool:
        applied = whole(*args)
        if not lost:
            lost.append(applied)
            raise CommitOutcomeUnknown("the answer was lost")
        return applied

    monkeypatch.setattr(updates, "_apply_whole", losing)
    report = table.upsert(data([(1, 1), (2, 2)]), ingest_id="once")
    assert (lost, report.applied, report.rows) == ([True], True, 2)
    assert not table.upsert(data([(1, 1), (2, 2)]), ingest_id="once").applied
    assert (seen(table, instance), attempts(table.context)) == ({1: 1, 2: 2}, 0)


def test_a_delete_and_a_mark_that_begin_after_an_upsert_win(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are committed between the place of the upsert and its statement, and compacted."""
    table = keyed(instance)
    upsert(table, (1, 0), (2, 0), (3, 0))
    commit = ingest.commit_inlined

    def late(*args: Any) -> bool:
        monkeypatch.undo()
        table.delete({"k": 1})
        table.upsert(data([(2, 0)], [True]), deletes="is_deleted")
        assert table.compact(full=True).jobs_run
        table.collect_garbage()
        return commit(*args)

    monkeypatch.setattr(ingest, "commit_inlined", late)
    upsert(table, (1, 9), (2, 9), (3, 9))
    for _ in range(2):
        assert seen(table, instance) == {3: 9}
        table.compact(full=True)


def test_columns_that_change_during_an_upsert_do_no_harm(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = keyed(instance)
    commit = ingest.commit_inlined

    def late(*args: Any) -> bool:
        monkeypatch.undo()
        table.add_column(dm.Field("more", dm.LONG, nullable=True), 7)
        return commit(*args)

    monkeypatch.setattr(ingest, "commit_inlined", late)
    upsert(table, (1, 9))
    assert table.query().read_all().to_pylist() == [{"k": 1, "v": 9, "s": None, "more": 7}]
    assert attempts(table.context) == 0


@pytest.mark.parametrize("writing", ["one_file_per_leaf", "one_reference_per_leaf"])
@pytest.mark.parametrize("mark", [None, datetime(2026, 1, 1, tzinfo=UTC)])
@pytest.mark.parametrize("keep", ["every_row", "newest_row"])
def test_one_row_gets_the_file_that_a_longer_load_would_get(
    keep: Any, mark: datetime | None, writing: Any
) -> None:
    properties = dm.TableProperties(keep=keep, ingest_file_writing=writing)
    schema = stored_schema(dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("v", dm.STRING)]), properties)
    times = pa.array([mark], pa.timestamp("us", "UTC"))
    rows = pa.table({DELETED_AT: times, SEQUENCE: [7], "v": ["x"], "k": [5]})
    empty, rows = rows.slice(1), rows.select(schema.names)
    no_store: Any = None
    name_of = f"data/inlined/{'0' * 32}/0-{{}}.v1.parquet".format
    leaves = InlinedLeaves(no_store, schema, properties, pa.array(["a", "b", "c"]), name_of, "t")
    [found] = leaves.files(pa.concat_tables([empty.select(schema.names), rows]), pa.array([1], pa.int32()))
    [expected] = leaves.write_in_order(iter(rows.to_batches()), np.array([0, 1, 0]))
    assert found == expected
    assert found.references[0].partition_id == "b"
