"""The command line: every verb, text and JSON, exit codes, one-line errors."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dormouse.cli import main

DORMOUSE = str(Path(sys.executable).with_name("dormouse"))
CREATE = [
    *("table", "create", "flights", "--row-key", "carrier:string", "--row-key", "flight:long"),
    *("--sort-key", "time:long", "--value", "delay:long?", "--property", "gc_delay_seconds=0"),
]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Result]


@pytest.fixture
def cli(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Returns a function that runs a command line in this process, on an instance of the test's own."""

    def run(*args: str, on: tuple[str, ...] | None = None) -> Result:
        where = ("--dsn", dsn, "--objects", f"file://{tmp_path}/objects") if on is None else on
        monkeypatch.setattr(sys, "argv", ["dormouse", *args, *where])
        code = main()
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def flights(tmp_path: Path) -> str:
    rows = [("UA", 1, 10, 5), ("UA", 2, 11, None), ("AA", 7, 12, -3), ("DL", 1, 13, 0), ("A:B", 1, 14, 1)]
    names = ["carrier", "flight", "time", "delay"]
    columns = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    path = tmp_path / "flights.parquet"
    pq.write_table(pa.table(columns), path)
    return str(path)


@pytest.fixture
def loaded(cli: Cli, flights: str) -> Cli:
    assert cli(*CREATE, "--split-point", "DL").code == 0
    assert cli("ingest", "flights", flights, "--id", "first").code == 0
    return cli


def assert_one_line(result: Result, code: int, *words: str) -> None:
    assert (result.code, result.out) == (code, "")
    assert result.err.startswith("dormouse: ")
    assert result.err.count("\n") == 1
    for word in words:
        assert word in result.err


def test_a_table_is_created_shown_renamed_and_dropped(cli: Cli) -> None:
    assert "with 2 partitions" in cli(*CREATE, "--split-point", "DL").out
    assert cli("table", "list", "--json").json == ["flights"]
    shown = cli("table", "show", "flights", "--json").json
    assert shown["leaves"] == 2
    assert shown["properties"]["gc_delay_seconds"] == 0
    assert [field["name"] for field in shown["schema"]["row_keys"]] == ["carrier", "flight"]
    assert shown["leaf_partitions"][1]["region"] == {"carrier": {"min": "DL", "max": None}}
    assert "carrier ≥ 'DL'" in cli("table", "show", "flights").out
    assert cli("table", "rename", "flights", "f2").code == 0
    assert "f2" in cli("status").out
    assert cli("table", "drop", "f2", "--yes").code == 0
    assert cli("table", "list", "--json").json == []


def test_properties_are_set_and_reset_to_their_defaults(cli: Cli) -> None:
    cli(*CREATE)
    assert cli("table", "set", "flights", "compression=none", "gc_delay_seconds=", "--json").json == {
        "compression": "none",
        "gc_delay_seconds": 900,
    }
    assert_one_line(cli("table", "set", "flights", "colour=red"), 2, "'colour' is not a table property")
    assert_one_line(cli("table", "set", "flights", "gc_delay_seconds=-1"), 2, "gc_delay_seconds")


def test_a_schema_is_read_from_a_json_file(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"row_keys": [{"name": "id", "type": "bytes"}]}')
    made = cli("table", "create", "t", "--schema", str(path), "--json").json
    assert made["schema"]["row_keys"] == [{"name": "id", "type": "bytes", "nullable": False}]
    path.write_text("{")
    assert_one_line(cli("table", "create", "u", "--schema", str(path)), 2, "is not JSON")


@pytest.mark.slow
def test_a_schema_is_taken_from_a_parquet_file(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "like.parquet"
    columns = {"id": pa.array([1], pa.uint32()), "tags": [["a"]], "when": pa.array([0], pa.timestamp("ms"))}
    pq.write_table(pa.table(columns), path)
    made = cli("table", "create", "t", "--like", str(path), "--row-key", "id", "--json").json["schema"]
    assert made["row_keys"][0]["type"] == "long"  # an unsigned int does not fit a signed one
    assert [(field["name"], field["type"]) for field in made["values"]] == [
        ("tags", {"list": {"element": "string"}}),
        ("when", "timestamp"),
    ]
    assert cli("ingest", "t", str(path), "--json").json["rows"] == 1
    assert "added 1 row in 1 file (" in cli("ingest", "t", str(path)).out
    assert_one_line(cli("table", "create", "u", "--like", str(path), "--row-key", "x"), 2, "no column 'x'")


@pytest.mark.slow
def test_the_same_ingest_id_adds_nothing_twice(loaded: Cli, flights: str) -> None:
    again = loaded("ingest", "flights", flights, "--id", "first", "--json").json
    assert again["applied"] is False
    assert loaded("status", "flights", "--json").json[0]["row_count"] == 5


def test_rows_are_selected_by_key_ranges_and_lists_in_key_order(loaded: Cli) -> None:
    def keys_of(*args: str) -> list[tuple[str, int]]:
        return [(row["carrier"], row["flight"]) for row in loaded("query", "flights", "--json", *args).json]

    assert keys_of() == [("A:B", 1), ("AA", 7), ("DL", 1), ("UA", 1), ("UA", 2)]
    assert keys_of("--where", "carrier=UA") == [("UA", 1), ("UA", 2)]
    assert keys_of("--where", "carrier=AA:UA") == [("AA", 7), ("DL", 1)]
    assert keys_of("--where", "carrier=DL:", "--where", "flight=:2") == [("DL", 1), ("UA", 1)]
    assert keys_of("--where", "carrier=UA", "--where", "carrier=AA") == [("AA", 7), ("UA", 1), ("UA", 2)]
    assert keys_of("--where", "carrier=A\\:B") == [("A:B", 1)]
    assert keys_of("--where", "delay=0:") == [("A:B", 1), ("DL", 1), ("UA", 1)]
    assert keys_of("--where", "time=12", "--where", "delay=-3") == [("AA", 7)]
    assert keys_of("--limit", "1") == [("A:B", 1)]


def test_answers_are_printed_in_each_format(loaded: Cli, tmp_path: Path) -> None:
    select = ("sql", "select carrier, delay from flights where carrier >= 'UA' order by carrier, flight")
    assert loaded(*select, "--format", "json").json == [
        {"carrier": "UA", "delay": 5},
        {"carrier": "UA", "delay": None},
    ]
    assert list(csv.reader(loaded(*select, "--format", "csv").out.splitlines())) == [
        ["carrier", "delay"],
        ["UA", "5"],
        ["UA", ""],
    ]
    assert loaded(*select).err.strip() == "2 rows"
    path = tmp_path / "answer.parquet"
    assert loaded(*select, "--format", "parquet", "-o", str(path), "--json").json["rows"] == 2
    assert pq.read_table(path).to_pydict() == {"carrier": ["UA", "UA"], "delay": [5, None]}
    assert_one_line(loaded(*select, "--format", "xml"), 2, "'--format' / '-f': 'xml' is not one of")


@pytest.mark.slow
def test_a_terminal_shows_the_first_rows_and_a_hint(loaded: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    many = ("sql", "select i as value from generate_series(1, 100000) t(i)")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    assert loaded(*many).err.splitlines()[-1] == "the first 20 rows; --limit or --format for more"
    assert loaded(*many, "--limit", "30").err.splitlines()[-1] == "30 rows"
    most, none = (loaded(*many, "--limit", limit, "--json").json for limit in ("20000", "0"))
    assert (most[-1], none) == ({"value": 20_000}, [])
    assert loaded("sql", "select 1 as n", "--limit", "5", "--json").json == [{"n": 1}]


def test_explain_shows_the_partitions_and_files_that_would_be_read(loaded: Cli) -> None:
    plan = loaded("query", "flights", "--where", "carrier=UA", "--explain", "--json").json["flights"]
    assert (plan["partitions"], plan["partitions_total"], plan["files"]) == (1, 2, 1)
    statement = "select count(*) from flights where carrier = 'AA'"
    assert loaded("sql", statement, "--explain", "--json").json["flights"]["files"] == 1
    shown = loaded("sql", f"explain {statement}").out.splitlines()
    assert shown[:4] == ["dormouse", "  table flights", "    partitions: 1 of 2", shown[3]]
    assert {"      carrier: 'AA'", "physical_plan"} < set(shown)
    rows = loaded("sql", f"explain {statement}", "--json").json
    assert [row["plan_type"] for row in rows] == ["dormouse", "physical_plan"]


def test_a_table_is_compacted_split_and_collected(loaded: Cli, flights: str) -> None:
    assert loaded("ingest", "flights", flights).code == 0
    loaded("table", "set", "flights", "compaction_batch_files=2", "size_ratio=1")
    loaded("table", "set", "flights", "split_threshold_rows=5", "split_min_rows=2")
    report = loaded("compact", "flights", "--json").json
    assert [report[name] for name in ("jobs_run", "files_in", "files_out")] == [2, 4, 2]
    assert loaded("compact", "flights", "--full").out.startswith("nothing to compact")
    assert (loaded("gc", "flights").code, loaded("status", "--json").json[0]["files"]) == (0, 2)
    assert len(loaded("split", "flights", "--json").json["partitions_split"]) == 1
    assert "split 0 partitions" in loaded("split", "flights").out
    assert len(loaded("query", "flights", "--json").json) == 10


@pytest.mark.slow
def test_gc_lists_what_would_be_deleted(loaded: Cli, flights: str) -> None:
    loaded("table", "set", "flights", "compaction_batch_files=2", "size_ratio=1", "gc_delay_seconds=3600")
    loaded("ingest", "flights", flights)
    loaded("compact", "flights")
    assert "nothing would be deleted" in loaded("gc", "flights", "--dry-run").out
    assert "deleted 0 files; 4 more are without references" in loaded("gc", "flights").out
    loaded("table", "set", "flights", "gc_delay_seconds=0")
    assert len(loaded("gc", "flights", "--dry-run", "--json").json["would_delete"]) == 4
    assert len(loaded("gc", "flights", "--json").json["deleted_files"]) == 4


def test_a_drop_needs_yes_without_a_terminal(loaded: Cli) -> None:
    assert_one_line(loaded("table", "drop", "flights"), 2, "--yes", "5 rows")
    assert "would drop table flights: 5 rows" in loaded("table", "drop", "flights", "--dry-run").out
    assert loaded("status", "--json").json[0]["row_count"] == 5


@pytest.mark.slow
def test_rows_are_found_by_columns_of_every_type(cli: Cli, tmp_path: Path) -> None:
    values = ["d:double", "s:string", "raw:bytes", "yes:boolean", "at:timestamp", "tags:list<string>"]
    cli("table", "create", "all", "--row-key", "i:int", *(part for v in values for part in ("--value", v)))
    at = [datetime(2026, 1, day, 12, tzinfo=UTC) for day in (1, 2, 3)]
    columns = {"i": pa.array([1, 2, 3], pa.int32()), "d": [0.5, math.nan, 2.0], "s": ["a", "b", "b"]}
    columns |= {"raw": [b"\x00", b"x", b"y"], "yes": [True, False, True], "tags": [["a"], [], []]}
    pq.write_table(
        pa.table({**columns, "at": pa.array(at, pa.timestamp("us", "UTC"))}), tmp_path / "a.parquet"
    )
    cli("ingest", "all", str(tmp_path / "a.parquet"))

    def matching(*conditions: str) -> list[int]:
        where = [part for condition in conditions for part in ("--where", condition)]
        return [row["i"] for row in cli("query", "all", "--columns", "i", "--json", *where).json]

    assert (matching("d=0.5"), matching("d=:1"), matching("d=nan"), matching("i=2")) == ([1], [1], [2], [2])
    assert (matching("s=b", "yes=true"), matching("yes=False"), matching("raw=0x00")) == ([3], [2], [1])
    assert matching("at=2026-01-01T13\\:00:2026-01-03") == [2]
    assert matching("at=2026-01-01T12\\:00Z", "at=2026-01-03T13\\:00+01\\:00") == [1, 3]
    for condition, word in {"d=x": "not a number", "yes=1": "true or false", "at=noon": "not a time"}.items():
        assert_one_line(cli("query", "all", "--where", condition), 2, word)
    assert_one_line(cli("query", "all", "--where", "tags=a"), 2, "which has no order")


@pytest.mark.slow
def test_errors_are_one_line_and_have_their_exit_codes(loaded: Cli, tmp_path: Path) -> None:
    assert_one_line(loaded("query", "missing"), 1, "table 'missing' does not exist")
    assert_one_line(loaded("query", "flights", "--where", "dealy=1"), 2, "unknown column 'dealy'", "'delay'")
    assert_one_line(loaded("query", "flights", "--where", "flight=x"), 2, "whole number")
    assert_one_line(loaded("query", "flights", "--columns", "nope"), 2, "nope")
    assert_one_line(loaded("query", "flights", "--limit", "-1"), 2, "limit")
    assert_one_line(loaded("sql", "select"), 2)
    assert_one_line(loaded("sql", "drop table flights"), 2)
    assert_one_line(loaded("ingest", "flights", str(tmp_path / "none.parquet")), 1, "none.parquet")
    assert_one_line(loaded(*CREATE), 1, "exists already")
    assert_one_line(loaded("table", "create", "../x", "--row-key", "a:long"), 2, "'../x'")
    assert_one_line(loaded("tabel", on=()), 2, "tabel")
    assert_one_line(loaded("table", "list", on=("-i", str(tmp_path / "no"))), 1, "no instance")
    assert_one_line(loaded("table", "list", on=("--dsn", "x")), 2, "--objects")


def test_the_environment_may_name_a_deployed_instance(
    loaded: Cli, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DORMOUSE_DSN", dsn)
    monkeypatch.setenv("DORMOUSE_OBJECTS", f"file://{tmp_path}/objects")
    assert loaded("table", "list", "--json", on=()).json == ["flights"]
    # an option takes precedence over the environment
    assert_one_line(loaded("table", "list", on=("-i", str(tmp_path / "no"))), 1, "no instance")


def test_only_the_creation_of_a_table_creates_an_instance(cli: Cli, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert_one_line(cli("split", "t", on=("-i", str(empty))), 1, "is not a Dormouse instance")
    assert_one_line(cli("status", on=("-i", str(empty))), 1, "is not a Dormouse instance")
    assert list(empty.iterdir()) == []


def test_debug_adds_a_traceback(loaded: Cli) -> None:
    result = loaded("query", "missing", "--debug")
    assert result.err.startswith("Traceback")
    assert result.err.splitlines()[-1].startswith("dormouse: table 'missing'")


@pytest.mark.slow
def test_the_instance_can_be_named_by_the_environment(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DORMOUSE_INSTANCE", str(tmp_path / "mine"))
    assert cli("table", "create", "t", "--row-key", "id:long", on=()).code == 0
    assert (tmp_path / "mine" / "dormouse.json").exists()


@pytest.mark.slow
def test_a_table_is_converted_to_another_layout(loaded: Cli) -> None:
    convert = ("table", "convert-layout", "flights")
    rows = loaded("query", "flights", "--json").json
    assert loaded("table", "show", "flights", "--json").json["layout"] == "file_table"
    dry = loaded(*convert, "salted_counts", "--dry-run").out
    assert "would convert table flights" in dry and "from file_table to salted_counts" in dry
    assert "layout file_table" in loaded("table", "show", "flights").out
    assert loaded(*convert, "salted_counts", "--json").json == {
        "table": "flights", "was": "file_table", "layout": "salted_counts", "converted": True
    }  # fmt: skip
    assert "layout salted_counts" in loaded("table", "show", "flights").out
    assert loaded("query", "flights", "--json").json == rows
    assert_one_line(
        loaded(*convert, "salt"), 2, "layout 'salt' is not known; use file_table, salted_counts or"
    )
    same = loaded(*convert, "salted_counts")
    assert (same.code, same.out.count("\n")) == (0, 1)
    assert "already has the layout salted_counts" in same.out


def test_an_impossible_number_of_dead_letters_is_refused(cli: Cli) -> None:
    cli("table", "create", "t", "--row-key", "id:long")
    for number in ("-1", "99999999999999999999"):
        assert_one_line(cli("queue", "--dead", number), 2, "--dead")


def test_help_has_an_example_for_every_verb(cli: Cli) -> None:
    verbs = ["demo", "ingest", "query", "sql", "compact", "split", "gc", "status"]
    verbs += [
        f"table {name}"
        for name in ("create", "list", "show", "describe", "drop", "rename", "set", "convert-layout")
    ]
    for verb in verbs:
        assert f"Example: dormouse {verb}" in " ".join(cli(*verb.split(), "--help", on=()).out.split())


@pytest.mark.slow
def test_the_program_starts_without_heavy_libraries() -> None:
    script = (
        "import sys; from dormouse.cli import main; sys.argv[1:] = ['--help']; main(); "
        "print(sorted({'pyarrow', 'datafusion', 'pyspark', 'pandas', 'rich', 'duckdb'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_an_interrupt_that_a_library_turns_into_another_error_is_still_an_interrupt(tmp_path: Path) -> None:
    """DuckDB raises RuntimeError("Query interrupted") at an interrupt."""
    (tmp_path / "interrupted.py").write_text(
        "import os, signal, sys, dormouse.embedded.local\n"
        "def opened(*args, **options):\n"
        "    try:\n        os.kill(os.getpid(), signal.SIGINT)\n"
        "    except KeyboardInterrupt:\n        raise RuntimeError('Query interrupted') from None\n"
        "dormouse.embedded.local.local = opened\n"
        "from dormouse.cli import main\n"
        "sys.argv[1:] = ['table', 'create', 't', '--row-key', 'id:long']\n"
        "sys.exit(main())\n"
    )
    command = [sys.executable, str(tmp_path / "interrupted.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "dormouse: interrupted\n")


@pytest.mark.slow
def test_a_missing_extra_is_one_line_with_the_command() -> None:
    script = (
        "import sys; sys.modules['duckdb'] = None; from dormouse.cli import main; "
        "sys.argv[1:] = ['demo', '--folder', '/nowhere/at/all']; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert_one_line(
        Result(done.returncode, done.stdout, done.stderr),
        1,
        "duckdb is not installed",
        "'dormouse-lake[demo]'",
    )


@pytest.mark.slow
def test_a_column_has_its_name_in_the_answer(loaded: Cli) -> None:
    assert "carrier[bold]" in loaded("sql", 'select 1 as "carrier[bold]"').out


@pytest.mark.slow
def test_a_closed_pipe_is_silent(loaded: Cli, dsn: str, tmp_path: Path) -> None:
    """The reader of the output stops after the first of many lines, like `| head`."""
    wide = "select a.carrier from flights a " + " ".join(f"cross join flights f{i}" for i in range(7))
    command = [
        DORMOUSE,
        "sql",
        wide,
        "--format",
        "csv",
        "--dsn",
        dsn,
        "--objects",
        f"file://{tmp_path}/objects",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == (b"", 0)


def test_the_program_is_installed() -> None:
    done = subprocess.run([DORMOUSE, "--version"], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.startswith("dormouse 0.")
