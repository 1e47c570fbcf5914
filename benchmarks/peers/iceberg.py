"""PyIceberg with its SQL catalog in PostgreSQL. It has no compaction."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.peers.peer import Peer, Steps, refused_on, tiny_rows


class Iceberg(Peer):
    """PyIceberg with its defaults: fast appends, four retries, the first after 100 ms, each pause doubled."""

    name = "pyiceberg"
    label = "PyIceberg SqlCatalog on PostgreSQL"
    packages = ("pyiceberg",)

    def set_up(self) -> None:
        super().set_up()
        self._catalog().create_namespace("peers")

    def create(self, table: str, partitions: int = 1) -> None:
        self._catalog().create_table(f"peers.{table}", schema=tiny_rows(0).schema)

    @contextmanager
    def appender(self, table: str, writer: int) -> Iterator[Steps]:
        from pyiceberg.exceptions import CommitFailedException

        rows = tiny_rows(-1 - writer)
        opened = self._catalog().load_table(f"peers.{table}")
        retries = _count_warnings("pyiceberg.table")

        def step(_: int) -> int:
            # a commit of another writer since the last refresh would cost a retry
            opened.refresh()
            with refused_on(CommitFailedException):
                opened.append(rows)
            return 1

        yield Steps(step, retries=lambda: len(retries))

    def _catalog(self) -> Any:
        return self.place.iceberg(f"peer_{self.name}")


def _count_warnings(name: str) -> list[str]:
    """Collects the log messages about retries, because PyIceberg reports retries only there."""
    seen: list[str] = []

    class Counter(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "retrying" in record.getMessage():
                seen.append(record.getMessage())

    logger = logging.getLogger(name)
    logger.addHandler(Counter())
    logger.propagate = False
    return seen
