"""Python workers of Spark, of which one waits for its death: the first to have written, or read, something.

As `spark.python.daemon.module` it is what an executor starts its Python workers with.
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
"""The environment variable with the name of a file: its maker is held, once it has written an object."""


def hold(held: str) -> None:
    """Only the first comes no further."""
    try:
        with Path(held).open("x") as file:
            file.write(f"{os.getpid()}\n")
    except FileExistsError:
        return
    time.sleep(1_000)


def reading(held: str) -> Any:
    """A step that gives what it takes, as far as it comes."""

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
