"""Tests of reads. Each sees one consistent snapshot, and does not hold all of it in memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest

from dormouse.errors import TableNotFound
from dormouse.postgres import ConnectionSupplier
from dormouse.state.files import store as store_module
from tests.stored import (
    CountingSupplier,
    assign,
    file,
    live,
    query,
    ref,
    remove,
    replace,
    split,
    unreferenced,
)
from tests.support.state import FileReferenceStore, TableContext

REFERENCES = 10_000


def test_an_empty_store_returns_nothing(store: FileReferenceStore) -> None:
    assert store.has_no_files()
    assert list(store.file_references()) == list(store.unassigned_file_references()) == []
    assert store.file_references_in(["root"]) == []
    assert store.partition_to_filenames() == {}
    assert store.is_assigned([]) is True
    report = store.all_files(0)
    assert (report.files, report.more_than_max) == ((), False)


def test_unassigned_references_are_those_without_a_job(store: FileReferenceStore) -> None:
    store.add_files([ref("b"), ref("a"), ref("a", "L")])
    store.assign_job_ids([assign("j", "root", "a")])
    found = [(r.partition_id, r.filename) for r in store.unassigned_file_references()]
    assert found == [("L", "a"), ("root", "b")]


def test_references_of_given_partitions_are_returned(store: FileReferenceStore) -> None:
    store.add_files([ref("b", "L"), ref("a", "L"), ref("a", "R"), ref("c", "M")])
    found = [(r.partition_id, r.filename) for r in store.file_references_in(iter(["R", "L", "none", "L"]))]
    assert found == [("L", "a"), ("L", "b"), ("R", "a")]
    assert store.file_references_in([]) == []


@pytest.mark.parametrize("odd", ["\x00", "\ud800", "", "x" * 10_000])
def test_impossible_partition_ids_have_no_references(store: FileReferenceStore, odd: str) -> None:
    store.add_files([ref("a")])
    assert [r.filename for r in store.file_references_in([odd, "root"])] == ["a"]


@pytest.mark.few(1)
def test_references_of_given_partitions_are_read_with_an_index(table: TableContext) -> None:
    store = table.store
    store.add_files(ref(f"f{n}", f"p{n % 500}") for n in range(5_000))
    query(table.supplier, f"analyze {store.own.layout.tables(table.table.table_id)['file_reference']}")
    text = store.own.layout.on("references_in", table.table.table_id)
    with table.supplier.connection() as conn:
        explain = b"explain " + text.as_bytes(conn)
        plan = conn.execute(explain, {"partition_ids": ["p1", "p2"]}).fetchall()  # type: ignore[arg-type]
    assert not any("Seq Scan" in line for (line,) in plan), plan


def test_filenames_are_grouped_by_partition(store: FileReferenceStore) -> None:
    store.add_files([ref("b", "L"), ref("a", "L"), ref("a", "R"), ref("gone", "M")])
    remove(store, "gone", partition_id="M")
    assert store.partition_to_filenames() == {"L": ["a", "b"], "R": ["a"]}


def test_unreferenced_files_count_as_files(store: FileReferenceStore) -> None:
    store.add_files([ref("a")])
    remove(store, "a")
    assert not store.has_no_files()
    store.delete_collected_files(["a"])
    assert store.has_no_files()


class TestReport:
    """Tests of `all_files`."""

    def test_a_referenced_file_is_listed(self, store: FileReferenceStore) -> None:
        store.add_files([ref("a", rows=3)])
        report = store.all_files(0)
        assert [(f.filename, len(f.references)) for f in report.files] == [("a", 1)]
        assert report.files[0].references[0].row_count == 3
        assert report.more_than_max is False

    def test_an_unreferenced_file_is_listed(self, store: FileReferenceStore) -> None:
        store.add_files_with_references([file("a", byte_count=5)])
        report = store.all_files(1)
        assert [(f.filename, f.references, f.byte_count) for f in report.files] == [("a", (), 5)]
        assert report.more_than_max is False

    def test_a_split_file_is_listed_once_with_both_references(self, store: FileReferenceStore) -> None:
        store.add_files([ref("a")])
        store.split_file_references([split(ref("a"))])
        (found,) = store.all_files(9).files
        assert [r.partition_id for r in found.references] == ["L", "R"]

    def test_a_half_removed_file_is_referenced(self, store: FileReferenceStore) -> None:
        store.add_files([ref("a", "L"), ref("a", "R")])
        remove(store, "a", partition_id="L")
        (found,) = store.all_files(0).files
        assert [r.partition_id for r in found.references] == ["R"]

    @pytest.mark.parametrize(
        ("limit", "names", "more"), [(0, "", True), (1, "a", True), (2, "ab", True), (3, "abc", False)]
    )
    def test_unreferenced_files_are_listed_up_to_a_limit(
        self, store: FileReferenceStore, limit: int, names: str, more: bool
    ) -> None:
        store.add_files([ref("live"), ref("b"), ref("c"), ref("a")])
        remove(store, "b", "c", "a")
        report = store.all_files(limit)
        assert [f.filename for f in report.unreferenced] == list(names)
        assert report.more_than_max is more
        assert len(report.files) == limit + 1


class TestStream:
    """Tests of `file_references`, on a table with many references."""

    @pytest.mark.slow
    def test_memory_is_bounded_by_the_page_and_not_by_the_table(
        self, table: TableContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(store_module, "PAGE_ROWS", 500)
        table.store.add_files(ref(f"file-{n:06}") for n in range(REFERENCES))
        tracemalloc.start()
        try:
            count = sum(1 for _ in table.store.file_references())
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert count == REFERENCES
        assert peak < 1_000_000

    def test_references_are_fetched_a_page_at_a_time(
        self, table: TableContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The test examines the statement on the server, because Python cannot measure the memory of
        libpq.
        """
        monkeypatch.setattr(store_module, "PAGE_ROWS", 10)
        table.store.add_files(ref(f"file-{n:06}") for n in range(100))
        stream = table.store.file_references()
        next(stream)
        text = "select query from pg_stat_activity where state = 'idle in transaction'"
        assert any("FETCH FORWARD 10 " in row[0] for row in query(table.supplier, text))
        assert sum(1 for _ in stream) == 99

    @pytest.mark.few(2)
    @pytest.mark.at_each_isolation
    def test_a_stream_sees_one_snapshot_during_commits(
        self, table: TableContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(store_module, "PAGE_ROWS", 7)
        store = table.store
        names = [f"f{n:03}" for n in range(60)]
        store.add_files(ref(name) for name in names)
        before = live(store)
        seen = []
        for number, reference in enumerate(store.file_references()):
            seen.append((reference.partition_id, reference.filename, reference.row_count, reference.job_id))
            name = names[-1 - number]
            store.assign_job_ids([assign(f"j{number}", "root", name)])
            store.replace_file_references([replace(f"j{number}", [name], f"new-{name}")])
        assert seen == before
        assert [f for _, f, _, _ in live(store)] == [f"new-{name}" for name in names]

    def test_a_reader_that_stops_early_returns_its_connection(self, dsn: str, table: TableContext) -> None:
        small = ConnectionSupplier(table.dsn, connections_max=1, wait_seconds_max=5)
        store = FileReferenceStore(small, table.table)
        store.add_files([ref("a"), ref("b")])
        for _ in store.file_references():
            break
        assert [f for _, f, _, _ in live(store)] == ["a", "b"]
        small.close()


def test_an_empty_update_opens_no_transaction(table: TableContext) -> None:
    counting = CountingSupplier(table.supplier)  # type: ignore[arg-type]
    store = FileReferenceStore(counting, table.table)
    assert store.add_files([]) is True
    assert store.add_files_with_references(iter(())) is True
    assert store.assign_job_ids([]) is True
    assert store.replace_file_references([]) is True
    assert store.split_file_references([]) is True
    assert store.delete_collected_files([]) is True
    assert counting.lent == 0
    store.add_files([ref("a")])
    assert counting.lent == 1


class TestTables:
    """Tests of two tables in one database."""

    def test_two_tables_never_see_each_other(self, another_table: Callable[[], TableContext]) -> None:
        one, two = another_table().store, another_table().store
        for store, rows in ((one, 1), (two, 2)):
            store.add_files([ref("a", rows=rows), ref("b", rows=rows)], commit_id="same")
            store.add_files_with_references([file(f"only {rows}")])
        one.assign_job_ids([assign("j", "root", "a")])
        assert live(two) == [("root", "a", 2, None), ("root", "b", 2, None)]
        two.assign_job_ids([assign("j", "root", "b")])
        two.unassign_job("j")
        assert live(one) == [("root", "a", 1, "j"), ("root", "b", 1, None)]
        one.replace_file_references([replace("j", ["a"], None)])
        assert (unreferenced(one), unreferenced(two)) == (["a", "only 1"], ["only 2"])
        one.stamp_unreferenced()
        one.delete_collected_files(["a"])
        assert [f for _, f, _, _ in live(two)] == ["a", "b"]

    def test_clear_deletes_every_file_of_this_table_and_of_no_other(
        self, another_table: Callable[[], TableContext]
    ) -> None:
        tables = another_table(), another_table()
        for table in tables:
            table.store.add_files([ref("a"), ref("b"), ref("c")])
            table.store.assign_job_ids([assign("j", "root", "a")])
            remove(table.store, "b")
        tables[0].store.clear()
        assert tables[0].store.has_no_files()
        assert tables[0].jobs.count() == (0, 0)
        assert not tables[1].store.has_no_files()
        assert tables[1].jobs.count() == (1, 0)
        assert unreferenced(tables[1].store) == ["b"]
        tables[0].store.add_files([ref("a"), ref("b")])
        assert tables[0].store.stamp_unreferenced() == 0

    def test_reading_a_dropped_table_raises_table_not_found(self, table: TableContext) -> None:
        from tests.support.state import Catalog

        Catalog(table.supplier, table.attempts).drop(table.table.name)
        for use in (
            lambda: table.store.add_files([ref("a")]),
            lambda: list(table.store.file_references()),
            table.store.has_no_files,
            lambda: table.store.assign_job_ids([assign("j", "root", "a")]),
            table.partitions.tree,
            table.jobs.create,
            table.garbage.collect,
        ):
            with pytest.raises(TableNotFound, match=table.table.name):
                use()
