"""Python workers of Spark, of which the first to write or read something hangs until it is killed.

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
"""The environment variable with the path of a file.

The worker that first creates this file hangs after it has written an object.
"""


def hold(held: str) -> None:
    """Hangs in the first process that calls this function; `held` is the file that marks this."""
    try:
        with Path(held).open("x") as file:
            file.write(f"{os.getpid()}\n")
    except FileExistsError:
        return
    time.sleep(1_000)


def reading(held: str) -> Any:
    """Returns a step that passes batches on. In the first process, the step hangs after the first batch."""

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
