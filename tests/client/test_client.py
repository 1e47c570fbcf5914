"""The client of a query service, whose answers and errors are those of the table itself."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from query_lake import NOON, SCHEMA, Lake, four_leaves
from served import service
from tls import CertificateAuthority

import dormouse as dm
from dormouse.client import Client, connect
from dormouse.client.client import RemoteTable
from dormouse.errors import (
    DormouseError,
    InstanceError,
    InstanceForbidden,
    InvalidInput,
    InvalidQuery,
    ObjectDamaged,
    TableNotFound,
)
from tests.support.model import Range, Region

MIXED = dm.Schema(
    row_keys=[dm.Field("k", dm.LONG)],
    values=[
        dm.Field("d", dm.DOUBLE, nullable=True),
        dm.Field("at", dm.TIMESTAMP, nullable=True),
        dm.Field("raw", dm.BYTES),
        dm.Field("deep", dm.LIST(dm.MAP(dm.STRING, dm.LIST(dm.TIMESTAMP))), nullable=True),
    ],
)
MICROSECONDS = datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC)
TOKEN = "right"  # noqa: S105
DEEP = [[("a", [NOON, None]), ("b", None)], [], None]
MIXED_ROWS = [
    {"k": -(2**63), "d": 1.0, "at": NOON, "raw": b"", "deep": DEEP},
    {"k": -1, "d": math.nan, "at": None, "raw": b"\x00\xff", "deep": None},
    {"k": 0, "d": None, "at": MICROSECONDS, "raw": b"?>?", "deep": []},
    {"k": 1, "d": math.inf, "at": NOON, "raw": b"a", "deep": None},
    {"k": 2**63 - 1, "d": -math.inf, "at": NOON, "raw": b"a" * 100, "deep": None},
    {"k": 2**53 + 1, "d": 0.1 + 0.2, "at": NOON, "raw": b"b", "deep": None},
]


@pytest.fixture(scope="module")
def instance(
    new_database: Callable[[str], str], template_database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dm.Instance]:
    """Yields an instance with tables `flights` (four leaves), `mixed` and `empty`, which tests only read."""
    dsn, folder = new_database(template_database), tmp_path_factory.mktemp("lake")
    with dm.connect(dsn, f"file://{folder}/objects") as instance:
        mixed = instance.create_table("mixed", MIXED, split_points=[0])
        mixed.ingest(pa.Table.from_pylist(MIXED_ROWS, schema=_arrow_schema(mixed)), engine="local")
        instance.create_table("empty", MIXED)
        four_leaves(lambda **more: Lake(dsn, instance._supplier, folder, SCHEMA, name="flights", **more))
        yield instance


@pytest.fixture(scope="module")
def url(instance: dm.Instance) -> Iterator[str]:
    with service(instance) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Client]:
    with connect(url) as client:
        yield client


def _arrow_schema(table: dm.Table) -> pa.Schema:
    return table.query().schema


def same(here: Callable[[], Any], there: Callable[[], Any]) -> Any:
    """Checks that both calls give the same schema and rows, or equal errors; returns the result."""
    mine, theirs = outcome(here), outcome(there)
    assert type(mine) is type(theirs)
    if isinstance(mine, pa.Table):
        assert theirs.schema.equals(mine.schema, check_metadata=True)
        theirs.validate(full=True)
        # rows of equal keys come in any order
        assert sorted(map(repr, theirs.to_pylist())) == sorted(map(repr, mine.to_pylist()))
        if mine.column_names:
            assert repr(theirs[mine.column_names[0]].to_pylist()) == repr(mine[0].to_pylist())
    elif isinstance(mine, Exception):
        assert (str(theirs), theirs.args) == (str(mine), mine.args)
    else:
        assert theirs == mine
    return theirs


def outcome(ask: Callable[[], Any]) -> Any:
    try:
        found = ask()
        return found.read_all() if isinstance(found, pa.RecordBatchReader) else found
    except DormouseError as error:
        return error


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("table", "where"),
    [
        ("flights", None),
        ("flights", {}),
        ("flights", {"Name": "a\x00"}),
        ("flights", {"Name": ""}),
        ("flights", {"Name": "o'\""}),
        ("flights", {"Name": "😀"}),
        ("flights", {"Name": "nobody"}),
        ("flights", {"Name": []}),
        ("flights", {"Name": ["p", "a", "p", "none"]}),
        ("flights", {"number": -(2**63)}),
        ("flights", {"number": Range(1, 2**63 - 1)}),
        ("flights", {"number": [Range(-60, 0), -1, 50]}),
        ("flights", {"Name": Range(None, "p", max_inclusive=True), "number": Range(0, None, False)}),
        ("flights", Region(Name=Range("g", "o"), number=-50)),
        ("flights", {"time": Range(-1, 1), "number": 0}),
        ("flights", {"code": [b"\x00", b"\xff"]}),
        ("flights", {"code": bytearray(b"\xff")}),
        ("flights", {"score": 2}),
        ("flights", {"score": [None, 2.0]}),
        ("flights", {"score": Range()}),
        ("flights", {"good": True}),
        ("flights", {"at": NOON.astimezone(timezone(timedelta(hours=-3)))}),
        ("flights", {"at": None}),
        ("flights", {"tags": None}),
        ("mixed", None),
        ("mixed", {"k": [-(2**63), 2**53 + 1, 2**63 - 1]}),
        ("mixed", {"d": math.nan}),
        ("mixed", {"d": [math.nan, None, 1]}),
        ("mixed", {"d": Range(0.5, math.inf)}),
        ("mixed", {"d": Range(-math.inf, 0.1 + 0.2, max_inclusive=True)}),
        ("mixed", {"d": 0.1 + 0.2}),
        ("mixed", {"at": MICROSECONDS}),
        ("mixed", {"at": MICROSECONDS.replace(tzinfo=None)}),
        ("mixed", {"at": Range(None, NOON)}),
        ("mixed", {"raw": b"?>?"}),
        ("mixed", {"raw": Range(b"", b"a", False, True)}),
        ("empty", None),
        ("empty", {"k": 1}),
        ("flights", {"nmae": 1}),
        ("flights", "Name"),
        ("flights", {"Name": 1}),
        ("flights", {"Name": None}),
        ("flights", {"Name": "\ud800"}),
        ("flights", {"number": "1"}),
        ("flights", {"number": True}),
        ("flights", {"number": 2**63}),
        ("flights", {"number": [1, 1.5]}),
        ("flights", {"number": Range(5, 1)}),
        ("flights", {"good": 1}),
        ("flights", {"code": "AAAA"}),
        ("flights", {"at": "2024-01-01T12:00:00Z"}),
        ("flights", {"tags": "x"}),
        ("mixed", {"d": "NaN"}),
        ("mixed", {"d": Range(1.0, math.nan)}),
        ("mixed", {"d": Range(5.0, 1.0)}),
    ],
)
def test_a_query_returns_the_same_rows_as_the_table(
    instance: dm.Instance, client: Client, table: str, where: Any
) -> None:
    here, there = instance.table(table), client.table(table)
    rows = same(lambda: here.query(where), lambda: there.query(where))
    same(lambda: here.explain(where), lambda: there.explain(where))
    back = same(lambda: here.query(where, descending=True), lambda: there.query(where, descending=True))
    if isinstance(rows, pa.Table):
        assert back.schema == rows.schema
        keys = here.schema.key_names
        assert repr(back.select(keys).to_pylist()) == repr(rows.select(keys).to_pylist()[::-1])
        assert sorted(map(repr, back.to_pylist())) == sorted(map(repr, rows.to_pylist()))


@pytest.mark.parametrize(
    ("columns", "limit"),
    [
        (["deep", "k", "raw"], None),
        (("at",), 3),
        (None, 0),
        (None, 1),
        (["d"], 2**63 - 1),
        (["d", "d"], None),
        (["D"], None),
        ("d", None),
        ([1], None),
        ([], None),
        (None, -1),
        (None, True),
        (None, 2**63),
    ],
)
def test_columns_and_limits_work_as_for_the_table(
    instance: dm.Instance, client: Client, columns: Any, limit: Any
) -> None:
    here, there = instance.table("mixed"), client.table("mixed")
    for how in {}, {"descending": True}, {"offset": 2}, {"offset": 2, "descending": True}:
        same(
            lambda how=how: here.query(None, columns, limit=limit, **how),
            lambda how=how: there.query(None, columns, limit=limit, **how),
        )


@pytest.mark.parametrize("where", [None, {"k": [-1, 0, 2**53 + 1]}, {"d": None}, {"none": 1}])
def test_counts_heads_and_frames_equal_those_of_the_table(
    instance: dm.Instance, client: Client, where: Any
) -> None:
    here, there = instance.table("mixed"), client.table("mixed")
    same(lambda: here.count(where), lambda: there.count(where))
    same(lambda: here.head(2, ["d"]), lambda: there.head(2, ["d"]))
    if where != {"none": 1}:
        assert there.to_pandas(where, ["k", "d"]).equals(here.to_pandas(where, ["k", "d"]))
        assert there.to_polars(where, limit=2).equals(here.to_polars(where, limit=2))


@pytest.mark.parametrize("offset", [-1, True, 1.5, "1", 2**63, None])
@pytest.mark.parametrize("descending", [False, True])
def test_an_offset_must_be_a_number_of_rows(
    instance: dm.Instance, client: Client, offset: Any, descending: bool
) -> None:
    for table in instance.table("mixed"), client.table("mixed"):
        with pytest.raises(InvalidQuery, match="offset must be a whole number of rows, at least 0"):
            table.query(offset=offset, descending=descending)


@pytest.mark.parametrize(
    "statement",
    [
        "select * from mixed order by k",
        'select "Name", count(*) as n, avg(score) from flights group by 1 order by 1',
        "select m.k, f.code from mixed m join flights f on m.k = f.number where m.k = 0 order by 2",
        "select * from empty",
        "select 1 as one, null as nothing, interval '1 day' as day",
        "select arrow_cast('x', 'Dictionary(Int32, Utf8)') as word",
        "explain select * from mixed where k = 0",
        "selec 1",
        "select * from mixt",
        "delete from mixed",
        "select 1/0",
        "",
        None,
    ],
)
def test_sql_returns_the_same_rows_as_the_instance(
    instance: dm.Instance, client: Client, statement: Any
) -> None:
    same(lambda: instance.sql(statement), lambda: client.sql(statement))
    same(lambda: instance.table("mixed").sql(statement), lambda: client.table("mixed").sql(statement))
    same(lambda: instance.explain_sql(statement), lambda: client.explain_sql(statement))


def test_tables_are_described_as_by_the_instance(instance: dm.Instance, client: Client) -> None:
    assert [table.name for table in client.tables()] == ["empty", "flights", "mixed"]
    for here, there in zip(instance.tables(), client.tables(), strict=True):
        assert (there.name, there.schema, there.properties) == (here.name, here.schema, here.properties)
        here.split()
        assert there.status() == here.status()
        assert [one.kind for one in there.status().rounds] == ["split"]
    assert repr(client.table("mixed")) == "RemoteTable('mixed')"


@pytest.mark.parametrize("name", ["mixt", "", "../tables", "a b", "\ud800", "x" * 200, 7])
def test_an_unknown_table_is_an_error(instance: dm.Instance, client: Client, name: Any) -> None:
    missing = same(lambda: instance.table(name), lambda: client.table(name))
    assert type(missing) is TableNotFound


def test_a_dropped_table_is_an_error(instance: dm.Instance, client: Client) -> None:
    instance.create_table("gone", MIXED)
    gone, undescribed = client.table("gone"), next(t for t in client.tables() if t.name == "gone")
    instance.drop_table("gone")
    asks = [gone.query, gone.explain, gone.status, lambda: undescribed.schema]
    for ask in asks:
        with pytest.raises(TableNotFound, match="table 'gone' does not exist"):
            ask()


@pytest.mark.slow
def test_conditions_use_the_current_types_of_columns(instance: dm.Instance, client: Client) -> None:
    """A condition on 0.1 matches only if it is written for the column's current type, FLOAT or DOUBLE."""

    def made(kind: Any) -> tuple[dm.Table, list[RemoteTable]]:
        table = instance.create_table(
            "turned", dm.Schema([dm.Field("k", dm.LONG)], [], [dm.Field("f", kind)])
        )
        return table, [client.table("turned") for _ in range(3)]

    def check(table: dm.Table, before: list[RemoteTable]) -> None:
        table.ingest(pa.table({"k": [1], "f": [0.1]}))
        assert before[0].query({"f": 0.1}).read_all().to_pylist() == [{"k": 1, "f": 0.1}]
        assert before[1].query({"f": 0.1}, descending=True).read_all().num_rows == 1
        assert before[2].count({"f": dm.Range(0.05, 0.1, max_inclusive=True)}) == 1
        instance.drop_table("turned")

    table, before = made(dm.FLOAT)
    table.widen_column("f", dm.DOUBLE)
    check(table, before)
    _, before = made(dm.FLOAT)
    instance.drop_table("turned")
    check(made(dm.DOUBLE)[0], before)


def test_other_libraries_read_an_answer_as_a_c_stream(client: Client) -> None:
    """Other libraries take the answer as an Arrow C stream."""
    table = client.table("mixed")
    with duckdb.connect() as conn:
        conn.register("answer", table.query())
        assert conn.execute("select count(*), sum(k) from answer").fetchall() == [
            (6, sum(row["k"] for row in MIXED_ROWS))
        ]
    stream = pa.RecordBatchReader.from_stream(table.query(columns=["k", "deep"]))
    assert stream.read_all() == table.query(columns=["k", "deep"]).read_all()


@pytest.mark.slow
def test_the_token_opens_the_service(instance: dm.Instance) -> None:
    with service(instance, token=TOKEN) as url:
        with connect(url, token=TOKEN) as client:
            assert client.table("mixed").query().read_all().num_rows == len(MIXED_ROWS)
        for wrong in (None, "wrong"):
            with (
                connect(url, token=wrong) as client,
                pytest.raises(InstanceForbidden, match=f"^{url}.*token"),
            ):
                client.tables()


@pytest.mark.slow
def test_tls_is_checked_against_the_authority(instance: dm.Instance, tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path)
    certificate, key = authority.server_certificate("127.0.0.1")
    with service(instance, tls_certificate=certificate, tls_key=key) as url:
        assert url.startswith("https://")
        with connect(url, ca=str(authority.certificate)) as client:
            assert client.table("mixed").query().read_all().num_rows == len(MIXED_ROWS)
        with (
            connect(url) as client,
            pytest.raises(InstanceError, match=f"cannot connect to {url}: .*certificate"),
        ):
            client.tables()


@pytest.mark.parametrize(
    "url", ["", "lake", "127.0.0.1:8088", "ftp://host", "http://", "http://host:x", "http://h/?a=1", None, 1]
)
def test_an_invalid_url_is_refused(url: Any) -> None:
    with pytest.raises(InvalidInput, match="the URL of a query service is like"):
        connect(url)


def test_an_invalid_ca_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    for path in (tmp_path / "ca.pem", tmp_path / "none.pem"):
        with pytest.raises(InvalidInput, match=r"ca '.*pem' cannot be read as certificates"):
            connect("https://127.0.0.1:1", ca=str(path))


@pytest.mark.objects
@pytest.mark.slow
def test_a_damaged_file_raises_an_error_in_the_middle_of_an_answer(dsn: str, tmp_path: Path) -> None:
    """The rows and the error are the same as without a service, and the answer does not count as complete."""
    with dm.connect(dsn, f"file://{tmp_path}/objects") as instance:
        table = instance.create_table("t", MIXED, split_points=[0])
        rows = [row for row in MIXED_ROWS if row["k"] < 0]
        table.ingest(pa.Table.from_pylist(rows, schema=_arrow_schema(table)), engine="local")
        before = set((tmp_path / "objects").rglob("*.parquet"))
        late = [row for row in MIXED_ROWS if row["k"] >= 0]
        table.ingest(pa.Table.from_pylist(late, schema=_arrow_schema(table)), engine="local")
        [damaged] = set((tmp_path / "objects").rglob("*.parquet")) - before
        damaged.write_bytes(b"PAR1" + bytes(damaged.stat().st_size - 8) + b"PAR1")
        with service(instance) as url, connect(url) as client:
            there = client.table("t")
            found = same(lambda: table.query().read_all(), lambda: there.query().read_all())
            assert type(found) is ObjectDamaged
            assert damaged.name in str(found)
            assert there.query({"k": -1}).read_all().num_rows == 1


def test_the_client_needs_neither_datafusion_nor_the_service() -> None:
    """The client needs only httpx and pyarrow besides Dormouse's basic requirements, and not NumPy either."""
    without = ["datafusion", "duckdb", "datasketches", "numpy", "pandas", "pyspark", "fastapi", "uvicorn"]
    script = f"import sys; sys.modules.update(dict.fromkeys({without!r})); import dormouse.client"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
