"""Unions of large joins, whose answers DuckDB cannot stream; see `reading/sql/streaming.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from dormouse.reading.sql.streaming import streamable

ROWS = 600_000
"""The rows of a table from which one thread of DuckDB expects enough to let parts of a union wait."""
# no interrupt ends such a statement
PROGRAM = f"""
import sys
import pyarrow as pa
import dormouse as dm
from dormouse.reading.sql import engine

def connection(objects, connect=engine.connection):
    made = connect(objects)
    made.execute("SET threads = 1")
    return made

engine.connection = connection
with dm.connect(*sys.argv[1:3]) as instance:
    schema = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("s", dm.STRING)])
    table = instance.create_table("t", schema)
    keys = pa.array(range({ROWS}), pa.int64())
    table.ingest(pa.table({{"k": keys, "s": pa.repeat("a text", {ROWS})}}), engine="local")
    answer = instance.sql(sys.argv[3], [1]).read_all()
    print(answer.num_rows, *answer.column_names)
"""
JOIN = "select a.k, a.s from t a join t b on a.k = b.k + {}"
BOTH = f"{JOIN.format(0)} union all {JOIN.format('$1')}"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("statement", "answer"),
    [
        (f"{BOTH} where a.k % 2 = 0;", f"{ROWS + ROWS // 2 - 1} k s"),
        (f"select k, s, 1 as k from ({BOTH})", f"{2 * ROWS - 1} k s k_1"),
        (f"select k, s from t union all {BOTH} -- of three parts", f"{3 * ROWS - 1} k s"),
    ],
)
def test_unions_of_large_joins_are_answered(dsn: str, tmp_path: Path, statement: str, answer: str) -> None:
    program = [sys.executable, "-c", PROGRAM, dsn, str(tmp_path), statement]
    found = subprocess.run(program, capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout == f"{answer}\n"


class _Interrupted:
    def execute(self, *_: object) -> None:
        raise duckdb.InterruptException("INTERRUPT Error: Interrupted!")


def test_an_interrupt_while_a_plan_is_made_is_not_lost() -> None:
    with pytest.raises(duckdb.InterruptException):
        streamable(_Interrupted(), BOTH, [1], {})  # type: ignore[arg-type]
