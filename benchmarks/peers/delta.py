"""delta-rs with its table in a folder. A commit creates the next file of the log, which must not exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.peers.peer import FILES_PER_COMPACTION, Peer, Steps, refused_on, small_rows, tiny_rows


class Delta(Peer):
    """delta-rs with its defaults: fifteen retries, a checkpoint every hundred commits."""

    name = "delta"
    label = "delta-rs"
    packages = ("deltalake",)

    def create(self, table: str, partitions: int = 1) -> None:
        from deltalake import DeltaTable

        schema = tiny_rows(0).schema
        DeltaTable.create(self.folder / table, schema, partition_by=["part"])

    @contextmanager
    def appender(self, table: str, writer: int) -> Iterator[Steps]:
        from deltalake import DeltaTable, write_deltalake
        from deltalake.exceptions import CommitFailedError

        rows = tiny_rows(-1 - writer)
        opened = DeltaTable(self.folder / table)

        def step(_: int) -> int:
            with refused_on(CommitFailedError):
                write_deltalake(opened, rows, mode="append")
            return 1

        yield Steps(step)

    def fill(self, table: str, partitions: dict[int, int]) -> None:
        import pyarrow as pa
        from deltalake import write_deltalake

        for number in range(FILES_PER_COMPACTION):
            rows = [small_rows(partition, worker, number) for partition, worker in partitions.items()]
            write_deltalake(self.folder / table, pa.concat_tables(rows), mode="append")

    @contextmanager
    def compactor(self, table: str, worker: int, partitions: range) -> Iterator[Steps]:
        from deltalake import DeltaTable
        from deltalake.exceptions import CommitFailedError

        opened = DeltaTable(self.folder / table)

        def step(number: int) -> int:
            opened.update_incremental()
            with refused_on(CommitFailedError):
                done: dict[str, Any] = opened.optimize.compact(
                    partition_filters=[("part", "=", str(partitions[number]))]
                )
            if (done["numFilesRemoved"], done["numFilesAdded"]) != (FILES_PER_COMPACTION, 1):
                raise RuntimeError(f"delta-rs merged other files: {done}")
            return 1

        yield Steps(step)
