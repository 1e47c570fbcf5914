"""What every side of the comparison can do, and where it does it."""

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
    """The commit was not applied: others were faster, and the documented retries are used up."""


@dataclass(frozen=True)
class Steps:
    """A worker's work: `step` gives how many commits it made, or raises Refused.

    Steps have numbers from 0; one that was refused is tried with the same number. `retries` tells how many
    tries were in vain so far, if it can.
    """

    step: Callable[[int], int]
    retries: Callable[[], int | None] = lambda: None
    is_idle: Callable[[], bool] = lambda: True
    """Whether a helper has done all that the others gave it."""


@dataclass(frozen=True)
class Peer(ABC):
    """One side. It travels to the workers' processes, so it is only an address."""

    place: Place
    name: ClassVar[str]
    label: ClassVar[str]

    packages: ClassVar[tuple[str, ...]]
    """The distributions that are measured."""

    @property
    def database(self) -> str:
        """The side's own, as a connection string."""
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
        """Makes an empty table for so many partitions."""

    @abstractmethod
    def appender(self, table: str, writer: int) -> AbstractContextManager[Steps]:
        """Steps that append one small file each."""

    def committers(self, table: str) -> list[Opener]:
        """What applies what the appenders only submit, each in a process of its own; nothing, for most."""
        return []

    def fill(self, table: str, partitions: dict[int, int]) -> None:
        """Gives each partition its small files; `partitions` maps it to the worker that will compact it."""
        raise NotImplementedError

    def compactor(self, table: str, worker: int, partitions: range) -> AbstractContextManager[Steps]:
        """Steps that merge the files of one partition each."""
        raise NotImplementedError

    def conflicts(self) -> int | None:
        """All conflicts that the side's database saw so far, when its workers cannot count them."""
        return None


@contextmanager
def refused_on(*kinds: type[Exception]) -> Iterator[None]:
    """What a library raises for a lost race, as Refused; anything else is an error of the benchmark."""
    try:
        yield
    except kinds as error:
        raise Refused(" ".join(str(error).split())[:200]) from None


def tiny_rows(partition: int) -> pa.Table:
    """What one append writes."""
    import pyarrow as pa

    return _rows(partition, [b"x"], pa)


def small_rows(partition: int, worker: int, number: int) -> pa.Table:
    """One file to compact. Each worker's have a size of their own, since DuckLake can choose by size only."""
    import random

    import pyarrow as pa

    size = _FILE_BYTES_MIN * (_SIZE_STEPS + worker) // _SIZE_STEPS
    seeded = random.Random(partition * FILES_PER_COMPACTION + number)
    return _rows(partition, [seeded.randbytes(size // 8) for _ in range(8)], pa)


def file_bytes(worker: int) -> tuple[int, int]:
    """The sizes that a worker's small files have, and neither another's nor merged ones: from, below."""
    step = _FILE_BYTES_MIN // _SIZE_STEPS
    overhead = 1_600  # of the format, as DuckDB writes it
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
