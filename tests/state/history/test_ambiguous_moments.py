"""Times that do not identify one moment: clocks that were set back, lost commit times, and a hot standby."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo

from dormouse.errors import CutExpired, DormouseError, InstanceReadOnly, InvalidCut
from dormouse.postgres import ConnectionSupplier, Retries, run_statement
from dormouse.reading import table_view
from tests.small_tables import add, clock, keys, made
from tests.standby import OPTIONS, Pair, streaming
from tests.stored import query, wait_until
from tests.support.api import Instance, Table, connect
from tests.support.embedded import EmbeddedPostgres
from tests.support.model import STRING, Field
from tests.support.writing import open_source, write_leaves


def change(table: Table, statement: str, *values: Any) -> None:
    query(table.context.supplier, f"{statement} returning 1", *values)


@pytest.mark.slow
def test_a_time_finds_the_epoch_that_came_after_the_clock_was_set_back(instance: Instance) -> None:
    table = made(instance, split_threshold_rows=10**6)
    # as if the clock had been an hour ahead until now
    change(table, "update epoch set created_at = created_at + interval '1 hour'")
    seen = []
    for point in (10, 5, None):
        add(table, 0, 20)
        seen.append((clock(instance), keys(table)))
        leaves = [one.partition_id for one in table.partitions.leaves()]
        if point is None:
            table.partitions.merge(leaves)
        else:
            table.partitions.split(leaves[0], point)
        add(table, 0, 20)
        seen.append((clock(instance), keys(table)))
    for _ in range(2):
        for when, rows in seen:
            assert keys(table, when) == rows, "of an epoch whose time is yet to come"
        table.compact()
    rows = query(table.context.supplier, "select clock_at < created_at from epoch order by epoch")
    assert rows == [(None,), *[(True,)] * 3]


@pytest.mark.parametrize("splits", [False, True])
def test_a_time_before_and_after_a_clock_change_is_refused(
    instance: Instance, dsn: str, splits: bool
) -> None:
    """The clock was an hour ahead during the merge only.

    So the merge has a later recorded time than the changes after it, and the time matches no single state.
    """
    table = made(instance, split_threshold_rows=10**6)
    table.partitions.split("root", 10)
    add(table, 0, 20)
    first, rows = clock(instance), keys(table)
    with psycopg.connect(dsn, options="-c search_path=dormouse") as merging:
        # stands for the merge's transaction: it begins now, and commits after the later changes
        [(xid,)] = merging.execute("select pg_current_xact_id()::text").fetchall()
        table.partitions.merge([one.partition_id for one in table.partitions.leaves()])
        change(table, "update epoch set created_at = created_at + interval '1 hour' where epoch = 2")
        if splits:
            table.partitions.split(table.partitions.leaves()[0].partition_id, 5)
        add(table, 0, 20)
        later = clock(instance)
        merging.execute("update epoch set added_xid = %s::xid8 where epoch = 2", [xid])
    with pytest.raises(
        InvalidCut, match="clock was set back then, so that it was that time twice; name a cut"
    ):
        keys(table, later)
    assert keys(table, first) == rows
    assert keys(table, table.history.record_cut()) == keys(table)


def test_a_time_is_refused_if_files_that_seem_later_were_removed(instance: Instance) -> None:
    table = made(instance)
    add(table, 0)
    add(table, 0)
    table.compact()
    at = clock(instance)
    assert len(keys(table, at)) == 40
    change(
        table,
        "update removal set added_xids = array_fill(pg_current_xact_id(), array[cardinality(file_ids)])",
    )
    with pytest.raises(InvalidCut, match="that time twice"):
        keys(table, at)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["references", "epoch"])
def test_a_time_among_commits_without_known_times_is_refused(tmp_path: Path, what: str) -> None:
    """The server forgets commit times when all databases are frozen."""
    lake, objects = EmbeddedPostgres(tmp_path / "lake", options=OPTIONS), f"file://{tmp_path}/objects"
    with lake as server, connect(server.dsn, objects) as instance:
        table = made(instance, split_threshold_rows=10**6)
        if what == "references":
            add(table, 0)
        table.partitions.split("root", 10)
        middle = clock(instance)
        if what == "references":
            add(table, 20)
        _forget_times(server.dsn)
        at = clock(instance)
        for when in (middle, at):
            with pytest.raises(CutExpired, match="does not know the times of all commits since the last cut"):
                keys(table, when)
        cut = table.history.record_cut()
        add(table, 40)
        assert keys(table, clock(instance)) == keys(table)
        assert len(keys(table, cut)) == len(keys(table)) - 20


def _forget_times(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("alter database template0 allow_connections true")
        ((now,),) = conn.execute("select pg_current_xact_id()::xid").fetchall()
        names = [name for (name,) in conn.execute("select datname from pg_database").fetchall()]

        def are_forgotten() -> bool:
            conn.execute("select pg_current_xact_id()")  # the server always knows the time of the last commit
            for name in names:
                with psycopg.connect(make_conninfo(dsn, dbname=name), autocommit=True) as other:
                    other.execute("vacuum (freeze)")
            found = conn.execute("select pg_xact_commit_timestamp(%s::text::xid)", [str(now)]).fetchall()
            return found == [(None,)]

        # each round freezes the transactions of the round before
        wait_until(are_forgotten)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with streaming() as found:
        yield found


@pytest.fixture
def both(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Instance, Instance]]:
    """Yields an instance on the primary, and one on the standby, which only reads."""
    objects = _objects(tmp_path_factory)
    with connect(pair.primary, objects) as primary:
        for table in primary.tables():
            primary.drop_table(table if isinstance(table, str) else table.name)
        pair.catch_up()
        with connect(pair.standby, objects) as standby:
            yield primary, standby


_known: list[str] = []


def _objects(factory: pytest.TempPathFactory) -> str:
    """Returns the URL of one object store for all tests of the pair, since a database has one store."""
    if not _known:
        _known.append((factory.mktemp("standby") / "objects").as_uri())
    return _known[0]


@pytest.mark.slow
def test_a_standby_refuses_times_that_it_has_not_replayed(
    pair: Pair, both: tuple[Instance, Instance]
) -> None:
    primary, standby = both
    table = made(primary)
    add(table, 0)
    first = clock(primary)
    add(table, 20)
    pair.catch_up()
    copy = standby.table("t")
    with pair.behind():
        add(table, 40)
        late = clock(primary)
        add(table, 60)
        for call in _reads(copy, late):
            with pytest.raises(
                InvalidCut, match=r"the database is a standby, which has replayed .* till .* primary"
            ):
                call()
        with pytest.raises(InvalidCut, match="is in the future"):
            keys(copy, late + timedelta(hours=1))
        assert len(keys(copy, first)) == 20
        assert len(keys(copy)) == 40
    pair.catch_up()
    assert len(keys(copy, late)) == 60
    assert standby.sql("select count(*) as n from t", as_of=late).read_all().to_pylist() == [{"n": 60}]


def _reads(table: Table, at: datetime) -> list[Callable[[], object]]:
    return [
        lambda: keys(table, at),
        lambda: table.changes(after=at),
        lambda: table.explain(as_of=at),
        lambda: table.sql("select * from t", as_of=at),
        lambda: table.history.size_between(at),
        lambda: list(table.history.files_at(at)),
        lambda: table.restore(at, dry_run=True),
    ]


@pytest.mark.slow
def test_a_standby_reads_history_and_refuses_writes_by_name(
    pair: Pair, both: tuple[Instance, Instance]
) -> None:
    primary, standby = both
    table = made(primary)
    add(table, 0, 80)
    cut = table.history.record_cut("a")
    table.consumer("etl")
    table.split()
    table.delete({"k": 3})
    add(table, 90, 5)
    table.compact()
    pair.catch_up()
    copy = standby.table("t")
    history, same = copy.history, table.history
    assert keys(copy, "a") == keys(table, "a") and keys(copy, cut) == keys(table, "a")
    changes = [one.changes(after="a").read_all().to_pylist() for one in (copy, table)]
    assert changes[0] == changes[1] and len(changes[0]) == 6
    for one in ("cuts", "epochs", "partitions_between", "size_between", "active_partitions"):
        assert _listed(getattr(history, one)()) == _listed(getattr(same, one)())
    assert list(history.files_at("a")) == list(same.files_at("a"))
    assert history.apply_retention(dry_run=True) == same.apply_retention(dry_run=True)
    assert copy.restore("a", dry_run=True) == table.restore("a", dry_run=True)
    assert [one.name for one in copy.consumers()] == ["etl"]
    assert copy.consumer("etl").read().read_all().num_rows == 6
    assert copy.status().history_held_by == table.status().history_held_by
    for call in (
        history.record_cut, history.apply_retention, copy.consumer("etl").acknowledge,
        lambda: copy.consumer("new"), lambda: history.truncate("a"), lambda: history.drop_cut("a"),
        lambda: copy.restore("a"), lambda: copy.drop_consumer("etl"), lambda: copy.partitions.merge([]),
    ):  # fmt: skip
        with pytest.raises(DormouseError) as raised:
            call()
        assert "\n" not in str(raised.value)
        assert isinstance(raised.value, InstanceReadOnly) or "must be partitions" in str(raised.value)


@pytest.mark.slow
def test_only_an_instance_opened_on_a_primary_retries_on_a_standby(
    pair: Pair, both: tuple[Instance, Instance], retries: Retries
) -> None:
    def tries(supplier: ConnectionSupplier) -> int:
        before, work = retries.count(), lambda conn: conn.execute("create table made ()")
        with pytest.raises(InstanceReadOnly):
            run_statement(supplier, work, attempts_max=3)
        return 1 + retries.count() - before

    with closing(ConnectionSupplier(pair.standby)) as supplier:
        assert tries(supplier) == 3, "as after a failover"
    assert tries(both[1]._supplier) == 1


def _listed(answer: Any) -> Any:
    return list(answer) if isinstance(answer, Iterator) else answer


@pytest.mark.slow
def test_a_query_of_a_standby_sees_one_moment(
    pair: Pair, both: tuple[Instance, Instance], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits that are open when it begins, and end before its next page, are not part of its moment."""
    for name in ("PAGE_LEAVES", "PAGE_LEAVES_MAX"):
        monkeypatch.setattr(table_view, name, 1)
    primary, standby = both
    table = made(primary, split_threshold_rows=10**6)
    table.partitions.split("root", 50)
    add(table, 0, 100)
    context = table.context
    pair.catch_up()
    copy = standby.table("t")
    with ExitStack() as stack:
        attempt = stack.enter_context(context.attempts.attempt(context.table))
        rows = open_source(pa.table({"k": range(60, 110), "v": [0] * 50}), context.schema)
        files = write_leaves(context, attempt, rows, lambda *_: None, 1 << 20)
        with context.supplier.connection() as conn, conn.transaction():
            context.store.add_files_with_references(files, conn=conn)
            add(table, 0, 1)  # a later transaction is committed
            pair.catch_up()
            at = clock(primary)
            pages = copy.query(columns=["k"])
            first = pages.read_next_batch()
        pair.catch_up()
        assert first.num_rows + pages.read_all().num_rows == 101
        add(table, 0, 1)
        pair.catch_up()
        assert len(keys(copy)) == 152
        assert len(keys(copy, at)) == len(keys(table, at)) == 101


@pytest.mark.slow
def test_a_change_of_columns_beside_a_slow_transaction_is_seen_on_a_standby(
    pair: Pair, both: tuple[Instance, Instance]
) -> None:
    """Files that were written after the change are read too."""
    primary, standby = both
    table = made(primary)
    add(table, 0)
    first = table.history.record_cut("first")
    with table.context.supplier.connection() as slow, slow.transaction():
        slow.execute("select pg_current_xact_id()")
        table.add_column(Field("note", STRING, nullable=True))
        table.ingest(pa.table({"k": [100], "v": [0], "note": ["new"]}))
        pair.catch_up()
        copy = standby.table("t")
        came = copy.changes(after=first).read_all().to_pylist()
        assert came == table.changes(after=first).read_all().to_pylist()
        assert [(row["k"], row["note"]) for row in came] == [(100, "new")]
