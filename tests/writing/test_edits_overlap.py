"""Pairs of transactions that overlap: the table has the rows that the two give one after the other."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
from keyed_tables import MARKS, SCHEMA, data

import dormouse as dm
from dormouse.errors import InvalidInput
from dormouse.state.files import attempts
from tests.support.api import Instance, Table
from tests.tiers import sampled

ROWS = [(1, 1, "a"), (2, 2, "b"), (3, 3, None)]
SECONDS_MAX = 60.0
Change = Callable[[Any, str], object]
"""A change of the table of a name by a transaction."""


def load(transaction: Any, name: str, *rows: tuple[Any, ...]) -> None:
    is_keyed = name.startswith("newest_row")
    (transaction.upsert if is_keyed else transaction.ingest)(name, data(rows))


def load_marks(transaction: Any, name: str, *keys: int) -> None:
    """Deletes keys by marks, or from a table that keeps every row by a condition."""
    if name.startswith("newest_row"):
        marks = data([(key, 0, None) for key in keys], [True] * len(keys))
        transaction.upsert(name, marks, deletes=MARKS)
    else:
        transaction.delete(name, {"k": [*keys]})


def merge(transaction: Any, name: str, *rows: tuple[Any, ...]) -> None:
    when = [dm.WhenMatched(update={"v": dm.sql("t.v * 10 + s.v")}), dm.WhenNotMatched(insert="*")]
    transaction.merge_into(name, data(rows), ["k"], when)


CHANGES: dict[str, Change] = {
    "an update of a key": lambda x, t: x.update(t, {"k": 1}, {"v": dm.sql("v + 10")}),
    "an update by value": lambda x, t: x.update(t, dm.sql("v % 2 = 1"), {"v": dm.sql("v + 3")}),
    "an update of another column": lambda x, t: x.update(t, {"k": dm.Range(1, 3)}, {"s": "new"}),
    "a merge": lambda x, t: merge(x, t, (1, 4, "m"), (4, 4, "m")),
    "another merge": lambda x, t: merge(x, t, (4, 5, "n"), (2, 6, "n")),
    "a load": lambda x, t: load(x, t, (1, 100, "u"), (3, 300, "u")),
    "a load of marks": lambda x, t: load_marks(x, t, 1, 2),
    "a merge that deletes": lambda x, t: x.merge_into(
        t, data([(1, 0, ""), (4, 0, "")]), ["k"], [dm.WhenMatched(delete=True)]
    ),
    "a deletion of a key": lambda x, t: x.delete(t, {"k": 1}),
    "a deletion by value": lambda x, t: x.delete(t, {"v": [1, 2, 4]}),
    "a replacement of keys": lambda x, t: x.replace(t, {"k": dm.Range(1, 3)}, data([(2, 22, "r")])),
    "a replacement by value": lambda x, t: x.replace(t, {"v": [1, 11]}, data([(1, 12, "r")])),
}
_numbers = itertools.count()


def made(instance: Instance, keep: str) -> Table:
    given = dm.TableProperties(keep=keep)
    table = instance.create_table(f"{keep}{next(_numbers)}", SCHEMA, properties=given)
    (table.upsert if keep == "newest_row" else table.ingest)(data(ROWS))
    return table


def rows_of(table: Table) -> list[tuple[Any, ...]]:
    found = [(row["k"], row["v"], row["s"]) for row in table.query().read_all().to_pylist()]
    return sorted(found, key=repr)


def one_after_the_other(instance: Instance, keep: str, *changes: Change) -> list[tuple[Any, ...]]:
    table = made(instance, keep)
    for change in changes:
        with instance.transaction() as transaction:
            change(transaction, table.name)
    rows = rows_of(table)
    instance.drop_table(table.name)
    return rows


def overlapping(
    instance: Instance, keep: str, outer: Change, inner: Change, *, ends_inside: bool
) -> list[tuple[Any, ...]]:
    """Begins `outer`, then `inner`, which commits before `outer` if it `ends_inside`, else after it."""
    table = made(instance, keep)
    computed, may_commit, failed = threading.Event(), threading.Event(), list[BaseException]()

    def work() -> None:
        try:
            with instance.transaction() as transaction:
                inner(transaction, table.name)
                computed.set()
                assert may_commit.wait(SECONDS_MAX)
        except BaseException as error:
            failed.append(error)
        finally:
            computed.set()

    thread = threading.Thread(target=work)
    with instance.transaction() as transaction:
        outer(transaction, table.name)
        thread.start()
        assert computed.wait(SECONDS_MAX)
        if ends_inside:
            may_commit.set()
            thread.join(SECONDS_MAX)
    may_commit.set()
    thread.join(SECONDS_MAX)
    assert failed == []
    rows = rows_of(table)
    while table.compact(engine="local", full=True).jobs_run:
        assert rows_of(table) == rows
    instance.drop_table(table.name)
    return rows


@pytest.mark.parametrize("outer", sampled([*CHANGES], 4))
@pytest.mark.parametrize("inner", sampled([*CHANGES][3:] + [*CHANGES][:3], 4))
def test_transactions_that_overlap_have_an_order(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, outer: str, inner: str
) -> None:
    """Each two changes meet on both kinds of tables: on one kind, the first change is the outer one."""
    # an outer one that inserts waits in vain for an inner load, which commits only after it
    monkeypatch.setattr(attempts, "OLDER_SECONDS_MAX", 0.1)
    both, names = (CHANGES[outer], CHANGES[inner]), [*CHANGES]
    is_keyed = names.index(outer) < names.index(inner) or (outer == inner and names.index(outer) % 2)
    keep = "newest_row" if is_keyed else "every_row"
    allowed = [one_after_the_other(instance, keep, *order) for order in (both, both[::-1])]
    for ends_inside in (True, False):
        found = overlapping(instance, keep, *both, ends_inside=ends_inside)
        assert found in allowed, f"the inner one ends inside: {ends_inside}"


def set_both(transaction: Any, a: str, b: str) -> None:
    load(transaction, b, (1, 200, "inner"))
    load(transaction, a, (1, 200, "inner"))


def delete_in_a(transaction: Any, a: str, b: str) -> None:
    transaction.delete(a, {"k": 1})
    transaction.update(b, {"k": 1}, {"v": dm.sql("v * 10")})


def unless_there(transaction: Any, name: str, on: Any = ("k",)) -> None:
    """Inserts key 7 if the row (1, 1) is not there."""
    when = [dm.WhenMatched(), dm.WhenNotMatched(insert={"k": 7, "v": 7})]
    transaction.merge_into(name, data([(1, 1, None)]), on, when)


def load_one(transaction: Any, name: str) -> None:
    load(transaction, name, (1, 100, "outer"))


def add_three(transaction: Any, name: str) -> None:
    transaction.update(name, {"k": 1}, {"v": dm.sql("v + 3")})


def delete_one(transaction: Any, name: str) -> None:
    transaction.delete(name, {"k": 1})


def unless_the_row(transaction: Any, name: str) -> None:
    unless_there(transaction, name, dm.sql("t.k = s.k and t.v = s.v"))


OF_TWO: dict[str, tuple[Change, Callable[[Any, str, str], None], Change]] = {
    "loads": (load_one, set_both, load_one),
    "a deletion and loads": (load_one, set_both, delete_one),
    "a deleted match": (unless_there, delete_in_a, add_three),
    "a changed match": (unless_the_row, set_both, add_three),
}


@pytest.mark.parametrize("what", OF_TWO)
def test_transactions_of_two_tables_that_overlap_have_an_order(instance: Instance, what: str) -> None:
    first, inner, last = OF_TWO[what]

    def result(*, is_after: bool, is_inside: bool = False) -> list[list[tuple[Any, ...]]]:
        a, b = made(instance, "newest_row"), made(instance, "newest_row")

        def work() -> None:
            with instance.transaction() as transaction:
                inner(transaction, a.name, b.name)

        if not (is_after or is_inside):
            work()
        with instance.transaction() as transaction:
            first(transaction, a.name)
            if is_inside:
                thread = threading.Thread(target=work)
                thread.start()
                thread.join(SECONDS_MAX)
            last(transaction, b.name)
        if is_after:
            work()
        return [rows_of(a), rows_of(b)]

    assert result(is_after=False, is_inside=True) in [result(is_after=False), result(is_after=True)]


@pytest.mark.parametrize("keep", ["newest_row", "every_row"])
def test_changes_of_a_transaction_that_meet_only_when_computed_again_are_refused(
    instance: Instance, keep: str
) -> None:
    table = made(instance, keep)
    other = threading.Thread(target=lambda: table.update({"k": 1}, {"v": 2}))
    with (
        pytest.raises(InvalidInput, match="an earlier one of the same transaction"),
        instance.transaction() as transaction,
    ):
        transaction.update(table.name, dm.sql("v = 2"), {"v": 6})
        transaction.update(table.name, {"k": 1}, {"s": "new"})
        other.start()
        other.join(SECONDS_MAX)
    assert rows_of(table) == [(1, 2, "a"), (2, 2, "b"), (3, 3, None)]


def test_an_edit_is_computed_again_if_its_table_begins_to_merge_rows(instance: Instance) -> None:
    table = made(instance, "every_row")
    with instance.transaction() as transaction:
        transaction.update(table.name, dm.sql("v < 3"), {"v": dm.sql("v + 1")})
        instance.table(table.name).set_properties(aggregate="sum(v), max(s)")
    assert rows_of(table) == [(1, 2, "a"), (2, 3, "b"), (3, 3, None)]
