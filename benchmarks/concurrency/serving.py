"""A query service in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile

from benchmarks.concurrency.clients import Target


@contextmanager
def served(target: Target, options: Sequence[str] = ()) -> Iterator[Target]:
    """The same by way of `dormouse serve`."""
    where = ["--dsn", target.dsn, "--objects", target.objects]
    program = str(Path(sys.executable).with_name("dormouse"))
    command = [program, "serve", "--json", "--port", "0", *where, *options]
    with TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            yield replace(target, url=_url(process))
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
            continue  # a document of several lines
    raise RuntimeError(f"the query service did not start; exit code {process.wait()}")
