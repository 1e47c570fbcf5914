"""Edits: what other commits between the read and the commit of a change mean for it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.errors import AmbiguousRows, EditConflict, InvalidInput
from tests.keyed_tables import begun, keyed, upsert
from tests.stored import query, wait_until
from tests.support.api import Instance, Table
from tests.support.reading import KeyRanges
from tests.support.reading import query as rows_of
from tests.support.state import LAYOUTS, TableContext, WriteAttempt, WriteAttempts
from tests.support.writing import (
    Computed,
    Concern,
    Edit,
    asked_to_delete,
    edits,
    keyed_rows,
    open_source,
    written,
)
from tests.tiers import by_tier

SCHEMA = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("v", dm.LONG)])
KEEPS = "every_row", "newest_row"
OPEN_ATTEMPTS = "select 1 from write_attempt where abandoned_at is null and finished_at is null"


def made(instance: Instance, keep: str = "every_row", layout: str = "file_table", **properties: Any) -> Table:
    given = dm.TableProperties(keep=keep, **properties)
    table = instance.create_table("t", SCHEMA, layout=layout, properties=given, split_points=[50])
    table.ingest([{"k": k, "v": k} for k in range(0, 100, 10)])
    return table


def seen(table: Table) -> dict[int, int]:
    rows = table.query().read_all().to_pylist()
    assert len({row["k"] for row in rows}) == len(rows)
    return {row["k"]: row["v"] for row in rows}


@dataclass
class Raise:
    """A change that adds 1 to the values of the keys in a range whose value is at most `at_most`."""

    keys: dm.Range
    at_most: int = 1_000
    moments: list[Any] = field(default_factory=list)
    reads_its_keys = True

    def compute(self, context: TableContext, attempt: WriteAttempt, at: Any) -> Computed:
        self.moments.append(at)
        batches = list(rows_of(context, {"k": self.keys}, ["k", "v"]))
        rows = [row for batch in batches for row in batch.to_pylist() if row["v"] <= self.at_most]
        new = pa.Table.from_pylist(
            [{"k": row["k"], "v": row["v"] + 1} for row in rows],
            pa.schema([pa.field("k", pa.int64(), False), pa.field("v", pa.int64(), False)]),
        )
        keyed = keyed_rows(context, attempt)
        source = open_source(new, context.schema) if keyed is None else keyed.opened(new)
        files = written(context, attempt, source, lambda *_: None)
        gone = [{"k": row["k"]} for row in rows] if keyed is None else []
        deletions = [asked_to_delete(context, one)[1] for one in gone]
        keys = {row["k"] for row in rows}

        def concerns(of: TableContext, changed: Any) -> bool:
            return any(
                row["k"] in keys or (row["v"] is not None and row["v"] <= self.at_most)
                for batch in changed
                for row in batch.to_pylist()
                if self.keys.contains(row["k"])
            )

        ranges = KeyRanges({"k": [self.keys]})
        return Computed(files, deletions, Concern(ranges, concerns), {"updated": len(rows)})


def raised(
    table: Table,
    change: Any,
    *meanwhile: Callable[[], object],
    edit_id: str | None = None,
    attempts_max: int = 5,
) -> Edit:
    """Commits a change; runs `meanwhile`, one function for each computation, between read and commit."""
    left = list(meanwhile)
    compute = change.compute

    def once(context: TableContext, attempt: WriteAttempt, at: Any) -> Computed:
        found: Computed = compute(context, attempt, at)
        if left:
            left.pop(0)()
        return found

    change.compute = once
    with Edit(table.context.supplier, edit_id, attempts_max=attempts_max) as edit:
        edit.add(table.context, change)
        edit.commit()
    return edit


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("keep", KEEPS)
def test_a_change_is_committed_once(instance: Instance, keep: str, layout: str) -> None:
    table = made(instance, keep, layout)
    edit = raised(table, Raise(dm.Range(20, 50)), edit_id="one")
    assert (edit.attempts, edit.counts) == (1, {"updated": 3})
    expected = {k: k + (20 <= k < 50) for k in range(0, 100, 10)}
    assert seen(table) == expected
    with Edit(table.context.supplier, "one") as again:
        again.add(table.context, Raise(dm.Range(20, 50)))
        assert again.is_applied(table.context)
        assert not again.commit()
    assert seen(table) == expected
    assert not query(instance._supplier, OPEN_ATTEMPTS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("keep", KEEPS)
def test_a_commit_of_concerned_rows_computes_the_change_again(
    instance: Instance, keep: str, layout: str
) -> None:
    table = made(instance, keep, layout)
    edit = raised(table, Raise(dm.Range(20, 50)), lambda: table.ingest([{"k": 25, "v": 7}]))
    assert edit.attempts == 2
    expected = {k: k + (20 <= k < 50) for k in range(0, 100, 10)} | {25: 8}
    assert seen(table) == dict(sorted(expected.items()))


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize(
    "meanwhile",
    [
        lambda table: table.ingest([{"k": 55, "v": 1}]),
        lambda table: table.ingest([{"k": 25, "v": 2_000}, {"k": 99, "v": 0}]),
        lambda table: table.delete({"k": 60}),
        lambda table: table.delete({"k": dm.Range(46, 50)}),
        lambda table: table.compact(full=True),
        lambda table: table.partitions.split(table.partitions.leaves()[0].partition_id, 30),
        lambda table: table.collect_garbage(),
        lambda table: table.history.record_cut("cut"),
    ],
    ids=["another key", "other values", "another deletion", "no row deleted", "compaction", "split",
         "collection", "cut"],
)  # fmt: skip
def test_other_commits_are_no_conflict(
    instance: Instance, keep: str, meanwhile: Callable[[Table], object]
) -> None:
    table = made(instance, keep)
    table.ingest([{"k": 45, "v": 45}])
    edit = raised(table, Raise(dm.Range(20, 50)), lambda: meanwhile(table))
    assert edit.attempts == 1
    found = seen(table)
    assert {k: found[k] for k in (20, 30, 40, 45) if k in found} == {
        k: k + 1 for k in (20, 30, 40, 45) if k in found
    }


def test_a_deletion_of_read_rows_computes_the_change_again(instance: Instance) -> None:
    table = made(instance)
    edit = raised(table, Raise(dm.Range(20, 50)), lambda: table.delete({"k": 30}))
    assert edit.attempts == 2
    assert 30 not in seen(table)


def test_a_restore_computes_the_change_again(instance: Instance) -> None:
    table = made(instance)
    table.history.record_cut("before")
    table.ingest([{"k": 21, "v": 5}])
    edit = raised(table, Raise(dm.Range(20, 50)), lambda: table.restore("before"))
    assert edit.attempts == 2
    assert seen(table) == {k: k + (20 <= k < 50) for k in range(0, 100, 10)}


@pytest.mark.parametrize("keep", KEEPS)
def test_a_change_that_is_always_overtaken_changes_nothing(instance: Instance, keep: str) -> None:
    table = made(instance, keep)
    meanwhile = [lambda k=k: table.ingest([{"k": 20 + k, "v": 1}]) for k in (1, 2, 3)]
    with pytest.raises(EditConflict, match=r"table 't', k from 20 to 50: .* each of the 3 times") as caught:
        raised(table, Raise(dm.Range(20, 50)), *meanwhile, attempts_max=3)
    assert caught.value.table == "t"
    assert seen(table) == dict(sorted(({k: k for k in range(0, 100, 10)} | {21: 1, 22: 1, 23: 1}).items()))
    assert not query(instance._supplier, OPEN_ATTEMPTS)


@pytest.mark.few(1)
@pytest.mark.parametrize("keep", KEEPS)
def test_no_update_of_threads_is_lost(instance: Instance, keep: str) -> None:
    table, times = made(instance, keep), by_tier(3, 6)

    def work(number: int) -> int:
        return sum(
            raised(instance.table("t"), Raise(dm.Range(20, 21)), attempts_max=1_000).attempts
            for _ in range(times)
        )

    with ThreadPoolExecutor(4) as threads:
        attempts = sum(threads.map(work, range(4)))
    assert seen(table)[20] == 20 + 4 * times
    assert attempts >= 4 * times


def test_a_change_of_many_rows_is_not_starved(instance: Instance) -> None:
    """Other commits that do not concern it go on all the time."""
    table = made(instance)
    numbers = iter(range(1_000))

    def another() -> None:
        table.ingest([{"k": 25, "v": 2_000 + next(numbers)}])

    change = Raise(dm.Range(20, 50))
    compute = change.compute

    def once(context: TableContext, attempt: WriteAttempt, at: Any) -> Computed:
        found = compute(context, attempt, at)
        another()
        concern = found.concern

        def of(context: TableContext, changed: Any) -> bool:
            result = concern.of(context, changed)
            if looks.pop():
                another()
            return result

        looks = [False, *[True] * 3]
        return Computed(found.files, found.deletions, Concern(concern.ranges, of), found.counts)

    change.compute = once
    with Edit(table.context.supplier, None) as edit:
        edit.add(table.context, change)
        assert edit.commit()
    assert edit.attempts == 1
    assert next(numbers) == 4


def test_changes_of_one_transaction_must_be_apart(instance: Instance) -> None:
    table = made(instance)
    with Edit(table.context.supplier, None) as edit:
        edit.add(table.context, Raise(dm.Range(20, 30)))
        edit.add(table.context, Raise(dm.Range(30, 40)))
        with pytest.raises(InvalidInput, match="an earlier one of the same transaction changed"):
            edit.add(table.context, Raise(dm.Range(25, 35)))
        assert edit.commit()
    assert seen(table) == {k: k + (20 <= k < 40) for k in range(0, 100, 10)}


def test_a_transaction_of_two_tables(instance: Instance) -> None:
    one = made(instance)
    other = instance.create_table("u", SCHEMA, properties=dm.TableProperties(keep="newest_row"))
    with instance.transaction("first") as tx:
        tx.delete("t", {"k": dm.Range(0, 50)})
        tx.ingest("t", [{"k": 1, "v": 1}])
        tx.upsert("u", [{"k": 1, "v": 1}])
        assert seen(one) == {k: k for k in range(0, 100, 10)}
        assert tx.applied is None
    assert tx.applied
    assert (seen(one), seen(other)) == ({1: 1, 50: 50, 60: 60, 70: 70, 80: 80, 90: 90}, {1: 1})
    with instance.transaction("first") as tx:
        tx.ingest("t", [{"k": 2, "v": 2}])
    assert tx.applied is False
    with pytest.raises(ZeroDivisionError), instance.transaction() as tx:
        tx.ingest("t", [{"k": 2, "v": 2}])
        tx.upsert("u", [{"k": 2, "v": 2}])
        raise ZeroDivisionError
    assert (len(seen(one)), len(seen(other))) == (6, 1)


def test_a_load_of_a_stream_is_repeated_with_the_reads_of_its_transaction(instance: Instance) -> None:
    table = made(instance, "newest_row")
    other = instance.create_table("u", SCHEMA, properties=dm.TableProperties(keep="newest_row"))
    rows = pa.table({"k": [1, 2], "v": [1, 2]}).cast(
        pa.schema([pa.field("k", pa.int64(), False), pa.field("v", pa.int64(), False)])
    )
    with instance.transaction() as tx:
        tx.update("t", {"k": 20}, {"v": dm.sql("v + 1")})
        tx.upsert("u", pa.RecordBatchReader.from_batches(rows.schema, iter(rows.to_batches())))
        table.upsert([{"k": 20, "v": 7}])
        other.upsert([{"k": 2, "v": 0}])
    assert tx.attempts == 2
    # the transaction comes after both upserts, so its own has the last word
    assert (seen(table)[20], seen(other)) == (8, {1: 1, 2: 2})


def test_a_transaction_without_changes_applies_nothing(instance: Instance) -> None:
    for _ in range(2):
        with instance.transaction("empty") as tx:
            pass
        assert tx.applied is None


def test_a_replacement_is_counted_before_it_is_made(instance: Instance) -> None:
    for keep, inline_bytes_max in itertools.product(KEEPS, [65_536, 0]):
        table = made(instance, keep, inline_bytes_max=inline_bytes_max)
        report = table.replace({"v": dm.Range(20, 45)}, [{"k": 21, "v": 1}], dry_run=True)
        assert (report.inserted, report.deleted, report.applied) == (1, 3, False)
        assert len(seen(table)) == 10
        report = table.replace({"v": dm.Range(20, 45)}, [{"k": 21, "v": 1}])
        assert (report.inserted, report.applied, report.attempts) == (1, True, 1)
        assert sorted(seen(table)) == [0, 10, 21, 50, 60, 70, 80, 90]
        instance.drop_table("t")


def test_an_edit_after_the_beginning_of_a_load_does_not_hide_its_rows(instance: Instance) -> None:
    """A load that began before an edit, and commits after it, has the last word on its keys."""
    table = keyed(instance)
    upsert(table, (1, 1), (2, 2), (3, 3))
    commit = begun(table, (2, 7))
    assert table.update({"k": dm.Range(0, 50)}, {"v": dm.sql("v + 1")}).rows == 3
    commit()
    assert seen(table) == {1: 2, 2: 7, 3: 4}


def test_a_merge_sees_the_rows_of_a_load_that_began_before_it(instance: Instance) -> None:
    table = keyed(instance)
    commit = begun(table, (2, 7))
    when = [dm.WhenMatched(update={"v": dm.sql("t.v + 1")}), dm.WhenNotMatched(insert="*")]
    with ThreadPoolExecutor(1) as threads:
        merged = threads.submit(table.merge_into, [{"k": 2, "v": 100}], ["k"], when)
        wait_until(merged.running)
        time.sleep(0.3)  # it reads meanwhile, and then waits
        commit()
        merged.result()
    assert seen(table)[2] == 8


def test_a_transaction_finds_tables_by_their_present_names(instance: Instance) -> None:
    made(instance)
    with instance.transaction() as tx:
        tx.update("t", {"k": 20}, {"v": 1})
    other = dm.connect(instance._tables.dsn, instance.objects.url)
    with other:
        other.rename_table("t", "old")
        other.create_table("t", SCHEMA).ingest([{"k": 20, "v": 7}])
    with instance.transaction() as tx:
        tx.update("t", {"k": 20}, {"v": dm.sql("v + 1")})
    assert seen(instance.table("t")) == {20: 8}
    assert seen(instance.table("old"))[20] == 1


def test_payloads_are_stored_with_the_rows_of_a_transaction(instance: Instance) -> None:
    table, at = made(instance), datetime.now(UTC)
    with instance.transaction() as tx:
        tx.ingest("t", [{"k": 1, "v": 1}])
        tx.put_payloads([("tenant", "1", at, "kind", {"a": 1})])
    assert instance.payloads.get("tenant", "1", at, "kind") == {"a": 1}
    with pytest.raises(ZeroDivisionError), instance.transaction() as tx:
        tx.put_payloads([("tenant", "2", at, "kind", 2)])
        tx.ingest("t", [{"k": 2, "v": 2}])
        raise ZeroDivisionError
    with pytest.raises(dm.errors.InvalidPayload), instance.transaction() as tx:
        tx.ingest("t", [{"k": 2, "v": 2}])
        tx.put_payloads([("tenant", "\0", at, "kind", 2)])
    with pytest.raises(dm.errors.PayloadNotFound):
        instance.payloads.get("tenant", "2", at, "kind")
    assert len(seen(table)) == 11


def test_a_newer_row_with_the_same_values_is_a_change(instance: Instance) -> None:
    """The mark of deletion must come after it."""
    table = made(instance, "newest_row")
    with instance.transaction() as tx:
        tx.delete("t", {"v": 20})
        for _ in range(2):
            table.update({"k": 20}, {"v": 20})
    assert tx.attempts == 2
    assert 20 not in seen(table)


@pytest.mark.few(1)
@pytest.mark.parametrize("keep", KEEPS)
def test_a_row_that_came_and_went_around_the_read_concerns_the_change(instance: Instance, keep: str) -> None:
    table, change = made(instance, keep), Raise(dm.Range(20, 50))
    compute, times = change.compute, iter([True])

    def once(context: TableContext, attempt: WriteAttempt, at: Any) -> Computed:
        is_first = next(times, False)
        if is_first:
            table.ingest([{"k": 25, "v": 1}])
        found = compute(context, attempt, at)
        if is_first:
            table.delete({"k": 25})
        return found

    change.compute = once  # type: ignore[method-assign]
    assert raised(table, change).attempts == 2
    assert 25 not in seen(table)


@pytest.mark.parametrize("keep", KEEPS)
def test_commits_after_the_search_for_others_are_found_later(
    instance: Instance, keep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, commit = made(instance, keep), edits.commit
    late = iter([{"k": 26, "v": 1}])

    def searched(*given: Any, **how: Any) -> bool:
        try:
            return commit(*given, **how)
        finally:
            table.ingest(list(late))

    monkeypatch.setattr(edits, "commit", searched)
    edit = raised(table, Raise(dm.Range(20, 50)), lambda: table.ingest([{"k": 25, "v": 2_000}]))
    assert edit.attempts == 2
    assert seen(table)[26] == 2


def test_the_rows_of_a_replacement_get_a_later_place_with_their_transaction(instance: Instance) -> None:
    table = made(instance)
    other = instance.create_table("u", SCHEMA, properties=dm.TableProperties(keep="newest_row"))
    with instance.transaction() as tx:
        tx.update("t", {"k": 20}, {"v": dm.sql("v + 1")})
        tx.replace("u", {"v": 5_000}, [{"k": 1, "v": 1}])
        table.update({"k": 20}, {"v": 7})
        other.upsert([{"k": 1, "v": 100}])
    assert (tx.attempts, seen(table)[20], seen(other)) == (2, 8, {1: 1})


def test_a_commit_after_the_beginning_of_a_replacement_is_no_earlier_one(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, begin = made(instance, "newest_row"), WriteAttempts.begin

    def late(attempts: WriteAttempts, *args: Any, **how: Any) -> WriteAttempt:
        found = begin(attempts, *args, **how)
        monkeypatch.setattr(WriteAttempts, "begin", begin)
        table.upsert([{"k": 20, "v": 7}])
        return found

    monkeypatch.setattr(WriteAttempts, "begin", late)
    assert table.replace(dm.sql("k = 20"), [{"k": 20, "v": 1}]).attempts == 2
    assert seen(table)[20] == 1


def test_texts_of_one_number_match_a_row_twice(instance: Instance) -> None:
    table, source = made(instance), pa.table({"x": ["20", "020"], "y": [1, 2]})
    with pytest.raises(AmbiguousRows):
        table.merge_into(source, dm.sql("t.k = s.x"), [dm.WhenMatched(update={"v": dm.sql("s.y")})])


def test_an_id_that_is_too_long_is_named_as_it_was_given(instance: Instance) -> None:
    with pytest.raises(InvalidInput, match="ingest_id"):
        made(instance).replace({"k": 1}, [{"k": 1, "v": 1}], ingest_id="x" * 10_000)


def test_the_time_of_a_deletion_by_values_is_that_of_the_database(instance: Instance) -> None:
    table = made(instance, "newest_row")
    deleted_at = table.delete({"v": 20}).deleted_at
    assert 20 not in {row["k"] for row in table.query(as_of=deleted_at).read_all().to_pylist()}


@pytest.mark.parametrize("keep", KEEPS)
def test_deletions_of_other_rows_do_not_end_an_edit(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    table, plan = made(instance, keep, inline_bytes_max=0), WriteAttempts.plan
    keys = itertools.count(1_000)

    def overtaken(attempts: WriteAttempts, *args: Any, **how: Any) -> Any:
        found = plan(attempts, *args, **how)
        table.delete({"k": next(keys)})
        return found

    monkeypatch.setattr(WriteAttempts, "plan", overtaken)
    assert table.update({"k": 20}, {"v": dm.sql("v + 1")}).attempts == 1
    assert seen(table)[20] == 21
