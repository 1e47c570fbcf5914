"""Row tables: changes of columns, upserts, snapshots, and the limits on their underlying tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dormouse as dm
from dormouse.errors import (
    AmbiguousRows,
    InvalidColumn,
    InvalidProperties,
    InvalidRow,
    NotARowTable,
    RowConflict,
    RowNotFound,
    SnapshotExists,
    SnapshotNotFound,
)
from dormouse.rows import batches
from dormouse.rows.columns import to_jsonb
from tests.row_indexes import query_when_ready
from tests.standard import OF_K
from tests.support.api import Instance, Table
from tests.support.rows import RowTable


@pytest.fixture
def rows(instance: Instance) -> RowTable:
    columns = [dm.Column("name", "STRING", size_max=9), dm.Column("n", "INTEGER", default=0)]
    made = instance.create_row_table("people", columns)
    made.change([dm.Insert([{"name": "1", "n": 1}, {"name": "b"}])])
    return made


def current(rows: RowTable, version: int | None = None) -> list[dict[str, Any]]:
    found = rows.current(version).read_all().to_pylist()
    return [{key: value for key, value in row.items() if key != "ROW_VERSION"} for row in found]


def test_older_versions_keep_the_columns_that_they_had(rows: RowTable) -> None:
    before = rows.snapshot("before")
    rows.change(
        [dm.DropColumn("name"), dm.RetypeColumn("n", "STRING"), dm.AddColumn(dm.Column("name", "JSON"))]
    )
    rows.table.compact()
    assert current(rows) == [{"ROW_ID": i, "n": n, "name": None} for i, n in ((1, "1"), (2, "0"))]
    expected = [{"ROW_ID": 1, "name": "1", "n": 1}, {"ROW_ID": 2, "name": "b", "n": 0}]
    assert current(rows, before.version) == expected
    assert rows.row(2, 1) == {"ROW_ID": 2, "ROW_VERSION": 1, "name": "b", "n": 0}
    assert [(column.name, column.type) for column in rows.columns(1)] == [
        ("name", "STRING"),
        ("n", "INTEGER"),
    ]


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (
            dm.RetypeColumn("name", "INTEGER"),
            InvalidRow,
            "row of ROW_ID 2, column 'name' (INTEGER): 'b' is not a",
        ),
        (
            dm.RetypeColumn("name", "STRING", enum=["1"]),
            InvalidRow,
            "row of ROW_ID 2, column 'name' (STRING): 'b'",
        ),
        (dm.AddColumn(dm.Column("NAME", "JSON")), InvalidColumn, "there is a column 'NAME' already"),
        (dm.RenameColumn("n", "name"), InvalidColumn, "there is a column 'name' already"),
        (dm.DropColumn("m"), InvalidColumn, "there is no column 'm'; the columns are name, n"),
        (dm.Insert([{"m": 1}]), InvalidRow, "row 1: there is no column 'm'; the columns are name, n"),
        (
            dm.Insert([{"ROW_ID": 1}]),
            InvalidRow,
            "row 1: a row to insert must have no ROW_ID and no ROW_VERSION",
        ),
        (dm.Update([{"ROW_ID": 1, "n": 1}]), InvalidRow, "row 1: it has no ROW_VERSION: send the version"),
        (dm.Update([{"n": 1}]), InvalidRow, "row 1: it has no ROW_ID"),
        (dm.Remove([(1, 1), (1, 1)]), InvalidRow, "row 2: the row of ROW_ID 1 comes twice in one change"),
        (dm.Remove([(1, 1), (7, 1)]), InvalidRow, "row 2: there is no row of ROW_ID 7"),
        (dm.Remove([1]), InvalidRow, "row 1: a row to remove is (ROW_ID, ROW_VERSION), not 1"),
        (dm.Patch([{"ROW_ID": 1, "ROW_VERSION": 9, "n": 1}]), InvalidRow, "its version is 1"),
    ],
)
def test_invalid_changes_give_an_error_of_one_line(
    rows: RowTable, change: Any, error: type[Exception], said: str
) -> None:
    for dry_run in (True, False):
        with pytest.raises(error) as raised:
            rows.change([dm.Insert([{"name": "1"}]), change], dry_run=dry_run)
        assert said in str(raised.value) and "\n" not in str(raised.value)
    assert rows.version() == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            [dm.RenameColumn("name", "called"), dm.RetypeColumn("called", "STRING", 3)],
            "row of ROW_ID 3, column 'called' (STRING): 'abcdef' has 6 characters",
        ),
        (
            [dm.RenameColumn("n", "m"), dm.RetypeColumn("m", "INTEGER", enum=[0])],
            "row of ROW_ID 1, column 'm' (INTEGER): 1 is none of 0",
        ),
        (
            [dm.AddColumn(dm.Column("y", "STRING", default="abcdef")), dm.RetypeColumn("y", "STRING", 3)],
            "row of ROW_ID 1, column 'y' (STRING): 'abcdef' has 6 characters",
        ),
    ],
)
def test_a_column_that_the_same_change_renamed_or_added_is_narrowed_where_all_fits(
    rows: RowTable, changes: list[Any], said: str
) -> None:
    rows.change([dm.Insert([{"name": "abcdef"}])])
    with pytest.raises(InvalidRow) as raised:
        rows.change(changes)
    assert said in str(raised.value)
    assert rows.version() == 2


def test_a_conflict_names_each_row_that_was_changed_since(rows: RowTable) -> None:
    rows.change([dm.Patch([{"ROW_ID": 1, "n": 4}, {"ROW_ID": 2, "ROW_VERSION": 1, "n": 4}])])
    rows.change([dm.Remove([(2, 2)])])
    with pytest.raises(RowConflict) as raised:
        rows.change(
            [dm.Insert([{"n": 1}]), dm.Remove([(1, 1)]), dm.Patch([{"ROW_ID": 2, "ROW_VERSION": 2, "n": 1}])]
        )
    assert raised.value.rows == [(1, 1, 2), (2, 2, 3)]
    assert "row 1 (sent 1, now 2), row 2 (sent 2, now 3)" in str(raised.value)
    with pytest.raises(InvalidRow, match="row of ROW_ID 2 was deleted, at version 3"):
        rows.change([dm.Patch([{"ROW_ID": 2, "n": 1}])])


def test_invalid_ids_and_versions_find_no_row(rows: RowTable) -> None:
    for which in ((10**20, None), (1, 10**20), (0, None)):
        with pytest.raises(RowNotFound):
            rows.row(*which)


def test_rows_without_cells_are_deleted_or_skipped(rows: RowTable) -> None:
    assert rows.change([dm.Patch([{}, {"ROW_ID": 1, "ROW_VERSION": 1}, (2, 1, {})])]).versions == []
    done = rows.change([dm.Update([{"ROW_ID": 1, "ROW_VERSION": 1}]), dm.Patch([(2, None, None)])])
    assert (done.changed["deleted"], current(rows)) == (2, [])
    for row_id in (1, 2):
        with pytest.raises(RowNotFound, match="was deleted, at version"):
            rows.row(row_id)


def test_a_version_before_a_retype_is_read_by_old_and_new_readers(instance: Instance, rows: RowTable) -> None:
    """The version shows the values of the old column, whose name the new column has."""
    before = rows.row(1)["n"]
    known = instance.row_table("people")
    known.row(1)
    rows.change([dm.RetypeColumn("n", "STRING")])
    for table in (rows, known, instance.row_table("people")):
        assert (table.row(1, 1)["n"], table.row(1)["n"]) == (before, str(before))
        with table.current(1) as found:
            assert found.read_all().column("n")[0].as_py() == before


@pytest.mark.parametrize(("name", "expected"), [("state", "1"), ("ranges", 1)])
def test_a_row_is_read_at_one_moment(
    rows: RowTable, monkeypatch: pytest.MonkeyPatch, name: str, expected: object
) -> None:
    """The row must not mix two versions if a change commits between two queries of the database."""
    look, is_changed = getattr(rows.store, name), []

    def changed_after(*given: Any) -> Any:
        found = look(*given)
        if not is_changed:
            is_changed.append(True)
            rows.change([dm.RetypeColumn("n", "STRING")])
        return found

    monkeypatch.setattr(rows.store, name, changed_after)
    assert rows.row(1)["n"] == expected


def test_an_explicit_null_writes_the_default(rows: RowTable) -> None:
    rows.change([dm.Patch([{"ROW_ID": 1, "n": None}]), dm.Insert([{"n": None}])])
    assert [row["n"] for row in current(rows)] == [0, 0, 0]


def test_defaults_are_kept_as_they_are(instance: Instance) -> None:
    """The defaults include some that `jsonb` cannot hold, and texts that look like JSON."""
    columns = [
        dm.Column("x", "DOUBLE", default="NaN"),
        dm.Column("y", "DOUBLE", default=-math.inf),
        dm.Column("z", "DOUBLE", default=-0.0),
        dm.Column("j", "JSON", default={"b": "\0", "a": [1.5, None]}),
        dm.Column("s", "STRING", default="[1]"),
        dm.Column("n", "INTEGER", default=-(1 << 63)),
    ]
    assert ["default_text" in to_jsonb(one) for one in columns] == [True] * 4 + [False] * 2
    assert (
        to_jsonb(plain := dm.Column("p", "DOUBLE", default=1.5)) == plain.to_json()
    )  # earlier releases must be able to read it
    made = instance.create_row_table("odd", columns)
    made.change([dm.AddColumn(dm.Column("more", "DOUBLE", default=math.nan)), dm.Insert([{}])])
    found = instance.row_table("odd")
    assert repr(found.row(1)) == repr(
        {"ROW_ID": 1, "ROW_VERSION": 2, **{one.name: one.default for one in columns}, "more": math.nan}
    )
    assert repr([replace(one, column_id=None) for one in found.columns()[:-1]]) == repr(columns)
    assert math.isnan(query_when_ready(found, "select more from odd").rows[0][0])
    with instance._supplier.connection() as conn:
        # the form of earlier releases
        conn.execute(
            """update row_columns set columns =
               '[{"column_id": 4, "name": "x", "type": "DOUBLE", "default": 1.5}]'"""
        )
    assert [(one.name, one.default) for one in found.columns()] == [("x", 1.5)]


def test_each_block_has_its_own_version(rows: RowTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "BLOCK_ROWS_MAX", 3)
    done = rows.change([dm.Insert([{"n": n} for n in range(7)]), dm.Insert([{"n": 7}])])
    assert (list(done.row_ids), done.versions) == (list(range(3, 11)), [2, 3, 4, 5])
    found = rows.current().read_all().select([0, 1]).to_pylist()
    assert [row["ROW_VERSION"] for row in found] == [1, 1, 2, 2, 2, 3, 3, 3, 4, 5]


def test_snapshots_have_names_of_their_own(rows: RowTable) -> None:
    assert rows.snapshot("a").version == 1
    with pytest.raises(SnapshotExists, match="has a snapshot 'a' already"):
        rows.snapshot("a")
    rows.change([dm.Remove([(1, 1)])])
    assert [(one.name, one.version) for one in rows.snapshots()] == [("a", 1)]
    rows.drop_snapshot("a")
    with pytest.raises(SnapshotNotFound, match="no snapshot 'a'; it has none"):
        rows.drop_snapshot("a")


def test_the_history_says_who_changed_what(rows: RowTable) -> None:
    rows.change([dm.Remove([(1, 1)]), dm.RenameColumn("n", "m")], changed_by="ada")
    last, first = rows.history()
    assert (last.changed_by, last.first_version, last.last_version, last.deleted) == ("ada", 2, 3, 1)
    assert list(last.columns_changed) == ["renamed n to m"]
    assert (first.inserted, "@" in first.changed_by) == (2, True)


ROWS = st.lists(
    st.fixed_dictionaries(
        {"k": st.one_of(st.none(), st.sampled_from("abc"))},
        optional={
            "x": st.one_of(st.none(), st.sampled_from([1.5, float("nan")])),
            "s": st.sampled_from("uv"),
        },
    ),
    max_size=4,
    unique_by=lambda row: row["k"],
)


@pytest.mark.slow
def test_upserts_equal_those_of_a_naive_dict(instance: Instance) -> None:
    columns = [dm.Column("k", "STRING"), dm.Column("x", "DOUBLE"), dm.Column("s", "STRING", default="d")]
    names = (f"t{number}" for number in range(1_000))

    @settings(max_examples=8)
    @given(st.lists(ROWS, min_size=1, max_size=4))
    def check(calls: list[list[dict[str, Any]]]) -> None:
        table, model = instance.create_row_table(next(names), columns), dict[Any, dict[str, Any]]()
        for call in calls:
            counts = {"inserted": 0, "updated": 0, "deleted": 0, "unchanged": 0}
            for row in call:
                given_cells = {**row, "s": row["s"]} if "s" in row else dict(row)
                there = model.get(row["k"])
                made = {**(there or {"x": None, "s": "d"}), **given_cells}
                kind = "inserted" if there is None else "unchanged" if str(made) == str(there) else "updated"
                counts[kind] += 1
                model[row["k"]] = made
            assert table.upsert(call, on=["k"], dry_run=True).changed == counts
            assert table.upsert(call, on=["k"]).changed == counts
            found = {row["k"]: row for row in table.current(columns=["k", "x", "s"]).read_all().to_pylist()}
            assert {k: (str(row["x"]), row["s"]) for k, row in found.items()} == {
                k: (str(row["x"]), row["s"]) for k, row in model.items()
            }
        instance.drop_table(table.name)

    check()


def test_an_upsert_that_finds_two_rows_names_them(rows: RowTable) -> None:
    rows.change([dm.Insert([{"name": "b"}])])
    with pytest.raises(AmbiguousRows, match="rows of ROW_ID 2 and 3 both have name 'b'"):
        rows.upsert([{"name": "b", "n": 1}], on=["name"])
    with pytest.raises(AmbiguousRows, match="rows 1 and 3 of the upsert both have name 'z'"):
        rows.upsert([{"name": "z"}, {"name": "y"}, {"name": "z"}], on=["name"])
    assert rows.version() == 2


REFUSED: list[Callable[[Table], object]] = [
    lambda table: table.ingest(pa.table({"ROW_ID": [1]})),
    lambda table: table.delete(dm.ALL),
    lambda table: table.erase({"ROW_ID": 1}),
    lambda table: table.add_column(dm.Field("x", dm.LONG, nullable=True)),
    lambda table: table.rename_column("n", "m"),
    lambda table: table.drop_column("n"),
    lambda table: table.restore(table.history.record_cut()),
]


@pytest.mark.parametrize("use", REFUSED)
def test_the_underlying_table_is_changed_only_by_row_changes(
    instance: Instance, rows: RowTable, use: Callable[[Table], object]
) -> None:
    with pytest.raises(NotARowTable, match="'people' belongs to a row table, and only it may change"):
        use(instance.table("people"))


def test_a_table_cannot_become_a_row_table_or_cease_to_be_one(instance: Instance, rows: RowTable) -> None:
    with pytest.raises(InvalidProperties, match="rows is chosen when a table is made, and stays 'edited'"):
        rows.table.set_properties(rows="loaded")
    with pytest.raises(InvalidProperties, match="it has no keep, filter or aggregate"):
        rows.table.set_properties(filter="age_off(n, 1000)")
    with pytest.raises(NotARowTable, match="use create_row_table"):
        schema = OF_K
        instance.create_table("other", schema, properties=dm.TableProperties(rows="edited"))
    instance.create_table("plain", OF_K)
    with pytest.raises(NotARowTable, match="'plain' is not a row table"):
        instance.row_table("plain")
    assert [one.name for one in instance.row_tables()] == ["people"]


def test_moments_changes_and_consumers_work_as_for_any_table(rows: RowTable) -> None:
    consumer, cut = rows.table.consumer("copy"), rows.table.history.record_cut()
    rows.change([dm.Patch([{"ROW_ID": 1, "n": 5}]), dm.Remove([(2, 1)])])
    names = ["ROW_ID", "ROW_VERSION", "ROW_DELETED", "n"]
    changes = rows.table.changes(cut, columns=names).read_all().to_pylist()
    expected = [(1, 2, False, 5, "insert"), (2, 3, True, None, "insert")]
    assert sorted(tuple(row.values()) for row in changes) == expected
    read = consumer.read().read_all().to_pylist()
    assert sorted((row["ROW_ID"], row["ROW_VERSION"]) for row in read) == [(1, 2), (2, 3)]
    assert len(rows.table.query(as_of=cut).read_all()) == 2
    assert len(rows.table.query().read_all()) == 4


def test_a_table_that_is_dropped_is_forgotten(instance: Instance, rows: RowTable) -> None:
    rows.snapshot("a")
    instance.drop_table("people")
    with instance._supplier.connection() as conn:
        for name in ("row_table", "row_columns", "row_range", "row_change", "row_snapshot", "row_lock"):
            assert conn.execute(f"select count(*) from {name}").fetchall() == [(0,)]


def test_an_empty_text_cannot_become_a_number(rows: RowTable) -> None:
    rows.change([dm.Insert([{"name": ""}])])
    with pytest.raises(
        InvalidRow, match=r"row of ROW_ID 3, column 'name' \(INTEGER\): an empty text does not fit the type"
    ):
        rows.change(
            [dm.Remove([(2, 1)]), dm.Patch([{"ROW_ID": 1, "name": "5"}]), dm.RetypeColumn("name", "INTEGER")]
        )
