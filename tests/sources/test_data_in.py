"""Files of a new user. One command loads them into a table, with any names of columns, and one writes them
out.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from time import sleep
from typing import Any
from uuid import uuid4

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from psycopg.conninfo import make_conninfo
from served import service

import dormouse as dm
from dormouse.cli.loading import _made
from dormouse.client import connect as connect_service
from dormouse.errors import CommitFailed, InvalidData, InvalidProperties, TableNotFound
from dormouse.postgres import run_transaction
from dormouse.postgres.connection import ConnectionSupplier
from dormouse.state.files.attempts import numbering
from dormouse.writing import ingest as ingest_module
from tests.conftest import BUCKET
from tests.stored import query
from tests.support.api import Instance, connect
from tests.support.objects import open_store

NAMES = ["a.b", "c d", 'e"f', "g'h", "i-j", "100%", "@timestamp", "1st", "e\u0301", "sp`k", "x,y", "br[0]"]


@pytest.fixture
def lake(dsn: str, tmp_path: Path) -> Any:
    with connect(dsn, f"file://{tmp_path}/objects") as opened:
        yield opened


@pytest.mark.slow
def test_columns_can_have_any_name(lake: Instance) -> None:
    data = pa.table({name: range(20) for name in NAMES})
    properties = dm.TableProperties(bloom_filter_columns='"x,y", "a.b"', compaction_batch_files=2)
    table = lake.create_table("t", like=data, row_keys=NAMES[:1], properties=properties)
    for _ in range(2):
        table.ingest(data)
    for name in NAMES:
        found = table.query({name: 7}, [name]).read_all()
        assert found.to_pylist() == [{name: 7}] * 2
    table.delete({"i-j": 7})
    columns = ", ".join("sum(" + '"' + name.replace('"', '""') + '")' for name in NAMES)
    answer = table.sql(f"select {columns} from t").read_all().to_pylist()[0]
    assert {int(total) for total in answer.values()} == {2 * (190 - 7)}
    table.rename_column("x,y", 'z "q"')
    assert table.properties.bloom_filter_columns == '"z ""q""", "a.b"'
    table.compact()
    assert table.count() == 38 and table.query({'z "q"': 3}).read_all().num_rows == 2


@pytest.mark.slow
def test_one_command_creates_a_table_and_loads_a_file(cli: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("carrier;flight;delay\nUA;1545;11\nAA;1141;NA\n")
    code, out, err = cli("ingest", "flights", str(path), "--create", "--key", "carrier,flight")
    assert code == 0 and out.startswith("added 2 rows") and "delimiter ';'" in err and "null NA" in err
    assert cli("ingest", "flights", str(path), "--create", "--id", "again")[0] == 0
    code, _, err = cli("ingest", "flights", str(path), "--create", "--key", "delay")
    assert code != 0 and "its keys are carrier, flight" in err
    answer = cli("sql", "select distinct * from flights order by 1", "--json")[1]
    assert json.loads(answer)[0] == {"carrier": "AA", "flight": 1141, "delay": None}
    for _ in range(2):
        assert cli("ingest", "numbered", str(path), "--create")[0] == 0
    numbers = cli("sql", "select list(row_number order by row_number) as n from numbered", "--json")[1]
    assert json.loads(numbers) == [{"n": [0, 1, 2, 3]}]


@pytest.mark.slow
def test_an_ambiguous_time_format_for_an_existing_table_must_be_given(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "x.csv"
    path.write_text("k,day\n1,01/13/2020\n")
    assert cli("ingest", "days", str(path), "--create", "--key", "k")[0] == 0
    path.write_text("k,day\n2,03/04/2020\n")
    for more in ((), ("--create",)):
        code, _, err = cli("ingest", "days", str(path), *more)
        assert code != 0 and "could be %d/%m/%Y or %m/%d/%Y: say which (--type day=date:%d/%m/%Y" in err
    code, _, err = cli("ingest", "days", str(path), "--type", "k=string")
    assert code == 2 and "--type column=type needs --create" in err
    assert cli("ingest", "days", str(path), "--type", "day=date:%m/%d/%Y")[0] == 0
    assert json.loads(cli("sql", "select max(day) as d from days", "--json")[1]) == [{"d": "2020-03-04"}]


def test_the_encoding_is_guessed_for_an_existing_table(lake: Instance, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes("k,day,town\n2,03/04/2020,Orléans\n".encode("cp1252"))
    for name, kind in (("texts", dm.STRING), ("days", dm.DATE)):
        values = [dm.Field(one, of, nullable=True) for one, of in (("day", kind), ("town", dm.STRING))]
        table = lake.create_table(name, dm.Schema([dm.Field("k", dm.LONG)], [], values))
        with _made(
            lake, name, dm.Files(str(path)), ([], []), lambda: pytest.fail("the table exists")
        ) as files:
            if kind == dm.STRING:
                table.ingest(files)
                continue
            with pytest.raises(InvalidData, match="could be %d/%m/%Y or %m/%d/%Y: say which"):
                table.ingest(files)
    rows = lake.table("texts").query().read_all().to_pylist()
    assert rows == [{"k": 2, "day": "03/04/2020", "town": "Orléans"}]


@pytest.mark.slow
def test_a_load_that_fails_leaves_no_table(cli: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("k,t,v\n" + f"1,{'a' * 99},1\n" * 30_000 + "2,b,late\n")
    code, _, err = cli("ingest", "t", str(path), "--create", "--key", "k")
    assert code != 0 and "line 30,002: column 'v' is 'late'" in err
    assert cli("table", "list", "--json")[1].strip() == "[]"


def test_data_can_have_a_column_named_row_number(lake: Instance) -> None:
    """The name is that of an attribute of `Files`, which must not be used in the column's place."""
    data = pa.table({"row_number": [1, 2], "v": ["a", "b"]})
    table = lake.create_table("t", like=data, row_keys=["row_number"])
    table.ingest(data.to_pandas())
    assert table.query().read_all().to_pylist() == data.to_pylist()


@pytest.mark.slow
def test_concurrent_loads_get_different_running_numbers(
    lake: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that begins while another runs gets the numbers after those of the other."""
    path = tmp_path / "x.csv"
    path.write_text("v\n1\n2\n3\n")
    files = dm.Files(str(path), row_number="n")
    table = lake.create_table("numbered", like=files)
    reading, second_done, found = Event(), Event(), ingest_module.open_source

    def slow(*given: Any) -> Any:
        if not reading.is_set():
            reading.set()
            second_done.wait(0.5)
        return found(*given)

    monkeypatch.setattr(ingest_module, "open_source", slow)
    first = Thread(target=table.ingest, args=(files,))
    first.start()
    assert reading.wait(30)
    table.ingest(files)
    second_done.set()
    first.join()
    assert table.query(columns=["n"]).read_all()["n"].to_pylist() == [*range(6)]


def test_running_numbers_continue_after_rows_that_a_filter_hides(lake: Instance, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(f"t\n{datetime.now(UTC).isoformat()}\n2020-01-01T00:00:00Z\n")
    files = dm.Files(str(path), row_number="n")
    table = lake.create_table("aged", like=files)
    table.set_properties(filter="age_off(t, 86400000)")
    for _ in range(2):
        table.ingest(files)
    assert table.query(columns=["n"]).read_all()["n"].to_pylist() == [0, 2]


def test_running_numbers_need_a_column_of_whole_numbers(lake: Instance, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("t\n2020-01-01T00:00:00Z\n")
    old = datetime(2020, 1, 1, tzinfo=UTC)
    values = [dm.Field("n", dm.LONG, nullable=True), dm.Field("s", dm.STRING, nullable=True)]
    table = lake.create_table("aged", dm.Schema([dm.Field("t", dm.TIMESTAMP)], [], values))
    table.set_properties(filter="age_off(t, 86400000)")
    table.ingest({"t": [old, old], "n": [4, None], "s": ["a", "b"]})
    assert lake._tables.next_number(table.context, "n") == 5
    with pytest.raises(InvalidData, match="no column 's' of LONG for running numbers"):
        table.ingest(dm.Files(str(path), row_number="s"))


@pytest.mark.parametrize("separator", [";", "|", "\t"])
def test_the_separator_is_found_in_later_loads_with_running_numbers(
    lake: Instance, tmp_path: Path, separator: str
) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a;b\n1;x\n2;y\n".replace(";", separator))
    files = dm.Files(str(path), row_number="n")
    table = lake.create_table("t", like=files)
    for _ in range(2):
        table.ingest(files)
    assert table.query(columns=["n", "a"]).read_all().to_pydict() == {"n": [0, 1, 2, 3], "a": [1, 2, 1, 2]}


def test_the_lock_for_running_numbers_survives_the_timeout_of_idle_sessions(lake: Instance, dsn: str) -> None:
    table = lake.create_table("t", like={"n": [1]}, row_keys=["n"]).files.table
    hasty = make_conninfo(dsn, options="-c idle_in_transaction_session_timeout=400")
    with closing(ConnectionSupplier(hasty)) as supplier, numbering(supplier, table) as alone:
        sleep(1.0)
        run_transaction(lake._supplier, alone.check)


def test_a_load_that_lost_the_lock_for_running_numbers_adds_nothing(
    lake: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.csv"
    path.write_text("v\n1\n2\n")
    table = lake.create_table("t", like={"n": [1], "v": [1]}, row_keys=["n"])
    files = dm.Files(str(path), row_number="n")
    tables = type(lake._tables)
    next_number = tables.next_number

    def lost(self: Any, *given: Any) -> int:
        number = next_number(self, *given)
        query(
            self.supplier,
            "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory'",
        )
        return number

    monkeypatch.setattr(tables, "next_number", lost)
    with pytest.raises(CommitFailed, match="the database was lost, or this process was frozen"):
        table.ingest(files)
    monkeypatch.undo()
    assert table.count() == 0
    table.ingest(files)
    assert table.query(columns=["n"]).read_all()["n"].to_pylist() == [0, 1]


def test_a_table_has_a_readable_repr_and_errors_suggest_names(lake: Instance) -> None:
    rows = [{"k": 1, "v": "<b>"}, {"k": 2, "v": None}]
    table = lake.create_table("people", like=rows, row_keys=["k"])
    table.ingest(rows)
    assert repr(table) == "Table('people': k long (key), v string?; 2 rows)"
    assert "people" in repr(lake) and "<td>2 rows</td>" in lake._repr_html_()
    assert "<td>string?</td>" in table._repr_html_()
    assert table.query(limit=1, offset=1).read_all().to_pylist() == [{"k": 2, "v": None}]
    backwards = table.query(columns=["k"], descending=True)
    assert backwards.read_all()["k"].to_pylist() == [2, 1]
    assert table.query({"k": [1]}, descending=True, limit=5).read_all().to_pylist() == rows[:1]
    assert table.to_polars(columns=["v"]).to_dicts() == [{"v": "<b>"}, {"v": None}]
    assert list(table.to_pandas({"k": 2})["k"]) == [2]
    with pytest.raises(TableNotFound, match="did you mean 'people'"):
        lake.table("peple")
    with pytest.raises(InvalidProperties, match="did you mean 'compression'"):
        table.set_properties(compresion="zstd")


def test_answers_are_exported_as_an_arrow_stream_or_a_parquet_file(lake: Instance) -> None:
    from dormouse.sources.export import export

    rows = pa.table({"k": [1, 2]})
    for name, read in (("arrow", pa.ipc.open_stream), ("parquet", pq.ParquetFile)):
        sink = io.BytesIO()
        assert export(rows.to_reader(), sink, name) == 2
        found = read(io.BytesIO(sink.getvalue()))
        assert (found.read_all() if name == "arrow" else found.read()).to_pydict() == {"k": [1, 2]}


def test_objects_in_s3_are_read_by_url(
    s3_options: dict[str, str], lake: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"endpoint": "AWS_ENDPOINT_URL", "region": "AWS_REGION"}
    names |= {"access_key_id": "AWS_ACCESS_KEY_ID", "secret_access_key": "AWS_SECRET_ACCESS_KEY"}
    for option, name in names.items():
        monkeypatch.setenv(name, s3_options[option])
    store = open_store(f"s3://{BUCKET}", **s3_options)
    folder = f"in-{uuid4().hex}"
    for month in (1, 2):
        store.put(f"{folder}/month={month}/x.csv", f"k,v\n{month},a\n".encode())
    url = f"s3://{BUCKET}/{folder}"
    table = lake.create_table("objects", like=url, row_keys=["k"])
    assert table.ingest(f"{url}/month=*/x.csv").rows == 2
    assert table.query(columns=["month"]).read_all()["month"].to_pylist() == [1, 2]
    for wrong, message in (
        (f"{url}/month=3/x.csv", "cannot be read"),
        (f"{url}/*.parquet", "names no objects"),
    ):
        with pytest.raises(InvalidData, match=message):
            table.ingest(wrong)


@pytest.mark.slow
def test_the_service_supports_any_column_name(lake: Instance) -> None:
    rows = [dict.fromkeys(NAMES, 1), dict.fromkeys(NAMES, 2)]
    table = lake.create_table("odd", like=pa.Table.from_pylist(rows), row_keys=[NAMES[0]])
    table.ingest(rows)
    with service(lake) as url, connect_service(url) as client:
        there = client.table("odd")
        assert there.schema == table.schema
        for name in NAMES:
            assert there.query({name: 2}, [name]).read_all().to_pylist() == [{name: 2}]
            assert there.query({name: dm.Range(2)}, descending=True).read_all().to_pylist() == rows[1:]
            quoted = '"' + name.replace('"', '""') + '"'
            found = there.sql(f"select {quoted} from odd where {quoted} = $1", [1]).read_all()
            assert found.to_pylist() == [{name: 1}]
        for accept in "text/csv", "application/x-ndjson":
            request = httpx.post(f"{url}/v1/tables/odd/query", json={}, headers={"accept": accept})
            assert request.status_code == 200
            if accept == "text/csv":
                assert next(csv.reader(io.StringIO(request.text))) == NAMES
            else:
                assert [json.loads(line) for line in request.text.splitlines()] == rows
        assert {*there.changes(None).read_all().column_names} == {*NAMES, "_change"}


@pytest.mark.parametrize("load", [["ingest"], ["rows", "upload"]])
def test_loading_a_missing_file_creates_no_instance(
    cli: Callable[..., Any], tmp_path: Path, load: list[str]
) -> None:
    code, _, err = cli(*load, "t", "none.csv", "--create")
    assert code == 1 and "none.csv" in err
    assert list(tmp_path.iterdir()) == []
