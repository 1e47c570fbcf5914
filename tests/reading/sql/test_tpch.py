"""TPC-H tables written by tpchgen-cli are loaded unchanged, and the answers equal DuckDB's."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path

import duckdb
import pytest
from typer.testing import CliRunner

import dormouse as dm
from benchmarks.sql.__main__ import TPCH
from benchmarks.sql.lake import TABLES
from benchmarks.sql.sides import duckdb_connection, rows_of, same
from dormouse.cli import program
from dormouse.demo.datasets import generator

SCALE = "0.01"
DAY = date(1995, 6, 1)


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tpch")
    command = [str(generator()), "parquet", "--scale-factor", SCALE, "--output-dir", str(folder), "--quiet"]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture
def theirs(generated: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb_connection() as made:
        for name in TABLES:
            made.execute(f"create view {name} as from '{generated / name}.parquet'")
        yield made


@pytest.mark.slow
def test_tpch_tables_are_loaded_and_the_queries_are_right(
    generated: Path, theirs: duckdb.DuckDBPyConnection, dsn: str, tmp_path: Path
) -> None:
    objects = f"file://{tmp_path}/objects"
    there = ["--dsn", dsn, "--objects", objects]
    run = CliRunner()
    for name, keys in TABLES.items():
        path = str(generated / f"{name}.parquet")
        words = [word for key in keys for word in ("--row-key", key)]
        made = run.invoke(program.whole(), ["table", "create", name, "--like", path, *words, *there])
        assert made.exit_code == 0, made.output
        assert run.invoke(program.whole(), ["ingest", name, path, "--engine", "local", *there]).exit_code == 0
    with dm.connect(dsn, objects) as instance:
        lineitem = instance.table("lineitem").schema
        assert lineitem.field("l_discount").type == dm.DECIMAL(15, 2)
        assert lineitem.field("l_shipdate").type == dm.DATE
        for name in TABLES:
            whole = f"select * from {name}"
            assert same(
                rows_of(instance.sql(whole).read_all()),
                rows_of(
                    theirs.execute(
                        f"select {', '.join(instance.table(name).schema.names)} from {name}"
                    ).to_arrow_table()
                ),
            ), name
        for name, statement in TPCH.items():
            ours = rows_of(instance.sql(statement).read_all())
            assert same(ours, rows_of(theirs.execute(statement).to_arrow_table())), name
            assert ours or name in {"q2", "q18", "q20", "q21"}, f"{name} is asked of rows that there are"
        instance.table("lineitem").delete({"l_discount": Decimal("0.05"), "l_shipdate": dm.Range(max=DAY)})
        rest = f"l_discount <> 0.05 or l_shipdate >= date '{DAY}'"
        theirs.execute(f"create or replace view lineitem as from '{generated}/lineitem.parquet' where {rest}")
        for name in ("q1", "q6", "q12"):
            ours = rows_of(instance.sql(TPCH[name]).read_all())
            assert same(ours, rows_of(theirs.execute(TPCH[name]).to_arrow_table())), name
