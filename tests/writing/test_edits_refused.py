"""Bad input of edits and transactions: the error is one clear line, and nothing is changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from keyed_tables import SCHEMA, data

import dormouse as dm
from dormouse.errors import AmbiguousRows, DormouseError, InvalidInput, NotARowTable, TableNotFound
from tests.support.api import Instance, Table

ROWS = [(1, 1, "a"), (2, 2, "b"), (3, 3, None)]
SOURCE = pa.table({"k": [1, 5], "v": [10, 50], "s": ["n", "m"]})
ALL_OF_SOURCE = [dm.WhenMatched(update="*"), dm.WhenNotMatched(insert="*")]


@dataclass
class Tables:
    """The tables of a test: one keyed, one that keeps every row, one whose filter hides rows, and others."""

    instance: Instance
    keyed: Table
    every: Table
    filtered: Table

    def rows(self) -> dict[str, Any]:
        tables = self.keyed, self.every, self.filtered
        return {table.name: table.query().read_all().to_pydict() for table in tables}

    def state(self) -> Any:
        """Returns all rows, and the numbers of files and deletions."""
        tables = self.instance.tables()
        counts = [(len(table.file_page()), len(table.deletions(pending_only=False))) for table in tables]
        return self.rows(), [table.name for table in tables], counts


@pytest.fixture
def tables(instance: Instance) -> Tables:
    newest = dm.TableProperties(keep="newest_row")
    of_time = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("v", dm.TIMESTAMP)])
    found = Tables(
        instance,
        instance.create_table("keyed", SCHEMA, properties=newest),
        instance.create_table("every", SCHEMA),
        instance.create_table(
            "filtered", of_time, properties=dm.TableProperties(filter="age_off(v, 86400000)")
        ),
    )
    found.keyed.upsert(data(ROWS))
    found.every.ingest(data(ROWS))
    instance.create_row_table("edited", [dm.Column("v", "INTEGER")])
    return found


@contextmanager
def refused(tables: Tables, kind: type[Exception], *words: str, before: Any = None) -> Iterator[None]:
    """Checks that the block raises an error of one line with these words, and changes nothing.

    `before` is the state of the tables, if it is known.
    """
    before = before or tables.state()
    with pytest.raises(kind) as caught:
        yield
    message = str(caught.value)
    assert message
    assert "\n" not in message, message
    assert len(message) < 400, message
    for word in words:
        assert word in message, message
    assert tables.state() == before


Case = tuple[Callable[[Tables], object], type[Exception], str]
UPDATES: dict[str, Case] = {
    "an unknown column to set": (lambda t: t.every.update({"k": 1}, {"no": 1}), InvalidInput, "'no'"),
    "an unknown column in where": (lambda t: t.every.update({"no": 1}, {"v": 1}), InvalidInput, "'no'"),
    "an unknown column in a condition": (
        lambda t: t.every.update(dm.sql("nope > 1"), {"v": 1}),
        InvalidInput,
        "nope",
    ),
    "an unknown column in an expression": (
        lambda t: t.keyed.update({"k": 1}, {"v": dm.sql("nope + 1")}),
        InvalidInput,
        "nope",
    ),
    "a broken expression": (lambda t: t.every.update({"k": 1}, {"v": dm.sql("v +")}), InvalidInput, "v +"),
    "an expression that ends early": (
        lambda t: t.every.update({"k": 1}, {"v": dm.sql("1) from every; drop table every --")}),
        InvalidInput,
        "v",
    ),
    "a statement in place of an expression": (
        lambda t: t.every.update({"k": 1}, {"v": dm.sql("select 1")}),
        InvalidInput,
        "'v'",
    ),
    "an expression over another table": (
        lambda t: t.every.update({"k": 1}, {"v": dm.sql("(select max(v) from keyed)")}),
        InvalidInput,
        "reads no other table",
    ),
    "an expression over the same table": (
        lambda t: t.every.update({"k": 1}, {"v": dm.sql("(select max(v) from every)")}),
        InvalidInput,
        "every",
    ),
    "a condition over another table": (
        lambda t: t.every.update(dm.sql("k in (select k from keyed)"), {"v": 1}),
        InvalidInput,
        "reads no other table",
    ),
    "a file in an expression": (
        lambda t: t.every.update({"k": 1}, {"s": dm.sql("(select content from read_text('/etc/passwd'))")}),
        InvalidInput,
        "reads no other table",
    ),
    "an aggregate": (lambda t: t.every.update({"k": 1}, {"v": dm.sql("sum(v)")}), InvalidInput, "sum"),
    "a window": (
        lambda t: t.every.update({"k": 1}, {"v": dm.sql("row_number() over ()")}),
        InvalidInput,
        "window",
    ),
    "a key of a keyed table": (lambda t: t.keyed.update({"v": 1}, {"k": 9}), InvalidInput, "'k'"),
    "no values": (lambda t: t.every.update({"k": 1}, {}), InvalidInput, ""),
    "a condition that limits nothing": (lambda t: t.every.update({}, {"v": 1}), InvalidInput, "dm.ALL"),
    "a condition of another type": (lambda t: t.every.update(5, {"v": 1}), InvalidInput, "5"),
    "values of another type": (lambda t: t.every.update({"k": 1}, [("v", 1)]), InvalidInput, "v"),
    "a value of another type": (lambda t: t.every.update({"k": 1}, {"v": "x"}), InvalidInput, "'v'"),
    "a value that is too large": (lambda t: t.every.update({"k": 1}, {"v": 2**63}), InvalidInput, "'v'"),
    "null where none may be": (lambda t: t.every.update({"k": 1}, {"v": None}), InvalidInput, "'v'"),
    "an expression that is null": (
        lambda t: t.every.update(dm.ALL, {"v": dm.sql("nullif(v, 2)")}),
        InvalidInput,
        "v",
    ),
    "an expression of another type": (
        lambda t: t.every.update({"k": 1}, {"v": dm.sql("s")}),
        InvalidInput,
        "a",
    ),
    "a sum that overflows": (
        lambda t: t.every.update({"k": 1}, {"v": dm.sql("v + 9223372036854775807")}),
        InvalidInput,
        "",
    ),
    "a condition that is no truth value": (
        lambda t: t.every.update(dm.sql("s || 'x'"), {"v": 1}),
        InvalidInput,
        "",
    ),
    "a condition that fails": (
        lambda t: t.every.update(dm.sql("cast(s as int) = 1"), {"v": dm.sql("v + 1")}),
        InvalidInput,
        "update of table 'every': a condition or a value of 'v': Could not convert",
    ),
    "an empty expression": (lambda t: dm.sql("  "), InvalidInput, "expression"),
    "an expression that is no text": (lambda t: dm.sql(5), InvalidInput, "5"),  # type: ignore[arg-type]
    "no attempts": (
        lambda t: t.every.update({"k": 1}, {"v": 1}, attempts_max=0),
        InvalidInput,
        "attempts_max",
    ),
    "rows that a filter hides": (
        lambda t: t.filtered.update({"k": 1}, {"v": dm.sql("v")}),
        InvalidInput,
        "filter",
    ),
    "a row table": (
        lambda t: t.instance.table("edited").update({"_row_id": 1}, {"v": 1}),
        NotARowTable,
        "edited",
    ),
}


def merge(table: Table, source: Any = SOURCE, on: Any = ("k",), when: Any = ALL_OF_SOURCE) -> object:
    return table.merge_into(source, list(on) if isinstance(on, tuple) else on, when)


MERGES: dict[str, Case] = {
    "an unknown column in on": (lambda t: merge(t.every, on=["no"]), InvalidInput, "'no'"),
    "a column that the source lacks": (
        lambda t: merge(t.every, SOURCE.drop_columns("s"), ["s"]),
        InvalidInput,
        "on: the source has no column 's'",
    ),
    "an unknown column of a clause": (
        lambda t: merge(t.every, when=[dm.WhenMatched(update={"no": 1})]),
        InvalidInput,
        "'no'",
    ),
    "an unknown column in an insert": (
        lambda t: merge(t.every, when=[dm.WhenNotMatched(insert=["k", "no"])]),
        InvalidInput,
        "'no'",
    ),
    "a condition of a clause over another table": (
        lambda t: merge(t.every, when=[dm.WhenMatched("t.k in (select k from keyed)", delete=True)]),
        InvalidInput,
        "reads no other table",
    ),
    "a broken condition": (
        lambda t: merge(t.every, when=[dm.WhenMatched("t.k >", delete=True)]),
        InvalidInput,
        "t.k >",
    ),
    "the source in a clause without one": (
        lambda t: merge(t.every, when=[dm.WhenNotMatchedBySource("s.v > 1", delete=True)]),
        InvalidInput,
        "",
    ),
    "the target in a clause without one": (
        lambda t: merge(t.every, when=[dm.WhenNotMatched("t.v > 1", insert="*")]),
        InvalidInput,
        "",
    ),
    "a key of a keyed table": (
        lambda t: merge(t.keyed, when=[dm.WhenMatched(update={"k": 9})]),
        InvalidInput,
        "'k'",
    ),
    "an insert without a column that may not be null": (
        lambda t: merge(t.every, when=[dm.WhenNotMatched(insert=["k", "s"])]),
        InvalidInput,
        "merge into table 'every': clause 1: column 'v' must not be null, and the row with k",
    ),
    "two rows for one row": (
        lambda t: merge(t.every, pa.concat_tables([SOURCE, SOURCE])),
        AmbiguousRows,
        "1",
    ),
    "two rows for one key": (
        lambda t: merge(t.keyed, pa.concat_tables([SOURCE, SOURCE])),
        AmbiguousRows,
        "1",
    ),
    "two new rows of one key": (
        lambda t: merge(t.keyed, pa.table({"k": [7, 7], "v": [1, 2], "s": ["", ""]})),
        AmbiguousRows,
        "7",
    ),
    "no clause": (lambda t: merge(t.every, when=[]), InvalidInput, ""),
    "a clause of another type": (lambda t: merge(t.every, when=["delete"]), InvalidInput, "delete"),
    "update and delete": (
        lambda t: merge(t.every, when=[dm.WhenMatched(update="*", delete=True)]),
        InvalidInput,
        "delete",
    ),
    "a source that cannot be read": (
        lambda t: merge(t.every, "/does/not/exist.parquet"),
        DormouseError,
        "/does/not/exist.parquet",
    ),
    "a query of no table": (
        lambda t: merge(t.every, dm.sql("select * from absent")),
        DormouseError,
        "absent",
    ),
    "a query that is no query": (
        lambda t: merge(t.every, dm.sql("drop table every")),
        InvalidInput,
        "drop",
    ),
    "source columns that do not fit": (
        lambda t: merge(t.every, pa.table({"k": [1], "v": ["x"], "s": ["y"]})),
        InvalidInput,
        "v",
    ),
    "a value that is null where none may be": (
        lambda t: merge(
            t.every,
            pa.table({"k": [7], "w": pa.nulls(1)}),
            when=[
                dm.WhenMatched(delete=True),
                dm.WhenNotMatched(insert={"k": dm.sql("k"), "v": dm.sql("w")}),
            ],
        ),
        InvalidInput,
        "merge into table 'every': clause 2: column 'v' must not be null, and the row with k 7",
    ),
    "a column named like the source": (
        lambda t: merge(t.every, on=dm.sql("t.k = s.no")),
        InvalidInput,
        "'s.no'",
    ),
    "a condition that fails": (
        lambda t: merge(t.every, when=[dm.WhenMatched("cast(s.s as int) = 1", update=["v"])]),
        InvalidInput,
        "merge into table 'every': a condition or a value of 'v': Could not convert",
    ),
    "a blank condition": (
        lambda t: merge(t.every, when=[dm.WhenMatched(" ", update=["v"])]),
        InvalidInput,
        "merge into table 'every': clause 1: condition: give a condition in SQL, not ' '",
    ),
    "a list as a column": (lambda t: merge(t.every, on=[["k"]]), InvalidInput, "on: unknown column ['k']"),
    "null as on": (lambda t: merge(t.every, on=None), InvalidInput, "on: give a list of columns or a cond"),
    "no join": (lambda t: merge(t.every, on=[]), InvalidInput, "on"),
    "rows that a filter hides": (
        lambda t: merge(t.filtered, {"k": [1]}, when=[dm.WhenMatched(delete=True)]),
        InvalidInput,
        "filter",
    ),
    "a row table": (lambda t: merge(t.instance.table("edited")), NotARowTable, "edited"),
}
STATEMENTS: dict[str, tuple[str, type[Exception], str]] = {
    "an unknown table": ("update absent set v = 1", DormouseError, "absent"),
    "an unknown column": ("update every set no = 1", InvalidInput, "no"),
    "a table of another instance": (
        "insert into every select * from elsewhere.main.t",
        DormouseError,
        "elsewhere",
    ),
    "a target in another instance": ("delete from elsewhere.main.every", DormouseError, "elsewhere"),
    "two statements": ("delete from every; delete from keyed", InvalidInput, ""),
    "no statement": ("  ", InvalidInput, ""),
    "no SQL": ("update update", InvalidInput, ""),
    "a statement that only reads": ("select 1", InvalidInput, "sql"),
    "a statement about tables": ("drop table every", InvalidInput, ""),
    "another statement about tables": ("create table x as select 1", InvalidInput, ""),
    "a setting": ("set threads = 1", InvalidInput, ""),
    "a copy": ("copy every to '/tmp/x.csv'", InvalidInput, ""),
    "attaching": ("attach '/tmp/x.db' as elsewhere", InvalidInput, ""),
    "a file as the source": ("insert into every select * from read_csv('/etc/passwd')", DormouseError, ""),
    "a file as a table": ("insert into every select * from '/etc/passwd'", DormouseError, ""),
    "a key of a keyed table": ("update keyed set k = 9", InvalidInput, "k"),
    "too many values": ("insert into every values (1, 2, 'x', 4)", InvalidInput, ""),
    "too few values": ("insert into every (k, v) values (1)", InvalidInput, ""),
    "null where none may be": ("insert into every (k, v) values (1, null)", InvalidInput, "v"),
    "a missing parameter": ("delete from every where k = $1", InvalidInput, ""),
    "rows that a filter hides": ("update filtered set k = 1", InvalidInput, "filter"),
    "a row table": ("delete from edited", NotARowTable, "edited"),
}


@pytest.mark.parametrize("cases", [UPDATES, MERGES], ids=["updates", "merges"])
def test_a_bad_edit_is_one_clear_line(tables: Tables, cases: dict[str, Case]) -> None:
    before = tables.state()
    for work, kind, word in cases.values():
        with refused(tables, kind, word, before=before):
            work(tables)


def test_a_bad_statement_is_one_clear_line(tables: Tables) -> None:
    before = tables.state()
    for statement, kind, word in STATEMENTS.values():
        with refused(tables, kind, word, before=before):
            tables.instance.execute(statement)


def test_bad_replacements_and_partial_upserts_are_one_clear_line(tables: Tables) -> None:
    with refused(tables, InvalidInput, "'no'"):
        tables.every.replace({"no": 1}, data(ROWS))
    with refused(tables, InvalidInput, "replace rows of table 'every': {}"):
        tables.every.replace({}, data(ROWS))
    with refused(tables, InvalidInput, "'s'"):
        tables.every.replace({"k": 1}, pa.table({"k": [1], "v": [1], "s": [5]}))
    with refused(tables, NotARowTable, "edited"):
        tables.instance.table("edited").replace({"_row_id": 1}, {"v": [1]})
    with refused(tables, InvalidInput, "'k'"):
        tables.keyed.upsert({"v": [1]})
    with refused(tables, InvalidInput, "'v'"):
        tables.keyed.upsert({"k": [77], "s": ["a new key, without v"]})
    with refused(tables, InvalidInput, "'no'"):
        tables.keyed.upsert({"k": [1], "no": [1]})


def test_a_transaction_cannot_be_used_after_its_end(tables: Tables) -> None:
    with tables.instance.transaction() as transaction:
        transaction.ingest("every", data([(4, 4, None)]))
    for work in (
        lambda: transaction.ingest("every", data([(5, 5, None)])),
        lambda: transaction.delete("every", {"k": 1}),
        lambda: transaction.update("every", {"k": 1}, {"v": 9}),
        transaction.__enter__,
    ):
        with refused(tables, DormouseError, "transaction"):
            work()


def test_a_transaction_cannot_be_used_before_its_beginning(tables: Tables) -> None:
    transaction = tables.instance.transaction()
    with refused(tables, DormouseError, "transaction"):
        transaction.ingest("every", data([(5, 5, None)]))


def test_a_transaction_cannot_be_used_after_an_error_has_left_it(tables: Tables) -> None:
    before = tables.state()
    with pytest.raises(KeyError), tables.instance.transaction() as transaction:
        transaction.ingest("every", data([(4, 4, None)]))
        raise KeyError
    assert tables.state() == before
    with refused(tables, DormouseError, "transaction"):
        transaction.ingest("every", data([(5, 5, None)]))


def test_the_source_of_a_merge_cannot_be_a_table_that_its_transaction_has_changed(tables: Tables) -> None:
    source, when = dm.sql("select k, v + 1 as v, s from EVERY where k = 1"), [dm.WhenMatched(update="*")]
    with (
        refused(tables, InvalidInput, "table 'every': a query reads it as it was"),
        tables.instance.transaction() as transaction,
    ):
        transaction.update("every", {"k": 2}, {"v": 9})
        transaction.merge_into("keyed", source, ["k"], when)
    with tables.instance.transaction() as transaction:
        transaction.merge_into("keyed", source, ["k"], when)
        transaction.update("every", {"k": 2}, {"v": 9})
        # the merge is computed again, after the change
        tables.instance.table("keyed").upsert(data([(1, 50, None)]))
    assert transaction.attempts == 2
    assert transaction.applied


def test_a_transaction_cannot_be_used_by_two_threads(tables: Tables) -> None:
    found: list[BaseException] = []
    before = tables.state()
    with tables.instance.transaction() as transaction:
        transaction.update("every", {"k": 1}, {"v": 9})

        def work() -> None:
            try:
                transaction.delete("keyed", {"k": 1})
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    [error] = found
    assert isinstance(error, DormouseError)
    assert "thread" in str(error)
    assert "\n" not in str(error)
    after = tables.state()
    assert after[0]["keyed"] == before[0]["keyed"]
    assert after[0]["every"]["v"] == [9, 2, 3]


def test_transactions_cannot_be_nested(tables: Tables) -> None:
    with refused(tables, DormouseError, "transaction"), tables.instance.transaction() as outer:
        outer.update("every", {"k": 1}, {"v": 9})
        with tables.instance.transaction() as inner:
            inner.update("keyed", {"k": 1}, {"v": 9})
    with tables.instance.transaction() as later:
        later.update("every", {"k": 1}, {"v": 9})
    assert tables.rows()["every"]["v"] == [9, 2, 3]


def test_a_refused_operation_leaves_a_transaction_without_effect(tables: Tables) -> None:
    with refused(tables, InvalidInput, "nope"), tables.instance.transaction() as transaction:
        transaction.update("every", {"k": 1}, {"v": 9})
        transaction.update("keyed", {"k": 1}, {"v": dm.sql("nope")})


def test_a_change_that_was_refused_is_no_part_of_its_transaction(tables: Tables) -> None:
    before = tables.rows()
    with tables.instance.transaction("one") as transaction:
        for refuse in (
            lambda: transaction.update("every", {"k": 1}, {"v": dm.sql("nope")}),
            lambda: transaction.put_payloads([("n", "id", "no time", "k", 1)]),  # type: ignore[list-item]
        ):
            with pytest.raises(DormouseError):
                refuse()
    assert transaction.applied is None
    assert tables.rows() == before
    with tables.instance.transaction("one") as transaction:
        with pytest.raises(InvalidInput):
            transaction.update("every", {"k": 1}, {"v": dm.sql("nope")})
        source = dm.sql("select k, 7 as v, s from every where k = 1")
        transaction.merge_into("keyed", source, ["k"], [dm.WhenMatched(update="*")])
    assert transaction.applied
    assert tables.rows()["keyed"]["v"][0] == 7


@pytest.mark.parametrize("name", ["absent", "edited"])
def test_a_transaction_over_a_table_that_is_absent_or_edited_by_row_is_refused(
    tables: Tables, name: str
) -> None:
    with refused(tables, DormouseError, name), tables.instance.transaction() as transaction:
        transaction.update("every", {"k": 1}, {"v": 9})
        transaction.ingest(name, data(ROWS))


def test_an_edit_of_a_table_that_was_dropped_is_refused(tables: Tables) -> None:
    gone = tables.instance.create_table("gone", SCHEMA)
    gone.ingest(data(ROWS))
    tables.instance.drop_table("gone")
    for work in (
        lambda: gone.update({"k": 1}, {"v": 1}),
        lambda: merge(gone),
        lambda: gone.replace({"k": 1}, data(ROWS)),
        lambda: tables.instance.execute("delete from gone"),
    ):
        with refused(tables, DormouseError, "gone"):
            work()


def test_a_source_that_changes_while_it_is_read_is_refused(tables: Tables, tmp_path: Path) -> None:
    """The file gets other rows after the edit has looked at its columns."""
    path = tmp_path / "source.parquet"

    class Changing(list[Path]):
        """A list of paths whose file is written anew each time that it is listed."""

        def __iter__(self) -> Iterator[Path]:
            self.listed = getattr(self, "listed", 0) + 1
            pq.write_table(data([(1, self.listed, "new")] * self.listed), path)
            return super().__iter__()

    pq.write_table(SOURCE, path)
    before = tables.rows()
    try:
        merge(tables.keyed, Changing([path]))
    except DormouseError as error:
        assert "\n" not in str(error)
        assert tables.rows() == before
    else:
        assert tables.rows()["keyed"]["v"][0] in range(1, 9)


def test_bad_ids_are_refused(tables: Tables) -> None:
    for bad in ("", "x" * 1_000, 5):
        with refused(tables, InvalidInput, "edit_id"):
            tables.every.update({"k": 1}, {"v": 10}, edit_id=bad)  # type: ignore[arg-type]
        with refused(tables, InvalidInput, "transaction_id"):
            tables.instance.transaction(bad)  # type: ignore[arg-type]


def test_a_transaction_whose_table_is_dropped_meanwhile_changes_nothing(tables: Tables) -> None:
    tables.instance.create_table("gone", SCHEMA).ingest(data(ROWS))
    before = tables.rows()
    with pytest.raises(TableNotFound, match="'gone'") as caught, tables.instance.transaction() as transaction:
        transaction.update("every", {"k": 1}, {"v": 9})
        transaction.update("gone", {"k": 1}, {"v": 9})
        tables.instance.drop_table("gone")
    assert "\n" not in str(caught.value)
    assert tables.rows() == before
