"""Lost references: each check reports the loss, whatever happens later, until a user accepts it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dormouse.durability.maintaining import write_metrics
from dormouse.errors import CheckFailed
from dormouse.model.table import Problem
from dormouse.state.files import removal_log
from dormouse.state.files.round_reports import rounds_failing
from tests.checked import LAYOUTS, lake_of, names, names_of_leaves, problem_kinds, rows, sql
from tests.stored import assign, query, replace
from tests.support.api import Instance
from tests.support.model import is_inlined

LIVE = "partition_id <> ''"
SHARED = "not only_contains_data_for_this_partition"


@pytest.fixture(params=LAYOUTS)
def lake(request: pytest.FixtureRequest, dsn: str, tmp_path: Path) -> Iterator[Instance]:
    with lake_of(dsn, tmp_path, request.param) as instance:
        yield instance


def shared_file(lake: Instance) -> str:
    """Returns the name of the file that both leaves refer to."""
    [name] = {
        one.filename
        for one in lake.table("t").files.file_references()
        if not one.only_contains_data_for_this_partition
    }
    return name


def only_file(lake: Instance) -> str:
    """Returns the name of a file that only one leaf refers to."""
    return min(set(names(lake)) - {shared_file(lake)})


def lose(lake: Instance, condition: str) -> int:
    return sql(lake, f"delete from {{file_reference}} where {LIVE} and {condition}")


def lose_one_of_two(lake: Instance) -> None:
    assert lose(lake, f"{SHARED} and partition_id = '{names_of_leaves(lake)[0]}'") == 1


def lose_the_only_one(lake: Instance) -> None:
    assert lose(lake, f"filename = '{only_file(lake)}'") == 1


def lose_those_of_a_partition(lake: Instance) -> None:
    assert lose(lake, f"partition_id = '{names_of_leaves(lake)[0]}'") == 3


def lose_all(lake: Instance) -> None:
    assert lose(lake, "true") == 6


def lose_one_half(lake: Instance) -> None:
    """Deletes the references of one half of a divided leaf."""
    table = lake.table("t")
    _, right = table.partitions.split(names_of_leaves(lake)[0], 100)
    table.split()
    assert lose(lake, f"partition_id = '{right.partition_id}'") == 3


WAYS: list[Callable[[Instance], None]] = [
    lose_one_of_two,
    lose_the_only_one,
    lose_those_of_a_partition,
    lose_all,
    lose_one_half,
]


def a_day_passes(lake: Instance) -> None:
    """Moves the last full count back by a day, so that the next check counts everything again."""
    query(lake._supplier, "update watermark set whole_at = whole_at - interval '25 hours'")


def days_of_the_log_are_dropped(lake: Instance) -> None:
    long_ago = datetime.now(UTC).date() - timedelta(days=30)
    removal_log.DAYS.make(lake._supplier, [long_ago])
    query(lake._supplier, "update removal set removed_at = %s::date", long_ago)
    removal_log.roll(lake._supplier)
    assert query(lake._supplier, "select count(*) from removal") == [(0,)]


def lost(lake: Instance) -> list[Problem]:
    reported = ("totals", "file_without_reference")
    return [one for one in lake.check().problems if one.kind in reported]


def collect(lake: Instance) -> None:
    a_day_passes(lake)
    with pytest.raises(CheckFailed, match="until 'dormouse check --table t --accept' accepts"):
        lake.table("t").collect_garbage()


@pytest.mark.slow
@pytest.mark.parametrize("is_counted", [True, False], ids=["counted", "at once"])
@pytest.mark.parametrize("way", WAYS)
def test_a_lost_reference_is_reported_by_every_later_check(
    lake: Instance, way: Callable[[Instance], None], is_counted: bool, tmp_path: Path
) -> None:
    table = lake.table("t")
    if is_counted:
        table.status()
    way(lake)
    assert lost(lake)
    # the remaining files are merged, collected, divided and counted again
    table.ingest(rows(0))
    table.compact()
    assert lost(lake)
    collect(lake)
    table.compact()
    for leaf in names_of_leaves(lake):
        with_point = table.partitions.partition(leaf).region["key"]
        middle = {None: 1}.get(with_point.min, (with_point.min or 0) + 1)
        table.partitions.split(leaf, middle)
    table.split()
    collect(lake)
    days_of_the_log_are_dropped(lake)
    collect(lake)
    reported = lost(lake)
    assert reported
    assert all(one.table == "t" for one in reported)
    assert problem_kinds(lake) <= {"totals", "file_without_reference"}  # no object is missing


def test_a_lost_reference_names_its_file_and_is_reported_after_a_count(lake: Instance) -> None:
    name = shared_file(lake)
    lose_one_of_two(lake)
    [reported] = [one for one in lost(lake) if "was given to" in one.detail]
    assert (reported.filename, "100 rows" in reported.detail) == (name, True)
    collect(lake)
    assert name in {one.filename for one in lost(lake)}


def test_the_lost_half_of_a_partition_is_named(lake: Instance) -> None:
    table, leaf = lake.table("t"), names_of_leaves(lake)[0]
    _, right = table.partitions.split(leaf, 100)
    table.split()
    assert lose(lake, f"partition_id = '{right.partition_id}'") == 3
    reported = [one for one in lost(lake) if "was divided" in one.detail]
    assert {one.partition_id for one in reported} == {right.partition_id}
    assert len(reported) == 3
    assert all(leaf in one.detail for one in reported)


@pytest.mark.objects
@pytest.mark.slow
def test_collection_deletes_nothing_of_the_table_until_the_difference_is_accepted(lake: Instance) -> None:
    """The file may be the last one that has its rows, because compaction removed all its other references."""
    table, name = lake.table("t"), shared_file(lake)
    table.collect_garbage()
    lose_one_of_two(lake)
    table.ingest(rows(1_000))
    while table.compact().jobs_run:
        pass
    assert name not in names(lake)
    collect(lake)
    collect(lake)
    assert lake._objects.size(name) > 0
    [last] = [one for one in table.status().rounds if one.kind == "collection"]
    assert "totals of table 't'" in str(last.error)
    assert rounds_failing(lake._supplier) == 1
    with pytest.raises(CheckFailed):
        list(table.garbage_ready())
    lake.create_table("other", table.schema)
    lake.table("other").collect_garbage()  # the other table is not affected
    assert lake.accept_differences("t") > 0
    assert [one for one in lost(lake) if "was given" in one.detail or "by the count of" in one.detail] == []
    assert table.collect_garbage().deleted
    assert rounds_failing(lake._supplier) == 0


def test_metrics_report_the_failed_collection(lake: Instance, tmp_path: Path) -> None:
    lose_one_of_two(lake)
    a_day_passes(lake)
    done = lake.maintain(once=True)
    assert any("t: collection: " in one and "totals of table 't'" in one for one in done.failures)
    write_metrics(tmp_path / "m.prom", [lake.table("t").status()], lake.rounds(), done)
    text = (tmp_path / "m.prom").read_text()
    assert 'dormouse_round_failing{kind="collection",table="t"} 1.0' in text


@pytest.mark.slow
def test_a_difference_that_recurs_after_it_was_accepted_is_reported_again(lake: Instance) -> None:
    table = lake.table("t")
    lose_one_of_two(lake)
    lake.accept_differences("t")
    assert lake.check().problems == ()
    table.collect_garbage()
    assert lose(lake, f"filename = '{shared_file(lake)}'") == 1
    assert lost(lake)


def test_unreferenced_files_are_collected_once_the_difference_is_accepted(lake: Instance) -> None:
    table, name = lake.table("t"), only_file(lake)
    lose_the_only_one(lake)
    collect(lake)
    assert lake.accept_differences("t") > 0
    before = table.status()
    deleted = table.collect_garbage().deleted_files
    assert name in deleted
    assert lake.check().problems == ()
    a_day_passes(lake)
    deleted += table.collect_garbage().deleted_files
    assert lake.check().problems == ()
    after = table.status()
    assert after.inlined_files == before.inlined_files - sum(map(is_inlined, deleted))
    assert after == replace_rounds(before, after)


def test_accepted_losses_are_not_counted_as_ingested(lake: Instance) -> None:
    table = lake.table("t")
    before = table.history.record_cut()
    lose_the_only_one(lake)
    collect(lake)
    lake.accept_differences("t")
    after = table.history.record_cut()
    size = table.history.size_between(before, after)
    assert (size.row_count, size.byte_count) == (0, 0)


INLINED = ("inlined_files", "inlined_bytes")


def replace_rounds(before: Any, after: Any) -> Any:
    collected = {name: getattr(after, name) for name in ("rounds", "history_since", *INLINED)}
    return dataclasses.replace(before, unreferenced_files=0, **collected)


def test_the_command_accepts(
    cli: Callable[..., tuple[int, str, str]], lake: Instance, dsn: str, tmp_path: Path
) -> None:
    where = ("--dsn", dsn, "--objects", (tmp_path / "objects").as_uri())
    lose_one_of_two(lake)
    assert cli("check", *where)[0] == 1
    code, _, err = cli("check", *where, "--accept")
    assert (code, "--accept needs --table" in err) == (2, True)
    code, out, err = cli("check", *where, "--table", "t", "--accept", "--json")
    assert (code, json.loads(out)["problems"]) == (0, [])
    assert "of table t accepted" in err


@pytest.mark.slow
def test_clearing_a_table_does_not_reset_the_counts_of_others(lake: Instance) -> None:
    """A reset would hide a difference that no check has seen yet."""
    lake.table("t").status()
    lose_one_of_two(lake)
    other = lake.create_table("other", lake.table("t").schema)
    other.ingest(rows(0))
    other.compact()
    other.status()
    other.files.clear()
    assert other.status().files == 0
    assert any("by the count of" in one.detail for one in lost(lake))
    assert {one.table for one in lost(lake)} == {"t"}


def test_lost_removals_are_reported(lake: Instance) -> None:
    table = lake.table("t")
    table.status()
    name = only_file(lake)
    [leaf] = {one.partition_id for one in table.files.file_references() if one.filename == name}
    table.files.assign_job_ids([assign("job", leaf, name)])
    table.files.replace_file_references([replace("job", [name], None, leaf)])
    assert lost(lake) == []
    query(lake._supplier, "delete from removal")
    assert any("by the count of" in one.detail for one in lost(lake))


ADDED = {
    "file_table": "update {file} set added_at",
    "salted_counts": "update {file_count} set changed_at",
    "dummy_reference": "update {file_reference} set file_added_at",
}


@pytest.mark.few(1)
@pytest.mark.parametrize("added", ["35 days ago", "29 days ago, 00:10"], ids=["before", "clock set back"])
def test_dropping_days_of_the_removal_log_loses_nothing(lake: Instance, added: str) -> None:
    """The log drops days of old removals. The file was added before these days, or by a clock that was set
    back.
    """
    table, name, leaf = lake.table("t"), shared_file(lake), names_of_leaves(lake)[0]
    query(lake._supplier, "update instance set removals_since = now() - interval '40 days'")
    days, _, hour = added.partition(" days ago")
    today = "date_trunc('day', now(), 'UTC')"
    sql(lake, f"{ADDED[table.layout]} = {today} - interval '{days} days' + interval '0{hour[2:]}'")
    table.files.assign_job_ids([assign("job", leaf, name)])
    table.files.replace_file_references([replace("job", [name], None, leaf)])
    assert lake.check().problems == ()
    table.collect_garbage()
    days_of_the_log_are_dropped(lake)
    assert lake.check().problems == ()
    a_day_passes(lake)
    table.collect_garbage()
    assert lake.check().problems == ()


@pytest.mark.slow
def test_a_day_of_the_removal_log_is_kept_until_a_later_full_count(lake: Instance) -> None:
    table = lake.table("t")
    table.set_properties(history_retention_seconds=0)
    table.collect_garbage()
    table.ingest(rows(0))
    table.compact()
    day = datetime.now(UTC).date() - timedelta(days=2)
    removal_log.DAYS.make(lake._supplier, [day])
    query(lake._supplier, "update removal set removed_at = %s::date + interval '12 hours'", day)
    query(lake._supplier, "update watermark set whole_at = %s::date + interval '12 hours 30 minutes'", day)
    table.files.stamp_unreferenced()
    table.status()
    removal_log.roll(lake._supplier)
    assert query(lake._supplier, "select count(*) > 0 from removal") == [(True,)]
    table.collect_garbage()
    assert query(lake._supplier, "select count(*) from removal") == [(0,)]


def test_files_of_callers_may_have_rows_outside_of_partitions(lake: Instance) -> None:
    """Only for files that Dormouse wrote must the partitions cover all rows."""
    (Path(lake._objects.url.removeprefix("file://")) / "mine").mkdir()
    lake._objects.put("mine/a", b"x")
    leaf = names_of_leaves(lake)[0]
    reference = dm_reference("mine/a", leaf)
    lake.table("t").files.add_files_with_references([reference])
    assert lake.check().problems == ()


def dm_reference(name: str, leaf: str) -> Any:
    from dormouse.model.file_reference import FileReference, FileWithReferences

    one = FileReference(
        filename=name, partition_id=leaf, row_count=1, only_contains_data_for_this_partition=False
    )
    return FileWithReferences(filename=name, references=(one,), byte_count=1, row_count=5)
