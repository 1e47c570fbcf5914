"""Python workers of Spark. When a test asks, the next to write or read something hangs until it is killed.

As `spark.python.daemon.module`, this module starts the Python workers of an executor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import daemon

from dormouse.objects.s3 import S3Store

WRITES = "TEST_HELD_WRITES"
"""The environment variable with the path of a file. While it exists, the next write of an object hangs."""


def held_in(file: Path) -> Path:
    """Returns the file with the id of the process that hangs."""
    return file.with_suffix(".held")


def hold(file: str) -> None:
    """Hangs if the file exists. Only one process does, because it renames the file."""
    held = held_in(Path(file))
    try:
        Path(file).rename(held)
    except FileNotFoundError:
        return
    held.write_text(f"{os.getpid()}\n")
    time.sleep(1_000)


def reading(held: str) -> Any:
    """Returns a step that passes batches on. If the file `held` exists, the step hangs after a batch."""

    def given(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            hold(held)

    return given


def main() -> None:
    held, upload = os.environ.get(WRITES), S3Store._upload
    if held:

        def held_upload(self: S3Store, path: Path, name: str) -> None:
            upload(self, path, name)
            hold(held)

        S3Store._upload = held_upload  # type: ignore[method-assign]
    daemon.manager()


if __name__ == "__main__":
    main()
