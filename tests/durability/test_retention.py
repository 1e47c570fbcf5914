"""Retention: it truncates the history at the newest cut that its limits allow, and deletes nothing later."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.errors import CutExpired, InvalidCut, InvalidInput
from dormouse.state.history.moments import cuts
from tests.standard import OF_KEYS
from tests.support.api import Instance, Table
from tests.support.model import Cut
from tests.support.state import LAYOUTS, record_cut

SCHEMA = OF_KEYS
HOUR = 3_600
AGES = (50, 40, 30, 20, 10)
"""The ages of the cuts, in hours. One file is ingested after each cut."""


def execute(instance: Instance, statement: str, *values: Any) -> None:
    with instance._supplier.connection() as conn:
        conn.execute(statement, values)  # type: ignore[call-overload]


def new_table(instance: Instance, layout: str = "file_table", **properties: Any) -> Table:
    given = {"compaction_strategy": "basic", "compaction_batch_files": 2, **properties}
    return instance.create_table("t", SCHEMA, layout=layout, properties=dm.TableProperties(**given))


def add(table: Table, *keys: int) -> None:
    table.ingest(pa.table({"key": list(keys)}), engine="local")


def age(instance: Instance, table: Table, hours: dict[int, float]) -> None:
    """Moves each cut to the given number of hours before now, and makes the table older."""
    execute(instance, "update tables set history_since = history_since - interval '100 hours'")
    for cut_id, each in hours.items():
        execute(
            instance,
            "with aged as (update cut set recorded_at = clock_timestamp() - make_interval(hours => %s)"
            " where cut_id = %s returning concat('cut ', table_id, '/', cut_id) as name, recorded_at)"
            " update hold set since = recorded_at from aged where holder = aged.name",
            each,
            cut_id,
        )


@pytest.fixture
def table(instance: Instance) -> Table:
    """Returns a table with cuts of all ages. Between two cuts, the same number of bytes was ingested."""
    table = new_table(instance)
    found = []
    for key in range(len(AGES)):
        found.append(record_cut(table.context).cut_id)
        add(table, key)
    age(instance, table, dict(zip(found, AGES, strict=True)))
    return table


def cut_of(table: Table, hours: int) -> Cut:
    return list(cuts(table.context))[AGES.index(hours)]


def file_bytes(table: Table) -> int:
    [one] = {file.byte_count for file in table.file_page()}
    assert one
    return one


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("hours", "files", "expected"),
    [
        (25, None, 30),
        (30, None, 30),
        (31, None, 40),
        (9, None, 10),
        (60, None, None),
        (None, 1, 10),
        (None, 1.5, 20),
        (None, 2, 20),
        (None, 5, 50),
        (None, 5.1, None),
        # both limits are kept
        (25, 1, 30),
        (9, 4, 40),
        (25, 6, None),
        (60, 1, None),
    ],
)
def test_retention_truncates_at_the_newest_cut_that_keeps_the_limits(
    table: Table, hours: float | None, files: float | None, expected: int | None
) -> None:
    before = list(cuts(table.context))
    wanted = cut_of(table, expected) if expected else None
    limits: dict[str, Any] = {
        "seconds": hours and hours * HOUR,
        "byte_count": None if files is None else int(files * file_bytes(table)),
    }
    would = table.history.apply_retention(**limits, dry_run=True)
    assert list(cuts(table.context)) == before
    done = table.history.apply_retention(**limits)
    for report in (would, done):
        assert report.wanted == report.truncated_at == wanted
        assert report.held_by == ()
        assert report.cuts_dropped == (AGES.index(expected) + 1 if expected else 0)
    # the last cut was older than half an hour, so a new one is recorded
    assert would.recorded is None
    assert done.recorded
    assert list(cuts(table.context)) == [*before[done.cuts_dropped :], done.recorded]
    if wanted:
        dropped = AGES.index(expected or 0) + 1
        for cut in before[: dropped - 1]:
            with pytest.raises(CutExpired):
                table.changes(after=cut)
        left = table.changes(after=[*before, done.recorded][dropped]).read_all()
        assert len(left) == len(AGES) - dropped


def test_a_named_cut_limits_retention(instance: Instance, table: Table) -> None:
    execute(instance, "update cut set name = 'release' where cut_id = %s", cut_of(table, 40).cut_id)
    limit = 9 * HOUR
    would = table.history.apply_retention(seconds=limit, dry_run=True)
    done = table.history.apply_retention(seconds=limit)
    for report in (would, done):
        assert (report.wanted, report.truncated_at) == (would.wanted, would.truncated_at)
        assert report.truncated_at and report.truncated_at.name == "release"
        assert [str(holder) for holder in report.held_by] == ["cut 'release'"]
        assert report.cuts_dropped == 1
    assert len(table.changes(after="release").read_all()) == 4
    # truncated there already
    again = table.history.apply_retention(seconds=limit)
    assert (again.truncated_at, again.cuts_dropped) == (None, 0)
    assert again.wanted == would.wanted


def test_a_consumer_limits_retention(instance: Instance, table: Table) -> None:
    held = cut_of(table, 20)
    table.consumer("etl", from_=held)
    table.consumer("later")
    report = table.history.apply_retention(seconds=9 * HOUR)
    assert report.truncated_at == held
    assert report.wanted and report.wanted > held
    assert [(holder.kind, holder.name) for holder in report.held_by] == [("consumer", "etl")]
    assert report.held_by[0].until
    assert len(table.consumer("etl").read().read_all()) == 2
    execute(instance, "update hold set until = clock_timestamp() where holder like 'consumer %%'")
    assert table.history.apply_retention(seconds=9 * HOUR).truncated_at == report.wanted


def test_retention_continues_from_an_earlier_truncation(table: Table) -> None:
    ahead = cut_of(table, 20)
    assert table.history.truncate(ahead)
    report = table.history.apply_retention(seconds=25 * HOUR)
    assert (report.wanted, report.truncated_at, report.cuts_dropped) == (None, None, 0)
    assert len(table.changes(after=ahead).read_all()) == 2
    assert table.history.apply_retention(seconds=9 * HOUR).truncated_at


def test_truncating_twice_changes_nothing_and_truncating_earlier_is_refused(table: Table) -> None:
    first, second, third = (cut_of(table, hours) for hours in (50, 40, 30))
    assert len(table.changes(after=None).read_all()) == len(AGES)
    assert table.history.truncate(second)
    assert not table.history.truncate(second)
    with pytest.raises(CutExpired, match="does not reach back to its beginning") as refused:
        table.changes(after=None)
    assert refused.value.oldest == second.recorded_at
    with pytest.raises(CutExpired):
        table.history.truncate(first)
    assert table.history.truncate(third)
    assert len(table.changes(after=third).read_all()) == 3
    for gone in (first, second):
        with pytest.raises(CutExpired):
            table.changes(after=gone)
        with pytest.raises(CutExpired):
            list(table.history.files_at(gone))
    assert next(cuts(table.context)) == third


def test_an_error_of_truncating_at_an_older_cut_names_the_truncation(
    instance: Instance, table: Table
) -> None:
    behind, ahead = cut_of(table, 40), cut_of(table, 30)
    table.history.truncate(ahead)
    # a name that was given to an older cut after the truncation
    execute(
        instance,
        "insert into cut (table_id, cut_id, name, recorded_at, epoch, snapshot, rows_till, bytes_till)"
        " overriding system value select table_id, %s, 'old', recorded_at - interval '1 hour', epoch, "
        "snapshot, 0, 0"
        " from cut where cut_id = %s",
        behind.cut_id,
        ahead.cut_id,
    )
    with pytest.raises(InvalidCut, match="is truncated already: give a later one"):
        table.history.truncate("old")


def test_truncation_refuses_to_remove_named_cuts_and_positions_of_consumers(
    instance: Instance, table: Table
) -> None:
    execute(instance, "update cut set name = 'release' where cut_id = %s", cut_of(table, 40).cut_id)
    table.consumer("etl", from_=cut_of(table, 30))
    last = cut_of(table, 10)
    with pytest.raises(InvalidCut, match="cut 'release', consumer 'etl' of table 't' would be lost"):
        table.history.truncate(last)
    with pytest.raises(InvalidCut, match="give a cut or the name of a cut here, not a time"):
        table.history.truncate(last.recorded_at)  # type: ignore[arg-type]
    assert len(table.changes(after="release").read_all()) == 4
    assert table.history.truncate("release")
    assert len(table.changes(after="release").read_all()) == 4


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_collection_deletes_only_files_from_before_the_truncation(instance: Instance, layout: str) -> None:
    table = new_table(instance, layout, gc_delay_seconds=1, history_retention_seconds=HOUR)
    for key in range(2):
        add(table, key)
    table.compact(engine="local")
    table.collect_garbage()
    record_cut(table.context, "later")
    for key in range(2, 4):
        add(table, key)
    table.compact(engine="local")
    collect_all(instance, table)
    assert table.status().unreferenced_files == 4
    assert table.history.truncate("later")
    collect_all(instance, table)
    # deletes the two files compacted before the cut, and keeps the inputs of the second compaction
    assert table.status().unreferenced_files == 2
    assert sorted(table.changes(after="later").read_all()["key"].to_pylist()) == [2, 3]
    assert [reference.row_count for reference in table.history.files_at("later")] == [2]


def collect_all(instance: Instance, table: Table) -> None:
    """Runs collection, moves all times back by two seconds, and runs collection again.

    Two seconds are longer than `gc_delay_seconds` here, and shorter than any limit of retention.
    """
    table.collect_garbage()
    parents = {"file_table": ("file", "unreferenced_at"), "salted_counts": ("file_count", "changed_at")}
    parent, column = parents.get(table.layout, ("file_reference", "last_updated"))
    execute(
        instance,
        f"update {parent} set {column} = {column} - interval '2 seconds' where {column} < 'infinity'",
    )
    execute(instance, "update cut set recorded_at = recorded_at - interval '2 seconds'")
    execute(instance, "update tables set history_since = history_since - interval '2 seconds'")
    execute(instance, "update hold set since = since - interval '2 seconds'")
    execute(instance, "update truncation set recorded_at = recorded_at - interval '2 seconds'")
    table.collect_garbage()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"byte_count": -1}, "byte_count must be a whole number from 0 on, not -1"),
        ({"byte_count": 1.5}, "byte_count must be a whole number"),
        ({"seconds": -1}, "seconds must be a number from 0 to"),
        ({"seconds": True}, "seconds must be a number"),
        ({"seconds": float("nan")}, "seconds must be a number"),
        ({"seconds": 60}, "shorter than the gc_delay_seconds of table 't', 900"),
    ],
)
def test_invalid_limits_are_refused(table: Table, limits: dict[str, Any], said: str) -> None:
    before = list(cuts(table.context))
    with pytest.raises(InvalidInput, match=said):
        table.history.apply_retention(**limits)
    assert list(cuts(table.context)) == before


def test_retention_defaults_to_the_tables_property(table: Table) -> None:
    table.set_properties(history_retention_seconds=25 * HOUR)
    expected = cut_of(table, 30)
    assert table.history.apply_retention().truncated_at == expected


def test_retention_ignores_cuts_of_other_tables(instance: Instance, table: Table) -> None:
    other = instance.create_table("other", SCHEMA)
    with pytest.raises(InvalidCut, match="belongs to another table"):
        other.history.truncate(cut_of(table, 30))
    assert other.history.apply_retention(seconds=HOUR).truncated_at is None
    assert len(list(cuts(table.context))) == len(AGES)


def test_sizes_between_moments_count_ingested_rows_and_bytes(table: Table) -> None:
    one = file_bytes(table)
    found = list(cuts(table.context))
    for a in range(len(found)):
        for b in range(a, len(found)):
            size = table.history.size_between(found[a], found[b])
            assert (size.row_count, size.byte_count) == (b - a, (b - a) * one)
        till_now = table.history.size_between(found[a])
        assert (till_now.row_count, till_now.byte_count) == (len(AGES) - a, (len(AGES) - a) * one)
    with pytest.raises(InvalidCut, match="give the earlier moment first"):
        table.history.size_between(found[1], found[0])


def test_sizes_beyond_the_log_are_refused(instance: Instance, table: Table) -> None:
    """Rows that were ingested and then compacted are only in the log. A sum without the log would be too
    small.
    """
    first, *_, last = cuts(table.context)
    gone = last.recorded_at + timedelta(hours=1)
    execute(instance, "update tables set log_since = %s, history_since = %s", gone, gone)
    with pytest.raises(CutExpired, match="does not reach back"):
        table.history.size_between(last)
    later = record_cut(table.context)
    add(table, 99)
    latest = record_cut(table.context)
    for expired in (first, last):
        with pytest.raises(CutExpired, match="does not reach back"):
            table.history.size_between(expired, latest)
    assert table.history.size_between(first, last).row_count == len(AGES) - 1
    assert table.history.size_between(later, latest).row_count == 1


def test_a_time_after_a_truncation_is_read_without_commit_timestamps(instance: Instance) -> None:
    """The truncation dropped the earlier cut, and the server has no commit times from before it."""
    table = new_table(instance, gc_delay_seconds=0)
    add(table, 1)
    cut = record_cut(table.context)
    assert table.history.apply_retention(seconds=0).truncated_at == cut
    add(table, 2)
    with instance._supplier.connection() as conn:
        [(at,)] = conn.execute("select clock_timestamp()").fetchall()
    execute(
        instance,
        "update file_reference set added_xid = '5' where ingested and pg_visible_in_snapshot(added_xid, "
        "(select snapshot from truncation))",
    )
    execute(instance, "update tables set history_from = '1:1:'")
    assert sorted(table.query(as_of=at).read_all()["key"].to_pylist()) == [1, 2]
