"""A query service in a separate process, run by `dormouse serve`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile


@dataclass(frozen=True)
class Service:
    """A running query service."""

    url: str
    process_id: int


@contextmanager
def served(dsn: str, objects: str, options: Sequence[str] = ()) -> Iterator[Service]:
    """Serves the instance on a free port. Raises RuntimeError if it does not start or exits with an error."""
    program = str(Path(sys.executable).with_name("dormouse"))
    command = [program, "serve", "--json", "--port", "0", "--dsn", dsn, "--objects", objects, *options]
    with TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            yield Service(_url(process), process.pid)
        finally:
            process.terminate()
            process.communicate()
        if process.returncode:
            log.seek(0)
            said = log.read().decode()[-2_000:]
            raise RuntimeError(f"the query service ended with exit code {process.returncode}: {said}")


def _url(process: subprocess.Popen[str]) -> str:
    text = ""
    for line in process.stdout or ():
        text += line
        try:
            return str(json.loads(text)["url"])
        except ValueError:
            continue  # the JSON document continues on the next line
    raise RuntimeError(f"the query service did not start; exit code {process.wait()}")
