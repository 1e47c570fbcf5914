"""DuckLake with its catalog in PostgreSQL. The extensions come from wheels and need no network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.peers.peer import (
    FILES_PER_COMPACTION,
    Peer,
    Steps,
    file_bytes,
    refused_on,
    small_rows,
    tiny_rows,
)


class DuckLake(Peer):
    """DuckLake with its defaults: ten retries, the first after 100 ms, each pause 1.5 times the last one.

    Inlining is off, because the benchmark compares commits of files, and an inlined row writes no file.
    """

    name = "ducklake"
    label = "DuckLake on PostgreSQL"
    packages = ("duckdb", "duckdb-extension-ducklake")
    inlined_rows: ClassVar[int] = 0
    """The number of rows up to which an insert is inlined in the catalog."""

    def set_up(self) -> None:
        super().set_up()
        with self.attached():
            pass

    def create(self, table: str, partitions: int = 1) -> None:
        with self.attached() as connection:
            connection.execute(f"create table {table} (part bigint, key bigint, payload blob)")
            connection.execute(f"alter table {table} set partitioned by (part)")

    @contextmanager
    def appender(self, table: str, writer: int) -> Iterator[Steps]:
        import duckdb

        with self.attached() as connection:
            connection.register("tiny", tiny_rows(-1 - writer))

            def step(_: int) -> int:
                with refused_on(duckdb.TransactionException):
                    connection.execute(f"insert into {table} select * from tiny")
                return 1

            yield Steps(step)

    def fill(self, table: str, partitions: dict[int, int]) -> None:
        import pyarrow as pa

        with self.attached() as connection:
            for number in range(FILES_PER_COMPACTION):
                rows = [small_rows(partition, worker, number) for partition, worker in partitions.items()]
                connection.register("small", pa.concat_tables(rows))
                connection.execute(f"insert into {table} select * from small")

    @contextmanager
    def compactor(self, table: str, worker: int, partitions: range) -> Iterator[Steps]:
        """Yields steps that merge files of the worker's size, because DuckLake cannot choose partitions."""
        import duckdb

        low, high = file_bytes(worker)
        with self.attached() as connection:

            def step(_: int) -> int:
                with refused_on(duckdb.TransactionException):
                    merged = connection.execute(
                        f"call ducklake_merge_adjacent_files('lake', '{table}', max_compacted_files => 1, "
                        f"min_file_size => {low}, max_file_size => {high})"
                    ).fetchall()
                if [row[2:] for row in merged] != [(FILES_PER_COMPACTION, 1)]:
                    raise RuntimeError(f"DuckLake merged other files: {merged}")
                return 1

            yield Steps(step)

    def conflicts(self) -> int:
        """Returns the number of transactions that the database rolled back: each lost against another one."""
        import psycopg

        with psycopg.connect(self.place.dsn, autocommit=True) as conn:
            row = conn.execute(
                "select xact_rollback from pg_stat_database where datname = %s", [f"peer_{self.name}"]
            ).fetchone()
        return int(row[0]) if row else 0

    @contextmanager
    def attached(self) -> Iterator[Any]:
        # one thread, because there are more writers than cores and the files are tiny
        with loaded(threads=1) as connection:
            target = f"ducklake:postgres:{self.database}"
            connection.execute(
                f"attach '{target}' as lake "
                f"(data_path '{self.folder}/', data_inlining_row_limit {self.inlined_rows})"
            )
            connection.execute("use lake")
            yield connection


@contextmanager
def loaded(threads: int) -> Iterator[Any]:
    """Opens DuckDB with the extensions that DuckLake needs."""
    import duckdb
    import duckdb_extension_ducklake
    import duckdb_extension_postgres_scanner

    # unsigned extensions: pip has checked the wheels, and checking signatures again takes each writer 0.3 s
    with duckdb.connect(config={"threads": threads, "allow_unsigned_extensions": True}) as connection:
        connection.execute("set enable_progress_bar = false")
        for package in (duckdb_extension_postgres_scanner, duckdb_extension_ducklake):
            (extension,) = Path(str(package.__file__)).parent.rglob("*.duckdb_extension")
            connection.execute(f"load '{extension}'")
        yield connection
