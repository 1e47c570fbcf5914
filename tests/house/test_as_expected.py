"""Tables, schemas and answers that follow the conventions of other Python libraries."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dormouse as dm
from dormouse.cli import output
from dormouse.client import connect
from dormouse.errors import TableNotFound
from tests.serving import serving
from tests.standard import OF_K
from tests.support.api import Instance, Table
from tests.support.rows import RowTable

SCHEMA = dm.Schema(
    [dm.Field("k", dm.LONG)],
    [dm.Field("at", dm.DATE)],
    [
        dm.Field("v", dm.STRING, nullable=True),
        dm.Field("n", dm.STRUCT([dm.Field("x", dm.LIST(dm.DECIMAL(9, 2)), nullable=True)]), nullable=True),
        dm.Field("m", dm.MAP(dm.STRING, dm.LONG), nullable=True),
    ],
)
NAMED = "select name from staff where name = $n"
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def table(instance: Instance) -> Table:
    made = instance.create_table("t", OF_K)
    made.ingest({"k": range(50)})
    return made


@pytest.fixture
def cli(table: Table, instance: Instance, dsn: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("DORMOUSE_DSN", dsn)
    monkeypatch.setenv("DORMOUSE_OBJECTS", instance.objects.url)
    return cli


def check(table: Any) -> None:
    """Checks a table with pyarrow, pandas and Polars. The table is local or that of a service."""
    assert (len(table), bool(table)) == (50, True)
    assert pa.table(table).column("k").to_pylist() == list(range(50))
    assert pl.DataFrame(table).height == 50
    for answer in (
        table.query,
        lambda: table.query(limit=50, offset=0),
        lambda: table.sql("select k from t order by k"),
        lambda: table.changes(None),
    ):
        assert isinstance(answer(), pa.RecordBatchReader)
        assert answer().arrow().num_rows == answer().df().shape[0] == answer().pl().height == 50
        assert pa.table(answer()).num_rows == sum(batch.num_rows for batch in answer()) == 50
        with answer() as reader:
            assert reader.schema.names[0] == "k"
            assert next(reader).num_rows + reader.read_all().num_rows == 50


@pytest.mark.slow
def test_other_libraries_accept_a_table(table: Table, instance: Instance) -> None:
    check(table)
    assert instance.sql("select 1 as x").df()["x"].tolist() == [1]
    other = instance.create_table("other", like=table, row_keys=["k"])
    assert other.ingest(table).rows == other.ingest(table.query()).rows == 50


@pytest.mark.slow
def test_other_libraries_accept_a_table_of_a_service(table: Table, instance: Instance) -> None:
    with serving(instance) as url, connect(url) as client:
        check(client.table("t"))


@pytest.fixture
def staff(instance: Instance) -> RowTable:
    rows = instance.create_row_table("staff", [dm.Column("name", "STRING"), dm.Column("since", "DATE")])
    rows.change([dm.Insert([{"name": "ann", "since": 5}, {"name": "bob"}, {"name": "eve"}])])
    rows.change([dm.Remove([(2, 1)]), dm.Patch([{"ROW_ID": 3, "ROW_VERSION": 1, "name": "eva"}])])
    return rows


@pytest.mark.slow
def test_other_libraries_accept_a_row_table(staff: RowTable, instance: Instance) -> None:
    """The row table's current rows are checked, locally and through a service."""
    expected = staff.current().read_all()
    with serving(instance) as url, connect(url) as client:
        for rows in (staff, client.row_table("staff")):
            assert (len(rows), rows.count(), bool(rows)) == (2, 2, True)
            assert pa.table(rows).to_pylist() == expected.to_pylist()
            assert pl.DataFrame(rows).shape == (2, 4)
            assert duckdb.sql("select name from rows order by 1").fetchall() == [("ann",), ("eva",)]
            for statement, values in (("select name from staff order by 1", None), (NAMED, {"n": "eva"})):
                for answer in (rows.sql(statement, values), rows.sql(statement, values)):
                    assert isinstance(answer, pa.RecordBatchReader)
                    assert answer.arrow().column("name").to_pylist()[-1] == "eva"
            assert rows.sql("select 1 as x").df().shape == rows.sql("select 1 as x").pl().shape == (1, 1)
    empty = instance.create_row_table("empty", [dm.Column("n", "INTEGER")])
    assert (len(empty), bool(empty), pa.table(empty).num_rows) == (0, True, 0)


@pytest.mark.slow
def test_tables_are_items_of_their_client(table: Table, staff: RowTable, instance: Instance) -> None:
    with serving(instance) as url, connect(url) as client:
        assert client["t"].count() == 50
        assert pa.table(client["staff"]).num_rows == 2
        assert ("t" in client, "u" in client, list(client)) == (True, False, ["staff", "t"])
        assert repr(client) == f"Client({url!r})"
        with pytest.raises(TableNotFound):
            client["u"]


def test_tables_are_items_of_their_instance(table: Table, instance: Instance) -> None:
    assert instance["t"].count() == 50
    assert ("t" in instance, "u" in instance, list(instance)) == (True, False, ["t"])
    with pytest.raises(TableNotFound):
        instance["u"]


def test_the_repr_of_a_schema_is_code_that_makes_it() -> None:
    shown = repr(SCHEMA)
    assert shown == (
        "Schema(row_keys=[Field('k', LONG)], sort_keys=[Field('at', DATE)], values=[Field('v', STRING, "
        "nullable=True), Field('n', STRUCT([Field('x', LIST(DECIMAL(9, 2)), nullable=True)]), "
        "nullable=True), "
        "Field('m', MAP(STRING, LONG), nullable=True)])"
    )
    assert eval(shown, vars(dm)) == SCHEMA  # noqa: S307


@pytest.mark.slow
def test_the_name_of_an_output_file_decides_its_format(cli: Cli, tmp_path: Path) -> None:
    for verb in (
        ("query", "t"),
        ("sql", "select k from t order by k"),
        ("changes", "t", "--after", "beginning"),
    ):
        assert cli(*verb, "-o", "x.parquet")[0] == 0
        assert pq.read_table(tmp_path / "x.parquet").num_rows == 50
        assert cli(*verb, "-o", "x.csv")[0] == 0
        assert len((tmp_path / "x.csv").read_text().splitlines()) == 51
        assert cli(*verb, "-o", "x.json", "--format", "lines" if verb[0] != "changes" else "csv")[0] == 0
        (tmp_path / "x.json").unlink()
    code, _, err = cli("query", "t", "-o", "x.data")
    assert (code, err.count("\n")) == (2, 1) and "--output x.parquet" in err
    assert cli("changes", "t", "--after", "beginning", "-o", "x.data")[0] == 0
    assert json.loads((tmp_path / "x.data").read_text().splitlines()[0])["k"] == 0


def test_a_pipe_gets_all_rows(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "TABLE_ROWS", 25)
    _, out, err = cli("query", "t")
    cells = [line.strip("│| ") for line in out.splitlines()]
    assert [cell for cell in cells if cell.isdigit()] == [str(number) for number in range(50)]
    assert err == "50 rows\n"
