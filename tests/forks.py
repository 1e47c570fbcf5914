"""A process that has imported Dormouse, and forks a child for each program, which begins at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import NoReturn

IMPORTED = (
    "api.instance", "api.table", "durability.backups", "durability.erasing", "embedded.restoring",
    "objects.folder", "objects.s3", "reading.executor", "reading.scan_session", "writing.compaction_job",
)  # fmt: skip


class Forks:
    """The parent of the children, which run one after another."""

    def __init__(self) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, "-c", "from tests.forks import serve; serve()"],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, program: str, *arguments: object) -> int:
        """Runs a program with this process's environment, as `python -c` would.

        Returns its exit code, which is negative for a signal.
        """
        assert self._parent.stdin is not None and self._parent.stdout is not None
        line = json.dumps([program, [*map(str, arguments)], dict(os.environ)])
        print(line, file=self._parent.stdin, flush=True)
        return int(self._parent.stdout.readline())

    def close(self) -> None:
        self._parent.communicate()


def serve() -> None:
    """Runs as the parent process. Forks a child for each line that it reads."""
    for name in IMPORTED:
        import_module(f"dormouse.{name}")
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            _run(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(program: str, arguments: list[str], environment: dict[str, str]) -> NoReturn:
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)  # exit codes of children go to the standard output
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["-c", *arguments]
        exec(program, {"__name__": "__main__"})  # noqa: S102
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
