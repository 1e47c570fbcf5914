"""The demo's flights in a deployed instance, and the demo's questions, compared with DuckDB."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb

from dormouse.demo.datasets import Flights, Question
from dormouse.demo.pipeline import Comparison, compare
from tests.deploy_local.processes import RunFailed
from tests.support.api import Instance

TABLE = Flights.main_table


def load(instance: Instance) -> str:
    """Makes the demo's tables and ingests its months through the queue."""
    with _flights() as (flights, _, rows):
        for made in flights.tables():
            instance.create_table(made.name, made.schema, properties=made.properties)
        for one in flights.loads():
            instance.table(one.table).ingest(one.data, engine="local")
    table = instance.table(TABLE)
    if (stored := table.status().row_count) != rows:
        raise RunFailed(f"table {TABLE} has {stored} rows, not the {rows} of the demo")
    return f"{rows:,} rows in {table.status().files} files"


def ask(instance: Instance) -> str:
    """Checks that each answer of the demo is the same as DuckDB's."""
    with _flights() as (flights, db, _):
        for question in flights.questions():
            if (result := _answer(instance, question, db)).difference is not None:
                raise RunFailed(f"{question.title}, {question.text}: {result.difference}")
        return f"{len(flights.questions())} answers are the same as DuckDB's"


def _answer(instance: Instance, question: Question, db: duckdb.DuckDBPyConnection) -> Comparison:
    if (statement := question.sql) is not None:
        return compare(lambda: instance.sql(statement), db, question.duckdb_sql)
    table = instance.table(TABLE)
    return compare(lambda: table.query(question.where, question.columns), db, question.duckdb_sql)


@contextmanager
def _flights() -> Iterator[tuple[Flights, duckdb.DuckDBPyConnection, int]]:
    """Yields the data set, a database with its raw data, and the number of its rows."""
    flights = Flights()
    with tempfile.TemporaryDirectory() as work, duckdb.connect() as db:
        yield flights, db, flights.prepare(db, Path(work), lambda _: None)
