"""Statements at past moments that read no rows of a table that they name."""

from __future__ import annotations

import pytest

from dormouse.errors import InvalidCut
from tests.small_tables import clock
from tests.standard import OF_K
from tests.support.api import Instance

SCHEMA = OF_K
STATEMENTS = {
    "select * from t limit 0": 0,
    "select * from t where 1 = 0": 0,
    "select * from t where k = null": 0,
    "select * from t where k > 5 and k < 3": 0,
    "select count(*) from t where k = 1 and k = 2": 1,
    "describe t": 1,
    "show t": 1,
    "show tables": 3,
    "from (show tables) where name in (select 't' from t limit 0)": 0,
    "explain select * from t limit 0": 2,
    "with unused as (select * from u) select * from t": 2,
    "select k from t union all select k from u where false": 2,
    "select * from t left join (select * from u where false) using (k)": 2,
    "select * from t where exists (select 1 from u where 1 = 0)": 0,
    "select 1": 1,
}


@pytest.mark.slow
def test_a_statement_may_name_tables_of_which_it_reads_nothing(instance: Instance) -> None:
    """Tools run such statements, for example with `limit 0`, to learn the columns of an answer."""
    for name in ("t", "u"):
        table = instance.create_table(name, SCHEMA)
        table.ingest({"k": [1, 2]})
        table.history.record_cut("then")
    at = clock(instance)
    instance.create_table("young", SCHEMA)
    instance.table("t").ingest({"k": [3]})
    for statement, rows in STATEMENTS.items():
        now = instance.sql(statement).schema
        for when in ("then", at):
            found = instance.sql(statement, as_of=when).read_all()
            assert (found.num_rows, found.schema) == (rows, now), statement
            if not statement.startswith("explain"):
                assert instance.explain_sql(statement, as_of=when).keys() <= {"t", "u"}
    with instance.duckdb(as_of="then") as opened:
        assert opened.sql("select * from t limit 0").to_arrow_table().schema.names == ["k"]


def test_a_table_that_is_named_and_not_read_must_exist_at_the_moment(instance: Instance) -> None:
    """Otherwise the statement would get the current columns instead of those of the moment."""
    for name in ("t", "young"):
        instance.create_table(name, SCHEMA).ingest({"k": [1]})
    cut = instance.table("t").history.record_cut("then")
    for statement in (
        "select * from young limit 0",
        "describe young",
        "from t where exists (from young where false)",
        "from (show tables) where name in (select 't' from young limit 0)",
    ):
        for when in ("then", cut):
            with pytest.raises(InvalidCut):
                instance.sql(statement, as_of=when)
    assert instance.sql("show tables", as_of=cut).read_all().num_rows == 2
