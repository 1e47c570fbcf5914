"""Programs with row tables that end without closing their instance."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import dormouse as dm
instance = dm.connect(*sys.argv[1:])
rows = instance.create_row_table("r", [dm.Column("n", "INTEGER")])
rows.change([dm.Insert([{"n": 1}])])
print(rows.query("select n from r").rows)
"""
LOCAL = PROGRAM.replace("dm.connect", "dm.local")


def printed(program: str, *arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_program_that_ends_without_close_prints_nothing_of_its_worker(dsn: str, tmp_path: Path) -> None:
    assert printed(PROGRAM, dsn, (tmp_path / "objects").as_uri()) == (0, "[(1,)]\n", "")


@pytest.mark.slow
def test_a_program_with_an_embedded_server_prints_nothing(tmp_path: Path) -> None:
    """The program's worker must end before the server is stopped."""
    assert printed(LOCAL, str(tmp_path / "lake")) == (0, "[(1,)]\n", "")
