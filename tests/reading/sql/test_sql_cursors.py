"""Each statement has its own connection to DuckDB, and leaves nothing to the next."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pyarrow as pa
import pytest
from query_lake import tuples

from dormouse.errors import DormouseError, InvalidQuery
from dormouse.reading.sql.engine import Engine
from tests.support.api import Instance, connect
from tests.support.model import LONG, STRING, Field, Schema
from tests.support.objects import open_store
from tests.support.reading import Interruption

SCHEMA = Schema([Field("k", LONG)], [], [Field("word", STRING)])
T = {"t": "SELECT 1::BIGINT AS k"}


@pytest.fixture
def instance(dsn: str, tmp_path: Path) -> Iterator[Instance]:
    with closing(connect(dsn, f"file://{tmp_path}/lake")) as instance:
        for name in ("a", "b"):
            instance.create_table(name, SCHEMA).ingest(pa.table({"k": [1, 2], "word": [name, name]}))
        yield instance


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with closing(Engine(open_store(tmp_path))) as engine:
        yield engine


def test_a_table_that_was_dropped_is_not_seen(instance: Instance) -> None:
    assert tuples(instance.sql("select count(*) from a, b")) == [(4,)]
    instance.drop_table("a")
    assert tuples(instance.sql("select count(*) from b")) == [(2,)]
    with pytest.raises(InvalidQuery, match="a does not exist"):
        # the name that the statement defines does not cover its first use
        instance.sql("select * from a, (with a as (select 1 as k) select * from a) as inner_one").read_all()
    instance.sql("select count(*) from b").read_all()
    assert tuples(instance.sql("show tables")) == [("b",)]


def test_a_statement_sees_the_current_table(instance: Instance) -> None:
    assert tuples(instance.sql("select word from a where k = 1")) == [("a",)]
    instance.table("a").ingest(pa.table({"k": [1], "word": ["more"]}))
    assert tuples(instance.sql("select word from a where k = 1 order by 1")) == [("a",), ("more",)]
    instance.drop_table("a")
    instance.create_table("A", Schema([Field("word", STRING)]))
    assert tuples(instance.sql("select * from a")) == []
    assert tuples(instance.sql("show tables")) == [("A",), ("b",)]


@pytest.mark.slow
def test_concurrent_statements_have_separate_cursors(instance: Instance) -> None:
    def is_right(number: int) -> bool:
        name = "ab"[number % 2]
        one, other = (instance.sql(f"select word, k + {n} from {name} where k = 2") for n in (0, number))
        return tuples(other) == [(name, 2 + number)] and tuples(one) == [(name, 2)]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(is_right, range(100)))


@pytest.mark.parametrize(
    "statement",
    [
        "select * from t",
        "select 1 / (k - 1) from t where error('x') is null",
        "select * from range(1000000)",
        "select nothing from t",
    ],
)
def test_a_statement_leaves_nothing_to_the_next(engine: Engine, statement: str) -> None:
    """Covers statements that were read to the end, failed, were abandoned after their first rows, or were
    refused.
    """
    with (
        closing(engine.session(Interruption())) as session,
        suppress(InvalidQuery),
        closing(session.rows(T, statement, ()).batches) as batches,  # type: ignore[type-var]
    ):
        next(batches)
    with closing(engine.cursor().connection) as connection:
        left = "from duckdb_views() where not internal union all by name from duckdb_variables()"
        assert connection.execute(left).fetchall() == []


def test_an_interrupted_statement_leaves_nothing(engine: Engine) -> None:
    interruption = Interruption()
    with closing(engine.session(interruption)) as session:
        batches = session.rows(T, "select * from t, range(100000000)", ()).batches
        next(batches)
        interruption.set()
        with pytest.raises(DormouseError, match="interrupted"):
            for _ in batches:
                pass
    with closing(engine.cursor().connection) as connection:
        assert connection.execute("from duckdb_views() where not internal").fetchall() == []


def test_a_statement_sees_the_newest_definition_of_its_views(engine: Engine) -> None:
    with closing(engine.session(Interruption())) as session:
        for k in (1, 2, 2):
            rows = session.rows({"T": f"SELECT {k}::BIGINT AS k"}, "select k from t", ())
            assert [batch.to_pydict() for batch in rows.batches] == [{"k": [k]}]
