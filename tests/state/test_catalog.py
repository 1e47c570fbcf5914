"""Tests of the catalog: names, races, and the objects that dropping a table leaves."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from dormouse.errors import (
    InvalidInput,
    InvalidName,
    TableAlreadyExists,
    TableBusy,
    TableNotFound,
    TooManyRetries,
)
from dormouse.postgres import ConnectionSupplier, transaction
from dormouse.postgres.queries import IdentifierPath, Query
from dormouse.state import catalog as module
from tests.stored import at_once, blocked, file, live, query, ref, wait_until
from tests.support.model import BYTES, LIST, LONG, MAP, STRING, Field, Schema, TableProperties
from tests.support.objects import open_store
from tests.support.state import LAYOUTS, Catalog, TableContext, WriteAttempts

SCHEMA = Schema(
    [Field("k", LONG), Field("größe", BYTES)],
    [Field("s", STRING)],
    [Field("v", MAP(STRING, LIST(LONG)), nullable=True)],
)
ODD: list[Any] = [
    "",
    " ",
    "a b",
    "a.b",
    "a/b",
    "../a",
    "a'b",
    'a"b',
    "a;drop table tables",
    "%s",
    "ä",
    "1a",
    "-a",
    "a\n",
    "a\x00",
    "\ud800",
    "\N{MOUSE}",
    "x" * 129,
    None,
    7,
    b"a",
]


@pytest.fixture
def catalog(supplier: ConnectionSupplier, tmp_path: Path) -> Catalog:
    return Catalog(supplier, WriteAttempts(supplier, open_store(tmp_path)))


def create(catalog: Catalog, name: Any = "t", **properties: Any) -> Any:
    return catalog.create(name, SCHEMA, TableProperties(**properties))


def opened(dsn: str, supplier: ConnectionSupplier, tmp_path: Path, record: Any) -> TableContext:
    return TableContext(dsn, supplier, open_store(tmp_path), record)


def tables_of_postgresql(supplier: ConnectionSupplier) -> list[str]:
    text = """select relname from pg_class
              where relkind in ('r', 'i') and relname ~ '^file(_reference)?_[0-9]' order by 1"""
    return [name for (name,) in query(supplier, text)]


def test_a_table_is_found_as_it_was_made(catalog: Catalog) -> None:
    made = create(catalog, gc_delay_seconds=5, aggregate="sum(v)")
    assert catalog.get("t") == made
    assert catalog.tables() == [made]
    assert (made.schema, made.layout, made.properties.gc_delay_seconds) == (SCHEMA, "file_table", 5)


def test_tables_are_listed_by_name(catalog: Catalog) -> None:
    for name in ("b", "a", "C", "_", "a-1"):
        create(catalog, name)
    assert [t.name for t in catalog.tables()] == ["C", "_", "a", "a-1", "b"]
    assert [t.name for t in catalog.tables_like(["A", "c", "A-1", "x"])] == ["C", "a", "a-1"]


def test_names_that_differ_in_upper_and_lower_case_only_are_refused(catalog: Catalog) -> None:
    create(catalog, "Flights")
    create(catalog, "other")
    for name in ("flights", "FLIGHTS"):
        said = rf"table 'Flights' exists already, and '{name}' differs from it only in upper and lower case"
        with pytest.raises(TableAlreadyExists, match=said):
            create(catalog, name)
        with pytest.raises(TableAlreadyExists, match=said):
            catalog.rename("other", name)
    catalog.rename("Flights", "flights")
    assert [t.name for t in catalog.tables()] == ["flights", "other"]


def test_only_one_of_the_names_that_differ_in_case_is_created(catalog: Catalog) -> None:
    """Creations of tables whose names differ only in case wait for each other."""

    def made(name: str) -> bool:
        try:
            create(catalog, name)
        except TableAlreadyExists:
            return False
        return True

    with ThreadPoolExecutor(4) as threads:
        for n in range(10):
            names = [f"{a}{b}{n}" for a in "aA" for b in "bB"]
            assert sum(threads.map(made, names)) == 1


@pytest.mark.parametrize("name", ["select", "t", "_x", "A-b_9", "file_reference", "x" * 128])
def test_names_that_mean_something_to_sql_are_names_like_others(catalog: Catalog, name: str) -> None:
    assert create(catalog, name).name == name
    assert catalog.drop(name).name == name


def test_odd_names_are_refused(catalog: Catalog) -> None:
    create(catalog, "t")
    for name in ODD:
        with pytest.raises(InvalidName):
            create(catalog, name)
        with pytest.raises(InvalidName):
            catalog.rename("t", name)
        assert [t.name for t in catalog.tables()] == ["t"], name


def test_an_unknown_table_is_an_error(catalog: Catalog) -> None:
    create(catalog, "t")
    for name in [*(name for name in ODD if isinstance(name, str)), "T", "t "]:
        for use in (catalog.get, catalog.drop, lambda name: catalog.rename(name, "new")):
            with pytest.raises(TableNotFound):
                use(name)
        assert [t.name for t in catalog.tables()] == ["t"], name


def test_a_name_that_exists_is_refused_and_leaves_nothing(
    catalog: Catalog, supplier: ConnectionSupplier
) -> None:
    create(catalog)
    before = tables_of_postgresql(supplier)
    with pytest.raises(TableAlreadyExists, match="'t'"):
        create(catalog)
    assert tables_of_postgresql(supplier) == before


def test_an_unknown_layout_is_refused(catalog: Catalog) -> None:
    with pytest.raises(InvalidInput, match="nope"):
        catalog.create("t", SCHEMA, TableProperties(), layout="nope")
    assert catalog.tables() == []


def test_of_two_concurrent_creations_one_succeeds(catalog: Catalog, supplier: ConnectionSupplier) -> None:
    outcomes = at_once(*[lambda: create(catalog)] * 4)
    assert sum(isinstance(o, TableAlreadyExists) for o in outcomes) == 3
    assert len(catalog.tables()) == 1
    assert sum(not name.endswith("key") for name in tables_of_postgresql(supplier)) >= 2


def test_tables_are_created_and_dropped_concurrently(catalog: Catalog) -> None:
    def work(n: int) -> None:
        for _ in range(5):
            create(catalog, f"t{n}")
            catalog.drop(f"t{n}")

    assert at_once(*(lambda n=n: work(n) for n in range(4))) == [None] * 4
    assert catalog.tables() == []


def test_a_renamed_table_keeps_its_files(
    catalog: Catalog, dsn: str, supplier: ConnectionSupplier, tmp_path: Path
) -> None:
    table = opened(dsn, supplier, tmp_path, create(catalog, "old"))
    table.store.add_files([ref("a")])
    catalog.rename("old", "new")
    found = opened(dsn, supplier, tmp_path, catalog.get("new"))
    assert found.table.table_id == table.table.table_id
    assert live(found.store) == live(table.store)
    with pytest.raises(TableNotFound):
        catalog.get("old")
    create(catalog, "old")


def test_a_rename_onto_another_table_is_refused(catalog: Catalog) -> None:
    create(catalog, "a")
    create(catalog, "b")
    with pytest.raises(TableAlreadyExists, match="'b'"):
        catalog.rename("a", "b")
    catalog.rename("a", "a")
    assert [t.name for t in catalog.tables()] == ["a", "b"]


def test_a_drop_removes_the_postgresql_tables(catalog: Catalog, supplier: ConnectionSupplier) -> None:
    kept = create(catalog, "kept")
    before = tables_of_postgresql(supplier)
    create(catalog, "gone")
    assert len(tables_of_postgresql(supplier)) == 2 * len(before)
    catalog.drop("gone")
    assert tables_of_postgresql(supplier) == before
    assert {row[0] for row in query(supplier, "select table_id from partition")} == {kept.table_id}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_table_that_had_rows_is_not_dropped_as_unused(
    catalog: Catalog, dsn: str, supplier: ConnectionSupplier, tmp_path: Path, layout: str
) -> None:
    made = catalog.create("t", SCHEMA, TableProperties(), layout)
    store = opened(dsn, supplier, tmp_path, made).store
    store.add_files_with_references([file("a")], commit_id="c")
    with pytest.raises(TableBusy, match="'t' has been used"):
        catalog.drop_unused(made)
    store.delete_collected_files(["a"])
    with pytest.raises(TableBusy):  # a client may still ask for the commit
        catalog.drop_unused(made)
    unused = catalog.create("u", SCHEMA, TableProperties(), layout)
    catalog.rename("u", "v")
    catalog.drop_unused(unused)
    assert catalog.names() == ["t"]


def test_dropping_an_unused_row_table_waits_for_a_change_of_it(
    catalog: Catalog, supplier: ConnectionSupplier
) -> None:
    made = create(catalog)
    with ThreadPoolExecutor(1) as threads, supplier.connection() as conn:
        conn.execute("insert into row_table (table_id) values (%s)", [made.table_id])
        with conn.transaction():
            conn.execute("update row_table set version = 1")
            dropping = threads.submit(catalog.drop_unused, made)
            wait_until(lambda: blocked(supplier))
        with pytest.raises(TableBusy):
            dropping.result()
    assert catalog.names() == ["t"]


def test_one_of_concurrent_drops_succeeds(catalog: Catalog) -> None:
    create(catalog)
    outcomes = at_once(*[lambda: catalog.drop("t")] * 3)
    assert sum(isinstance(o, TableNotFound) for o in outcomes) == 2


def test_a_new_table_of_the_same_name_is_empty_and_has_an_id_of_its_own(
    catalog: Catalog, dsn: str, supplier: ConnectionSupplier, tmp_path: Path
) -> None:
    first = opened(dsn, supplier, tmp_path, create(catalog))
    first.store.add_files([ref("a")], commit_id="c")
    catalog.drop("t")
    second = opened(dsn, supplier, tmp_path, create(catalog))
    assert second.table.table_id != first.table.table_id
    assert second.store.has_no_files()
    assert second.store.add_files([ref("a")], commit_id="c") is True


def test_a_drop_waits_for_readers_and_holds_up_no_other_table(
    catalog: Catalog, dsn: str, supplier: ConnectionSupplier, tmp_path: Path
) -> None:
    table = opened(dsn, supplier, tmp_path, create(catalog, "read"))
    table.store.add_files(ref(f"f{n}") for n in range(5))
    stream = table.store.file_references()
    next(stream)
    dropping = threading.Thread(target=catalog.drop, args=["read"])
    dropping.start()
    try:
        wait_until(lambda: blocked(supplier))
        patient = ConnectionSupplier(psycopg.conninfo.make_conninfo(dsn, options="-c lock_timeout=1s"))
        create(Catalog(patient, table.attempts), "other")
        patient.close()
    finally:
        assert sum(1 for _ in stream) == 4
        dropping.join(60)
    assert [t.name for t in catalog.tables()] == ["other"]


@pytest.mark.slow
def test_sixty_tables_are_created_and_dropped(catalog: Catalog, supplier: ConnectionSupplier) -> None:
    for n in range(60):
        create(catalog, f"t{n}")
    assert len(catalog.tables()) == 60
    for n in range(60):
        catalog.drop(f"t{n}")
    assert tables_of_postgresql(supplier) == []


def test_properties_change_from_their_current_values(catalog: Catalog) -> None:
    """A caller with an outdated record does not undo the last change of the properties."""
    old = create(catalog, gc_delay_seconds=5)
    catalog.change_properties(old, lambda now: now.model_copy(update={"size_ratio": 1.5}))
    catalog.change_properties(old, lambda now: now.model_copy(update={"compression": "none"}))
    found = catalog.get("t").properties
    assert (found.gc_delay_seconds, found.size_ratio, found.compression) == (5, 1.5, "none")


def test_properties_are_those_of_the_table_and_not_of_its_name(catalog: Catalog) -> None:
    old = create(catalog)
    catalog.rename("t", "renamed")
    create(catalog)
    catalog.change_properties(old, lambda now: TableProperties(size_ratio=1.5))
    assert catalog.get("renamed").properties.size_ratio == 1.5
    assert catalog.get("t").properties == TableProperties()
    catalog.drop("renamed")
    with pytest.raises(TableNotFound):
        catalog.change_properties(old, lambda now: now)


def test_an_instance_has_an_id(catalog: Catalog) -> None:
    assert catalog.instance_id() == catalog.instance_id()
    assert len(catalog.instance_id()) == 36


@pytest.mark.parametrize("deaths", [1, 100])
def test_a_look_up_whose_connection_dies_is_retried(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, deaths: int
) -> None:
    create(catalog)
    asked = []
    found = module._QUERIES["names"]
    dying = replace(found, text="select pg_terminate_backend(pg_backend_pid())")

    class Dying(Query):
        def on(self, **identifiers: IdentifierPath) -> sql.Composed:
            asked.append(1)
            return (dying if len(asked) <= deaths else found).on(**identifiers)

    monkeypatch.setattr(transaction, "backoff_seconds", lambda attempt: 0)
    names = Dying(found.name, found.description, found.text)
    monkeypatch.setattr(module, "_QUERIES", {"names": names})
    if deaths == 1:
        assert catalog.names() == ["t"]
    else:
        with pytest.raises(TooManyRetries):
            catalog.names()


def test_the_schema_of_an_unchanged_record_is_read_once(catalog: Catalog) -> None:
    made = catalog.create("t", SCHEMA, TableProperties())
    first, second = catalog.get("t"), catalog.get("t")
    assert first == second == made
    assert first.schema is second.schema
    changed = catalog.change_properties(made, lambda now: now.model_copy(update={"size_ratio": 1.5}))
    assert catalog.get("t") == changed != first
