"""Each statement has its own connection to DuckDB, and leaves nothing to the next.

An engine may keep connections, but only for statements that would make exactly the same views.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from query_lake import tuples

from dormouse.errors import DormouseError, InvalidQuery
from dormouse.reading.sql import engine as engine_module
from dormouse.reading.sql.engine import Engine
from tests.support.api import Instance, connect
from tests.support.model import DOUBLE, LONG, STRING, Field, Schema
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


@pytest.fixture
def keeping(tmp_path: Path) -> Iterator[Engine]:
    with closing(Engine(open_store(tmp_path), cursors_kept=2)) as engine:
        yield engine


def run(engine: Engine, views: Mapping[str, str], statement: str = "from t", **more: Any) -> Any:
    """Returns the values of the statement's only column."""
    with closing(engine.session(Interruption())) as session:
        [batch] = session.rows(views, statement, (), **more).batches
    [values] = batch.to_pydict().values()
    return values


def view(value: int, name: str = "t") -> dict[str, str]:
    return {name: f"SELECT {value}::BIGINT AS k"}


def test_a_connection_is_kept_for_statements_over_the_same_views(keeping: Engine) -> None:
    assert run(keeping, view(1)) == [1]
    kept = keeping.kept(view(1))
    assert kept is not None
    left = "select view_name from duckdb_views() where not internal"
    assert kept.connection.execute(left).fetchall() == [("t",)]
    assert kept.connection.execute("from duckdb_variables()").fetchall() == []
    assert keeping.kept(view(1)) is None  # it is lent
    keeping.keep(kept)
    # a name in another case is the same name
    assert run(keeping, view(1, "T"), "select k + 1 from t") == [2]
    again = keeping.kept(view(1))
    assert again is kept


@pytest.mark.parametrize("views", [{}, view(2), view(1, "u"), {**view(1), **view(1, "u")}])
def test_a_connection_with_other_views_is_not_used(keeping: Engine, views: dict[str, str]) -> None:
    run(keeping, view(1))
    assert keeping.kept(views) is None
    listed = "select coalesce(list(view_name order by view_name), []) from duckdb_views() where not internal"
    assert run(keeping, views, listed) == [[*views]]


@pytest.mark.parametrize(
    "statement",
    [
        "select 1 / (k - 1) from t where error('x') is null",
        "select k from t, range(1000000)",
        "select nothing from t",
    ],
)
def test_a_connection_that_may_have_more_than_views_is_closed(keeping: Engine, statement: str) -> None:
    with (
        closing(keeping.session(Interruption())) as session,
        suppress(InvalidQuery),
        closing(session.rows(T, statement, ()).batches) as batches,  # type: ignore[type-var]
    ):
        next(batches)
    assert keeping.kept(T) is None
    run(keeping, T, "select now() from t", moment=5)  # it makes macros
    assert keeping.kept(T) is None


def test_the_connection_of_an_interrupted_statement_is_closed(keeping: Engine) -> None:
    interruption = Interruption()
    with closing(keeping.session(interruption)) as session:
        for _ in session.rows(T, "from t", ()).batches:
            pass
        interruption.set()
    assert keeping.kept(T) is None


def test_the_connection_used_least_recently_is_closed(keeping: Engine) -> None:
    for value in (1, 2, 1, 3):
        run(keeping, view(value))
    assert keeping.kept(view(2)) is None
    found = [keeping.kept(view(value)) for value in (1, 3)]
    assert all(found)
    for cursor in found:
        keeping.keep(cursor)  # type: ignore[arg-type]
    keeping.close()
    with pytest.raises(duckdb.ConnectionException):
        found[0].connection.execute("select 1")  # type: ignore[union-attr]


def test_connections_are_not_kept_after_duckdb_failed(keeping: Engine) -> None:
    run(keeping, view(1))
    before = keeping.cursor()
    before.views.update(view(2))
    keeping.give_up()
    keeping.keep(before)
    assert (keeping.kept(view(1)), keeping.kept(view(2))) == (None, None)
    assert run(keeping, view(1)) == [1]


def test_connections_with_long_views_are_not_kept(keeping: Engine) -> None:
    long = {"t": f"SELECT 1::BIGINT AS k -- {'x' * engine_module.VIEWS_CHARACTERS_MAX}"}
    assert run(keeping, long) == [1]
    assert keeping.kept(long) is None


def test_statements_at_once_never_see_the_views_of_others(keeping: Engine) -> None:
    def is_right(number: int) -> bool:
        views, moment = view(number % 3), None if number % 5 else number * 1_000_000
        statement = "from t" if moment is None else "select k from t where epoch_us(now()) >= 0"
        return bool(run(keeping, views, statement, moment=moment) == [number % 3])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(is_right, range(400)))


def test_a_statement_sees_commits_although_connections_are_kept(instance: Instance) -> None:
    for number in range(3, 8):
        expected = [(number - 1,)]
        for _ in range(3):
            assert tuples(instance.sql("select count(*) from a")) == expected
        instance.table("a").ingest(pa.table({"k": [number], "word": ["a"]}))
    instance.table("a").delete({"k": 4})
    assert tuples(instance.sql("select count(*) from a")) == [(6,)]


def test_scans_read_columns_at_once_and_look_ups_single_pages(instance: Instance) -> None:
    rows, schema = 200_000, Schema([Field("k", LONG)], [], [Field(name, DOUBLE) for name in "xyz"])
    random = np.random.default_rng(1)
    table = instance.create_table("numbers", schema)
    table.ingest(pa.table({"k": range(rows), **{name: random.random(rows) for name in "xyz"}}))
    size = sum(file.byte_count for file in table.live_files())

    def read(statement: str) -> tuple[int, int]:
        before = _reads()
        instance.sql(statement).read_all()
        return _reads()[0] - before[0], _reads()[1] - before[1]

    scan, look_up = "select sum(x), sum(y) from numbers", "select * from numbers where k = 100"
    for statement in (scan, look_up):
        read(statement)  # also the footer
    for _ in range(2):
        # the file has 49 pages of each column
        assert read(scan)[0] < 49
        assert read(look_up)[1] < size // 8
    assert read("select sum(x), sum(y) from numbers where k < 100")[1] < size // 8
    assert read(f"select sum(x), sum(y) from numbers where k >= {-rows}")[0] < 49


def _reads() -> tuple[int, int]:
    """Returns the numbers of reads, and of bytes read, of this process so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["syscr"]), int(lines["rchar"])
