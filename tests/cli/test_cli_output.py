"""Tests of the outputs that the command line writes to: full or closed ones, devices, pipes and links."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.cli import maintenance, tables
from dormouse.cli.command import Session
from dormouse.cli.failures import interrupts_once
from dormouse.durability.maintaining import InstanceRound
from tests.standard import OF_KEYS

ROWS = '"key"\n1\n2\n'
Shell = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture
def shell(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Returns a function that runs a line of shell in a folder of its own.

    The line uses an instance that has a table of two rows.
    """
    objects = f"file://{tmp_path}/objects"
    with dm.connect(dsn, objects) as instance:
        table = instance.create_table("t", OF_KEYS)
        table.ingest(pa.table({"key": [1, 2]}))
    monkeypatch.setenv("DORMOUSE_DSN", dsn)
    monkeypatch.setenv("DORMOUSE_OBJECTS", objects)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

    def run(line: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "-c", line]
        return subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path, timeout=60)

    return run


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "command",
    [
        "query t --format csv",
        "--version",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("query t", "query t --json")),
    ],
)
def test_an_output_that_is_full_or_closed_fails_in_one_line(shell: Shell, command: str) -> None:
    for where, why in ((">/dev/full", "No space left on device"), (">&-", "Bad file descriptor")):
        done = shell(f"dormouse {command} {where}")
        expected = f"dormouse: cannot write to standard output: {why}\n"
        if "--json" in command:
            message = expected.removeprefix("dormouse: ").strip()
            expected = json.dumps({"error": "DormouseError", "message": message, "exit_code": 1}) + "\n"
        assert (done.stdout, done.stderr, done.returncode) == ("", expected, 1)


@pytest.mark.slow
def test_a_table_for_a_closed_pipe_is_silent(shell: Shell) -> None:
    done = shell("dormouse query t | true; echo ${PIPESTATUS[0]}")
    assert (done.stdout, done.stderr) == ("0\n", "")


@pytest.mark.slow
def test_a_command_with_every_stream_closed_still_writes_files(shell: Shell, tmp_path: Path) -> None:
    """A file that is opened must not get the number of a closed stream, because output would go into the
    file.
    """
    done = shell("dormouse query t -f csv -o rows.csv <&- >&- 2>&-")
    assert (done.returncode, (tmp_path / "rows.csv").read_text()) == (1, ROWS)


@pytest.mark.slow
def test_a_device_or_a_pipe_is_written_to_and_not_replaced(shell: Shell, tmp_path: Path) -> None:
    """The test uses a link to the device, so that a fault of the command cannot replace the device."""
    null, pipe = tmp_path / "null", tmp_path / "pipe"
    null.symlink_to(os.devnull)
    assert shell("dormouse query t -f csv -o null").returncode == 0
    assert null.is_symlink() and null.is_char_device()
    os.mkfifo(pipe)
    done = shell("cat pipe & dormouse query t -f csv -o pipe >printed; wait")
    assert (done.stdout, pipe.is_fifo()) == (ROWS, True)
    assert (tmp_path / "printed").read_text() == "wrote 2 rows to pipe\n"


@pytest.mark.slow
def test_a_link_is_followed_and_its_target_written(shell: Shell, tmp_path: Path) -> None:
    link, target = tmp_path / "link.csv", tmp_path / "folder" / "target.csv"
    target.parent.mkdir()
    link.symlink_to(target)
    for _ in ("new", "there already"):
        assert shell("dormouse query t -f csv -o link.csv").returncode == 0
        assert link.is_symlink() and target.read_text() == ROWS
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.slow
def test_control_sequences_of_terminals_are_shown_escaped(shell: Shell) -> None:
    """The sequences are in cells, names of columns and errors. Formats for machines have the stored value."""
    statement = """select chr(27) || '[31m' || chr(155) || chr(8238) as "a\x1b]0;b" """
    shown = shell(f"dormouse sql {shlex.quote(statement)}").stdout
    assert r"\x1b[31m\x9b\u202e" in shown and r"a\x1b]0;b" in shown
    assert "\x1b" not in shown
    assert "\x1b[31m" in shell(f"dormouse sql {shlex.quote(statement)} -f csv").stdout
    failed = shell('dormouse sql "select (chr(27) || chr(99))::int"').stderr
    assert r"\x1bc" in failed and "\x1b" not in failed


def test_control_sequences_in_lines_are_shown_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """The lines are errors of rounds and properties of tables, which other users may have written."""
    now = datetime.now(UTC)
    failed = InstanceRound("backup", now, now, error="a\x1b[31m", well_at=None)
    counts = dict.fromkeys(("row_count", "byte_count", "files", "references", "leaves"), 0)
    schema = OF_KEYS.to_json()
    found: dict[str, Any] = {"name": "t", "rows_exact": True, "layout": "", "schema": schema, **counts}
    found["properties"], found["schema_version"] = {"p": "b\x1b[31m"}, 2
    found["schema_changes"] = [{"change": "c\x1b[31m"}]
    for shown in (
        lambda: "[d]\n\x1b]0;title\x07",
        lambda: tables._summary(found),
    ):
        Session().show(None, shown)
    Session().table(None, ["column"], [["cell"]], maintenance._last_of(failed))
    out = capsys.readouterr().out
    assert all(rf"{letter}\x1b[31m" in out for letter in "abc") and "[d]\n\\x1b]0;title\\x07\n" in out
    assert "\x1b" not in out


@pytest.mark.slow
def test_an_interval_is_shown_in_iso_format(shell: Shell) -> None:
    statement = "select interval '14 months 3 days 1.5 seconds' as a, [interval '0'] as b"
    shown = shell(f'dormouse sql "{statement}"').stdout
    assert "P14M3DT1.5S" in shown and '["P0M0DT0S"]' in shown


@pytest.mark.parametrize(
    ("command", "engine", "others"),
    [("query t", "datafusion", {"duckdb"}), ("sql 'from t'", "duckdb", set())],
)
def test_a_query_loads_nothing_that_it_does_not_need(
    shell: Shell, tmp_path: Path, command: str, engine: str, others: set[str]
) -> None:
    """Arrow alone would load pandas, and typer alone would load all commands."""
    (tmp_path / "program.py").write_text(
        f"import sys, dormouse_command; sys.argv[1:] = {shlex.split(command)}; dormouse_command.main(); "
        "print(*sys.modules)"
    )
    done = shell("python program.py")
    assert (done.returncode, done.stderr) == (0, "2 rows\n")
    loaded = set(done.stdout.splitlines()[-1].split())
    assert {"dormouse.cli.data", engine} <= loaded
    assert loaded & {"pandas", "pyspark", "sqlglot", "boto3", "fastapi", *others} == set()
    commands = {name for name in loaded if name.startswith("dormouse.cli.")}
    assert commands.isdisjoint({"dormouse.cli.tables", "dormouse.cli.rows", "dormouse.cli.system"})


def test_signal_handlers_are_restored_after_an_error_too() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), interrupts_once():
        raise ZeroDivisionError
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
