"""Calls without the extras. A call that needs an extra names it in its error, and the others work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dormouse.errors import EXTRAS, DependencyMissing, names_what_is_missing
from tests.without import BLOCKED

PROGRAM = (
    BLOCKED
    + """
import dormouse as dm

lines = {}
def ask(name, call):
    try:
        call()
        lines[name] = None
    except dm.DormouseError as error:
        lines[name] = f"{type(error).__name__}: {error}"

with dm.connect(sys.argv[2], sys.argv[3]) as instance:
    schema = dm.Schema(row_keys=[dm.Field("k", dm.LONG)], values=[dm.Field("v", dm.LONG)])
    table = instance.create_table("t", schema)
    ask("query", lambda: table.query({"k": 1}))
    ask("count", table.count)
    ask("ingest", lambda: table.ingest("x.csv"))
    ask("delete", lambda: table.delete({"k": 1}))
    ask("compact", table.compact)
    ask("split", table.split)
    ask("changes", lambda: table.changes(None))
    ask("like", lambda: instance.create_table("u", like="x.csv", row_keys=["k"]))
    ask("sql", lambda: instance.sql("select 1"))
    ask("explain_sql", lambda: instance.explain_sql("select 1"))
    ask("duckdb", instance.duckdb)
    ask("check", instance.check)
    ask("rows", lambda: instance.create_row_table("rows", [dm.Column("n", "INTEGER")]))
    ask("status", table.status)
    ask("cut", table.history.record_cut)
    ask("collect", table.collect_garbage)
print(json.dumps(lines))
"""
)


@pytest.mark.slow
def test_a_call_that_needs_an_extra_names_it(dsn: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, json.dumps([*EXTRAS]), dsn, f"file://{tmp_path}/objects"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout)
    assert [name for name, line in lines.items() if line is None] == ["check", "status", "cut", "collect"]
    for name, line in lines.items():
        if line is not None:
            extra = "sql" if name in {"count", "sql", "explain_sql", "duckdb"} else "query"
            assert line.startswith("DependencyMissing: "), (name, line)
            assert line.endswith(f" is not installed: pip install 'dormouse-lake[{extra}]'"), (name, line)


def test_a_missing_module_of_no_extra_raises_module_not_found() -> None:
    @names_what_is_missing
    class Caller:
        def ours(self) -> None:
            raise ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow.compute")

        def theirs(self) -> None:
            raise ModuleNotFoundError("No module named 'theirs'", name="theirs")

    with pytest.raises(DependencyMissing, match="pyarrow is not installed"):
        Caller().ours()
    with pytest.raises(ModuleNotFoundError, match="theirs"):
        Caller().theirs()
