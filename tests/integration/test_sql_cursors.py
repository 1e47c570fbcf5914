"""Cursors of DuckDB go from statement to statement with their views, and none sees another's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
from query_lake import tuples

from dormouse.errors import InvalidQuery
from dormouse.instance import Instance, connect
from dormouse.model.schema import Field, Schema
from dormouse.model.types import LONG, STRING
from dormouse.objects import open_store
from dormouse.query.interruption import Interruption
from dormouse.sql.engine import SPARE_MAX, Engine

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
        # the name that the statement defines does not reach the first
        instance.sql("select * from a, (with a as (select 1 as k) select * from a) as inner_one").read_all()
    instance.sql("select count(*) from b").read_all()
    assert tuples(instance.sql("show tables")) == [("b",)]


def test_a_table_is_seen_as_it_is_now(instance: Instance) -> None:
    assert tuples(instance.sql("select word from a where k = 1")) == [("a",)]
    instance.table("a").ingest(pa.table({"k": [1], "word": ["more"]}))
    assert tuples(instance.sql("select word from a where k = 1 order by 1")) == [("a",), ("more",)]
    instance.drop_table("a")
    instance.create_table("A", Schema([Field("word", STRING)]))
    assert tuples(instance.sql("select * from a")) == []
    assert tuples(instance.sql("show tables")) == [("A",), ("b",)]


def test_statements_at_once_have_cursors_of_their_own(instance: Instance) -> None:
    def asked(number: int) -> bool:
        name = "ab"[number % 2]
        one, other = (instance.sql(f"select word, k + {n} from {name} where k = 2") for n in (0, number))
        return tuples(other) == [(name, 2 + number)] and tuples(one) == [(name, 2)]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(asked, range(100)))


def test_a_cursor_is_kept_when_its_statement_has_ended_well(engine: Engine) -> None:
    with closing(engine.session(Interruption())) as session:
        assert [batch.num_rows for batch in session.rows(T, "select * from t", ()).batches] == [1]
    kept = engine.cursor()
    engine.give_back(kept)
    for text in ("select 1 / (k - 1) from t where error('x') is null", "select * from range(1000000)"):
        with closing(engine.session(Interruption())) as session, pytest.raises((InvalidQuery, StopIteration)):
            next(session.rows(T, text, ()).batches)
            raise StopIteration
    assert engine.cursor() is not kept


def test_no_more_cursors_are_kept_than_that(engine: Engine) -> None:
    taken = [engine.cursor() for _ in range(SPARE_MAX + 2)]
    for cursor in taken:
        engine.give_back(cursor)
    again = [engine.cursor() for _ in taken]
    assert len({id(one) for one in again} & {id(one) for one in taken}) == SPARE_MAX


def test_a_cursor_with_much_is_not_kept(engine: Engine) -> None:
    with closing(engine.session(Interruption())) as session:
        long = {"t": f"SELECT '{'x' * 1_100_000}' AS k"}
        for _ in session.rows(long, "select 1 from t", ()).batches:
            pass
    assert not engine.cursor()._made
