"""Imports of operations: an operation loads only the heavy libraries that it needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.standard import OF_KEYS
from tests.support.api import Instance
from tests.support.rows import Column

HEAVY = [
    "datafusion",
    "datasketches",
    "duckdb",
    "httpx",
    "obstore",
    "pyarrow",
    "pyspark",
    "sqlglot",
    "zstandard",
]
STEPS = """
import json, sys, dormouse as dm
def step(name, work):
    work()
    found[name] = sorted(set(heavy) & set(sys.modules))
dsn, objects, heavy = json.loads(sys.argv[1])
found = {}
with dm.connect(dsn, objects) as instance:
    step("open", lambda: [table.status() for table in instance.tables()])
    step("check", instance.check)
    step("start a job", lambda: instance.jobs.start("compact", {"table": "t"}))
    step("query", lambda: list(instance.table("t").query({"key": 1})))
    step("change rows", lambda: instance.row_table("r").change([dm.Insert([{"n": 1}])]))
    step("sql", lambda: list(instance.sql("select * from t")))
print(json.dumps(found))
"""


def test_each_operation_loads_only_the_heavy_libraries_it_needs(
    instance: Instance, dsn: str, tmp_path: Path
) -> None:
    instance.create_table("t", OF_KEYS).ingest([{"key": 1}])
    instance.create_row_table("r", [Column("n", "INTEGER")])
    given = json.dumps([dsn, (tmp_path / "objects").as_uri(), HEAVY])
    done = subprocess.run([sys.executable, "-c", STEPS, given], capture_output=True, text=True, check=True)
    read = ["datafusion", "pyarrow"]
    assert json.loads(done.stdout) == {
        "open": [],
        "check": ["zstandard"],
        "start a job": ["zstandard"],
        "query": [*read, "zstandard"],
        "change rows": ["datafusion", "datasketches", "pyarrow", "zstandard"],
        "sql": ["datafusion", "datasketches", "duckdb", "pyarrow", "zstandard"],
    }
