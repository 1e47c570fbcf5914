"""The interface of the compared systems, and the rows that they write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.harness.place import Place
from benchmarks.harness.processes import Opener

if TYPE_CHECKING:
    import pyarrow as pa

FILES_PER_COMPACTION = 4
_FILE_BYTES_MIN = 8_000
_SIZE_STEPS = 16


class Refused(Exception):
    """The error for a commit that conflicted with others until the documented retries were used up."""


@dataclass(frozen=True)
class Steps:
    """The work of a worker, step by step.

    `step` gets the step's number, from 0. It returns the number of commits that it made, or raises Refused. A
    refused step is repeated with the same number. `retries` returns the number of failed tries so far, or
    None if it is unknown.
    """

    step: Callable[[int], int]
    retries: Callable[[], int | None] = lambda: None
    is_idle: Callable[[], bool] = lambda: True
    """A function that returns whether a helper has finished the work that other workers left to it."""


@dataclass(frozen=True)
class Peer(ABC):
    """A compared system. It is pickled for the workers' processes, so it contains only addresses."""

    place: Place
    name: ClassVar[str]
    label: ClassVar[str]

    packages: ClassVar[tuple[str, ...]]
    """The Python distributions that are measured, whose versions are reported."""

    @property
    def database(self) -> str:
        """The connection string of the system's own database."""
        return self.place.database(f"peer_{self.name}")

    @property
    def folder(self) -> Path:
        return self.place.folder / self.name

    def set_up(self) -> None:
        """Makes the database and the folder, once."""
        self.place.create_database(f"peer_{self.name}")
        self.folder.mkdir()

    @abstractmethod
    def create(self, table: str, partitions: int = 1) -> None:
        """Makes an empty table for `partitions` partitions."""

    @abstractmethod
    def appender(self, table: str, writer: int) -> AbstractContextManager[Steps]:
        """Opens a worker whose steps append one small file each."""

    def committers(self, table: str) -> list[Opener]:
        """Returns openers of helpers that apply the commits that appenders submit; empty for most systems."""
        return []

    def fill(self, table: str, partitions: dict[int, int]) -> None:
        """Adds small files to each partition. `partitions` maps a partition to its compactor's number."""
        raise NotImplementedError

    def compactor(self, table: str, worker: int, partitions: range) -> AbstractContextManager[Steps]:
        """Opens a worker whose steps merge the files of one partition each."""
        raise NotImplementedError

    def conflicts(self) -> int | None:
        """Returns the number of conflicts in the system's database so far, or None if workers count them."""
        return None


@contextmanager
def refused_on(*kinds: type[Exception]) -> Iterator[None]:
    """Converts the errors that a library raises for a conflict to Refused."""
    try:
        yield
    except kinds as error:
        raise Refused(" ".join(str(error).split())[:200]) from None


def tiny_rows(partition: int) -> pa.Table:
    """Returns the row that one append writes."""
    import pyarrow as pa

    return _rows(partition, [b"x"], pa)


def small_rows(partition: int, worker: int, number: int) -> pa.Table:
    """Returns the rows of one file to compact.

    Files of different workers differ in size, because DuckLake can choose files only by size.
    """
    import random

    import pyarrow as pa

    size = _FILE_BYTES_MIN * (_SIZE_STEPS + worker) // _SIZE_STEPS
    seeded = random.Random(partition * FILES_PER_COMPACTION + number)
    return _rows(partition, [seeded.randbytes(size // 8) for _ in range(8)], pa)


def file_bytes(worker: int) -> tuple[int, int]:
    """Returns the range of sizes that only the files of one worker have: its start, and its excluded end."""
    step = _FILE_BYTES_MIN // _SIZE_STEPS
    overhead = 1_600  # bytes that the Parquet format adds when DuckDB writes it
    start = _FILE_BYTES_MIN + overhead + worker * step - step // 2
    return start, start + step


def _rows(partition: int, payloads: list[bytes], pa: Any) -> pa.Table:
    count = len(payloads)
    columns = {
        "part": pa.array([partition] * count, pa.int64()),
        "key": pa.array(range(count), pa.int64()),
        "payload": pa.array(payloads, pa.binary()),
    }
    return pa.table(columns)
