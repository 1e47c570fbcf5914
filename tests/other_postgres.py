"""The choice of another PostgreSQL than the embedded one for the tests.

The variable DORMOUSE_TEST_POSTGRES is the folder of its programs.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from dormouse.embedded import postgres, server

VARIABLE = "DORMOUSE_TEST_POSTGRES"


def use_what_is_named() -> None:
    """Makes this process start servers of the PostgreSQL that the variable names.

    The test run ends if that folder has no PostgreSQL.
    """
    if not (named := os.environ.get(VARIABLE)):
        return
    programs = Path(named)
    if not (programs / "postgres").is_file():
        raise pytest.UsageError(f"{VARIABLE}: there is no program postgres in {programs}")
    told = subprocess.run([programs / "postgres", "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"\(PostgreSQL\) (\d+)", told.stdout)
    assert found is not None, told.stdout
    server.MAJOR_VERSION = int(found[1])
    for module in (server, postgres):
        module._binaries = lambda: programs  # type: ignore[attr-defined]
