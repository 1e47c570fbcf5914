"""Statements of a transaction, which its end commits together with its other changes."""

from __future__ import annotations

import pytest

import dormouse as dm
from dormouse.errors import DormouseError, InvalidInput
from tests.support.api import Instance


def filled_pair(instance: Instance) -> None:
    """Makes a table that keeps every row, a keyed one, and one whose rows feed them."""
    schema = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("v", dm.LONG, nullable=True)])
    for name, keep in {"every": "every_row", "keyed": "newest_row", "news": "every_row"}.items():
        table = instance.create_table(name, schema, properties=dm.TableProperties(keep=keep))  # type: ignore[arg-type]
        table.ingest([{"k": k, "v": k} for k in (1, 2, 3)])


def values_of(instance: Instance, *names: str) -> list[dict[int, int | None]]:
    found = [instance.table(name).query().read_all().to_pylist() for name in names]
    return [{row["k"]: row["v"] for row in rows} for rows in found]


def test_statements_of_a_transaction_are_committed_together(instance: Instance) -> None:
    filled_pair(instance)
    before = values_of(instance, "every", "keyed")
    with instance.transaction("once") as transaction:
        transaction.execute("update every set v = v + $1 where k = 1", [10])
        transaction.execute("delete from every where k = $K", {"k": 2})
        transaction.execute("insert into every (k) select k + 10 from news where k > 1")
        transaction.execute("insert into keyed values (4, 40)")
        transaction.execute("insert or replace into keyed select k, 7 from news where k = 3")
        transaction.execute(
            "merge into keyed using news on keyed.k = news.k and news.k < 3 "
            "when matched and keyed.k = 1 then delete when matched then update set v = news.v * 100"
        )
        assert values_of(instance, "every", "keyed") == before
    after = [{1: 11, 3: 3, 12: None, 13: None}, {2: 200, 3: 7, 4: 40}]
    assert (transaction.applied, values_of(instance, "every", "keyed")) == (True, after)
    with instance.transaction("once") as transaction:
        transaction.execute("insert into every values (9, 9)")
        transaction.execute("insert into keyed values (9, 9)")
    assert (transaction.applied, values_of(instance, "every", "keyed")) == (False, after)


def test_a_statement_of_a_transaction_is_computed_again(instance: Instance) -> None:
    filled_pair(instance)
    with instance.transaction() as transaction:
        transaction.execute("update keyed set v = v + 1 where k = 1")
        transaction.execute("insert into every values (4, 4)")
        instance.execute("update keyed set v = 20 where k = 1")
    assert transaction.attempts == 2
    assert values_of(instance, "every", "keyed") == [{1: 1, 2: 2, 3: 3, 4: 4}, {1: 21, 2: 2, 3: 3}]


@pytest.mark.parametrize(
    "statement",
    [
        "insert into keyed select k + 5, v from NEWS",
        "insert into every by name select k, v from news",
        "insert or replace into keyed select * from news",
        "merge into keyed using (select * from news) s on keyed.k = s.k when matched then update",
        "insert into every select k, v from news where exists (from (show tables))",
    ],
)
def test_a_statement_of_a_transaction_does_not_read_what_it_changed(
    instance: Instance, statement: str
) -> None:
    filled_pair(instance)
    before = values_of(instance, "every", "keyed", "news")
    with (
        pytest.raises(InvalidInput, match="table 'news': a query reads it as it was"),
        instance.transaction() as tx,
    ):
        tx.execute("update news set v = 0 where k = 1")
        tx.execute(statement)
    assert values_of(instance, "every", "keyed", "news") == before


def test_statements_that_a_transaction_refuses_leave_nothing(instance: Instance) -> None:
    filled_pair(instance)
    before = values_of(instance, "every", "keyed")
    for statement, said in {
        "select 1": "sql",
        "insert into keyed values (1, 5)": "which is there already: INSERT OR REPLACE replaces it",
        "insert into every values (1)": "another number of columns",
        "update gone set v = 1": "unknown table 'gone'",
    }.items():
        with pytest.raises(DormouseError, match=said), instance.transaction() as tx:
            tx.execute("insert into every values (4, 4)")
            tx.execute(statement)
    with pytest.raises(InvalidInput, match="is over"):
        tx.execute("insert into every values (4, 4)")
    assert values_of(instance, "every", "keyed") == before


def test_rows_of_other_keys_may_be_inserted_in_one_transaction(instance: Instance) -> None:
    filled_pair(instance)
    with instance.transaction() as transaction:
        transaction.execute("delete from keyed where k = 1")
        transaction.execute("insert into keyed values (5, 50)")
        transaction.execute("insert into keyed values (4, 40), (6, 60)")
        instance.execute("insert into keyed values (7, 70)")
    after = {2: 2, 3: 3, 4: 40, 5: 50, 6: 60, 7: 70}
    assert (transaction.attempts, values_of(instance, "keyed")) == (1, [after])
    for statement, said in {
        "insert into keyed values (8, 81)": "this change reads or deletes rows",
        "insert into keyed values (2, 20)": "which is there already",
    }.items():
        with pytest.raises(InvalidInput, match=said), instance.transaction() as transaction:
            transaction.execute("insert into keyed values (8, 80)")
            transaction.execute(statement)
    with (
        pytest.raises(InvalidInput, match="k 9, which is there already"),
        instance.transaction() as transaction,
    ):
        transaction.execute("insert into keyed values (9, 90)")
        instance.execute("insert into keyed values (9, 91)")
    assert values_of(instance, "keyed") == [after | {9: 91}]
