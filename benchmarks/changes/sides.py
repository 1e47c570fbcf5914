"""The compared systems. Each loads the same rows, changes them, and reads them with a new reader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

import dormouse as dm
from benchmarks.harness.place import Place, own_place
from benchmarks.peers.ducklake import DuckLake as DuckLakePeer
from benchmarks.peers.peer import Refused, refused_on

if TYPE_CHECKING:
    import pyarrow as pa

VALUES = 100
"""The number of different values of column `v`. Each has a hundredth of the rows."""


@dataclass(frozen=True)
class Rows:
    """A condition on rows: keys from `low` (included) to `high` (excluded), or one value of column `v`."""

    low: int = 0
    high: int = 0
    value: int | None = None

    @property
    def sql(self) -> str:
        return f"k >= {self.low} and k < {self.high}" if self.value is None else f"v = {self.value}"

    @property
    def where(self) -> dict[str, Any]:
        return {"k": dm.Range(self.low, self.high)} if self.value is None else {"v": self.value}


def rows_of(start: int, count: int) -> pa.Table:
    """Returns `count` rows with ascending keys from `start` on, about 50 bytes each."""
    import numpy as np
    import pyarrow as pa

    keys = np.arange(start, start + count, dtype=np.int64)
    noise = np.random.default_rng(start).bytes(32 * count)
    payload = pa.array(noise[first : first + 32] for first in range(0, 32 * count, 32))
    return pa.table({"k": keys, "v": keys * 7919 % VALUES, "payload": payload})


@dataclass
class Side(ABC):
    """A compared system. Its methods raise Refused if it refuses a change because of a conflict."""

    place: Place
    stack: ExitStack = field(default_factory=ExitStack)
    name: ClassVar[str]
    label: ClassVar[str]

    @abstractmethod
    def load(self, table: str, rows: pa.Table) -> None:
        """Adds rows to a table as one file. Creates the table if it does not exist."""

    @abstractmethod
    def delete(self, table: str, rows: Rows) -> None: ...

    @abstractmethod
    def update(self, table: str, rows: Rows, value: int) -> None:
        """Sets column `v` of rows to a value."""

    @abstractmethod
    def upsert(self, table: str, rows: pa.Table) -> None:
        """Replaces the rows whose keys exist, and adds the other rows."""

    def merge(self, table: str, rows: pa.Table) -> None:
        """Updates the rows whose keys exist, and inserts the other rows, by the system's merge."""
        self.upsert(table, rows)

    @abstractmethod
    def count(self, table: str, rows: Rows) -> int:
        """Opens the table with a new reader, and returns the number of rows that meet a condition."""

    @abstractmethod
    def scan(self, table: str) -> int:
        """Reads all columns of all rows with a newly opened reader; returns the number of rows."""

    @abstractmethod
    def compact(self, table: str) -> None: ...

    def close(self) -> None:
        self.stack.close()


class Dormouse(Side):
    """Dormouse with its default table properties."""

    name = "dormouse"
    label = "Dormouse"
    properties: ClassVar[dm.TableProperties | None] = None

    def load(self, table: str, rows: pa.Table) -> None:
        known = {record.name for record in self.instance.tables()}
        if table not in known:
            schema = dm.Schema(
                [dm.Field("k", dm.LONG)], values=[dm.Field("v", dm.LONG), dm.Field("payload", dm.BYTES)]
            )
            self.instance.create_table(table, schema, properties=self.properties)
        self.instance.table(table).ingest(rows, engine="local")

    def delete(self, table: str, rows: Rows) -> None:
        with refused_on(dm.DormouseError):
            self.instance.table(table).delete(rows.where)

    def update(self, table: str, rows: Rows, value: int) -> None:
        with refused_on(dm.DormouseError):
            self.instance.table(table).update(rows.where, {"v": value})

    def upsert(self, table: str, rows: pa.Table) -> None:
        with refused_on(dm.DormouseError):
            self.instance.table(table).upsert(rows, engine="local")

    def merge(self, table: str, rows: pa.Table) -> None:
        with refused_on(dm.DormouseError):
            self.instance.table(table).merge_into(
                rows, ["k"], [dm.WhenMatched(update="*"), dm.WhenNotMatched(insert="*")]
            )

    def count(self, table: str, rows: Rows) -> int:
        with dm.connect(self.place.dsn, self.place.objects, read_only=True) as opened:
            return sum(len(batch) for batch in opened.table(table).query(rows.where, ["k"]))

    def scan(self, table: str) -> int:
        with dm.connect(self.place.dsn, self.place.objects, read_only=True) as opened:
            return sum(len(batch) for batch in opened.table(table).query())

    def sums(self, table: str) -> None:
        """Groups and sums all rows in SQL, which reads every row."""
        self.instance.sql(f"select v % 100, count(*), sum(v) from {table} group by 1").read_all()

    def looked_up(self, table: str) -> None:
        """Looks up twenty keys, with one query for each."""
        for key in range(0, 1_000, 50):
            self.instance.table(table).query({"k": key}).read_all()

    def compact(self, table: str) -> None:
        self.instance.table(table).compact(engine="local")

    @property
    def instance(self) -> dm.Instance:
        if not hasattr(self, "_instance"):
            self._instance = self.stack.enter_context(dm.connect(self.place.dsn, self.place.objects))
        return self._instance


class Keyed(Dormouse):
    """Dormouse with tables that keep only the newest row of each key."""

    properties = dm.TableProperties(keep="newest_row")


class Delta(Side):
    """delta-rs."""

    name = "delta"
    label = "delta-rs"

    def load(self, table: str, rows: pa.Table) -> None:
        from deltalake import write_deltalake
        from deltalake.exceptions import CommitFailedError

        with refused_on(CommitFailedError):
            write_deltalake(self._path(table), rows, mode="append")

    def delete(self, table: str, rows: Rows) -> None:
        from deltalake.exceptions import CommitFailedError

        with refused_on(CommitFailedError):
            self._open(table).delete(rows.sql)

    def update(self, table: str, rows: Rows, value: int) -> None:
        from deltalake.exceptions import CommitFailedError

        with refused_on(CommitFailedError):
            self._open(table).update({"v": str(value)}, predicate=rows.sql)

    def upsert(self, table: str, rows: pa.Table) -> None:
        from deltalake.exceptions import CommitFailedError

        with refused_on(CommitFailedError):
            merge = self._open(table).merge(rows, "t.k = s.k", source_alias="s", target_alias="t")
            merge.when_matched_update_all().when_not_matched_insert_all().execute()

    def count(self, table: str, rows: Rows) -> int:
        import pyarrow.compute as pc

        kept = self._open(table).to_pyarrow_dataset()
        low, high = pc.field("k") >= rows.low, pc.field("k") < rows.high
        return int(kept.count_rows((low & high) if rows.value is None else pc.field("v") == rows.value))

    def scan(self, table: str) -> int:
        return sum(len(batch) for batch in self._open(table).to_pyarrow_dataset().to_batches())

    def compact(self, table: str) -> None:
        from deltalake.exceptions import CommitFailedError

        with refused_on(CommitFailedError):
            self._open(table).optimize.compact()

    def _open(self, table: str) -> Any:
        from deltalake import DeltaTable

        return DeltaTable(self._path(table))

    def _path(self, table: str) -> str:
        return str(self.place.folder / f"delta-{table}")


class DuckLake(Side):
    """DuckLake with its catalog in the same PostgreSQL."""

    name = "ducklake"
    label = "DuckLake on PostgreSQL"

    def load(self, table: str, rows: pa.Table) -> None:
        connection = self._connection
        connection.register("loaded", rows)
        connection.execute(f"create table if not exists {table} (k bigint, v bigint, payload blob)")
        connection.execute(f"insert into {table} select * from loaded")

    def delete(self, table: str, rows: Rows) -> None:
        self._do(f"delete from {table} where {rows.sql}")

    def update(self, table: str, rows: Rows, value: int) -> None:
        self._do(f"update {table} set v = {value} where {rows.sql}")

    def upsert(self, table: str, rows: pa.Table) -> None:
        self._connection.register("changed", rows)
        self._do(
            f"merge into {table} t using changed s on t.k = s.k when matched then update set v = s.v, "
            "payload = s.payload when not matched then insert values (s.k, s.v, s.payload)"
        )

    def count(self, table: str, rows: Rows) -> int:
        with self._peer.attached() as connection:
            [(found,)] = connection.execute(f"select count(*) from {table} where {rows.sql}").fetchall()
        return int(found)

    def scan(self, table: str) -> int:
        with self._peer.attached() as connection:
            found = connection.execute(f"select * from {table}").fetch_record_batch()
            return sum(len(batch) for batch in found)

    def compact(self, table: str) -> None:
        import duckdb

        with self._peer.attached() as connection, refused_on(duckdb.TransactionException):
            connection.execute(
                f"call ducklake_rewrite_data_files('lake', '{table}', delete_threshold => 0.0)"
            )
            connection.execute(f"call ducklake_merge_adjacent_files('lake', '{table}')")

    def _do(self, statement: str) -> None:
        import duckdb

        with refused_on(duckdb.TransactionException):
            self._connection.execute(statement)

    @property
    def _peer(self) -> DuckLakePeer:
        if not hasattr(self, "_made"):
            self._made = DuckLakePeer(self.place)
            self._made.set_up()
        return self._made

    @property
    def _connection(self) -> Any:
        if not hasattr(self, "_opened"):
            self._opened = self.stack.enter_context(self._peer.attached())
        return self._opened


class Iceberg(Side):
    """PyIceberg with its SQL catalog in the same PostgreSQL. It has no compaction."""

    name = "iceberg"
    label = "PyIceberg"

    def load(self, table: str, rows: pa.Table) -> None:
        catalog = self._catalog
        catalog.create_table_if_not_exists(f"changes.{table}", schema=rows.schema)
        catalog.load_table(f"changes.{table}").append(rows)

    def delete(self, table: str, rows: Rows) -> None:
        with refused_on(*_conflicts()):
            self._catalog.load_table(f"changes.{table}").delete(rows.sql)

    def update(self, table: str, rows: Rows, value: int) -> None:
        """Reads the rows and overwrites them, as PyIceberg has no update."""
        import pyarrow as pa

        opened = self._catalog.load_table(f"changes.{table}")
        with refused_on(*_conflicts()):
            found = opened.scan(row_filter=rows.sql).to_arrow()
            values = pa.array([value] * len(found), pa.int64())
            opened.overwrite(found.set_column(1, "v", values), overwrite_filter=rows.sql)

    def upsert(self, table: str, rows: pa.Table) -> None:
        with refused_on(*_conflicts()):
            self._catalog.load_table(f"changes.{table}").upsert(rows, join_cols=["k"])

    def count(self, table: str, rows: Rows) -> int:
        opened = self.place.iceberg("changes").load_table(f"changes.{table}")
        return int(opened.scan(row_filter=rows.sql, selected_fields=("k",)).to_arrow().num_rows)

    def scan(self, table: str) -> int:
        opened = self.place.iceberg("changes").load_table(f"changes.{table}")
        return sum(len(batch) for batch in opened.scan().to_arrow_batch_reader())

    def compact(self, table: str) -> None:
        raise Refused("PyIceberg has no compaction")

    @property
    def _catalog(self) -> Any:
        if not hasattr(self, "_made"):
            self.place.create_database("changes")
            self._made = self.place.iceberg("changes")
            self._made.create_namespace("changes")
        return self._made


def _conflicts() -> tuple[type[Exception], ...]:
    """Returns the exceptions that PyIceberg raises if a change conflicts with another."""
    from pyiceberg.exceptions import CommitFailedException, ValidationException

    return CommitFailedException, ValidationException


PEERS: tuple[type[Side], ...] = (Delta, DuckLake, Iceberg)
SIDES: tuple[type[Side], ...] = (Dormouse, *PEERS)
OURS: dict[str, type[Dormouse]] = {"dormouse": Dormouse, "keyed": Keyed}
"""The two kinds of tables of Dormouse, by the names of their figures."""
EDITED: dict[str, type[Side]] = {**OURS, **{peer.name: peer for peer in PEERS}}
"""The compared systems of edits, by the names of their figures."""
FILES = 8


@contextmanager
def opened(*made: type[Side]) -> Iterator[list[Any]]:
    """Opens the compared systems with a temporary server and folder, and closes them at the end."""
    with own_place() as place, ExitStack() as stack:
        sides = [side(place) for side in made]
        for side in sides:
            stack.callback(side.close)
        yield sides


def fill(side: Side, table: str, rows: int) -> None:
    """Loads rows with the keys from 0 on, as 8 files whose keys do not overlap."""
    for number in range(FILES):
        side.load(table, rows_of(rows // FILES * number, rows // FILES))


def seconds_of(action: Callable[..., Any], *given: Any) -> float:
    """Returns the seconds that a call takes."""
    began = perf_counter()
    action(*given)
    return perf_counter() - began
