"""Tables of any size that are metadata only: a real partition tree and references to files that are nowhere.

    with own_database(dsn) as mine, open_tables(mine, folder) as tables:
        table = metadata_table(tables, "big", 132_000, files_per_leaf=50, full_leaves=100, above_leaves=1_000)

The tree is the one that `Catalog.create` makes of the split points 1000, 2000, …: the leaf of number n has
the keys from n * 1000 to n * 1000 + 999 (the first one also those below, the last one those above).
Everything goes in by COPY, then it is vacuumed and analyzed: 132,000 leaves with 10 files each take 20 s.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import psycopg

from benchmarks.state_tables import BYTES_PER_FILE, FILES_PER_JOB, ROWS_PER_FILE, StateTable, Tables
from dormouse.files.layout import layout as known_layout
from dormouse.model.keys import encode_value
from dormouse.model.partition_tree import ROOT
from dormouse.model.table import TableRecord
from dormouse.model.text import narrow_hex
from dormouse.model.types import LONG

KEYS_PER_LEAF = 1_000
_LINES_AT_ONCE = 1_000

_COPY_PARTITIONS = (
    "copy partition (table_id, partition_id, parent_id, created_epoch, sealed_epoch, min_keys, max_keys, "
    "split_key, split_point, left_id, right_id) from stdin"
)
_ADD_EPOCH = (
    "insert into epoch (table_id, epoch, created_at, sealed, created) "
    "values (%s, 0, clock_timestamp(), %s, %s)"
)
_MAKE_STOCK = (
    "create temp table stock (partition_id text, file_id uuid, filename text, byte_count bigint, "
    "row_count bigint, min_key bytea, max_key bytea, job_id text)"
)
_COPY_STOCK = "copy stock from stdin"
_ADD_REFERENCES = (
    "insert into {table} (table_id, partition_id, file_id, filename, row_count, count_approximate, "
    "only_contains_data_for_this_partition, job_id) "
    "select %s, partition_id, file_id, filename, row_count, false, true, job_id from stock "
    'order by partition_id collate "C"'
)
_FACTS = (
    "create temp view fact as select file_id, filename, byte_count, row_count, min_key, max_key, "
    "now() as added_at, null::timestamptz as unreferenced_at from stock"
)
_COPY_JOBS = "copy compaction_job (table_id, job_id, partition_id) from stdin"


class Node(NamedTuple):
    """A partition; it has the leaves of the numbers from `first` to before `end`."""

    partition_id: str
    parent_id: str | None
    first: int
    end: int
    children: tuple[str, str] | None

    @property
    def middle(self) -> int:
        """The first leaf of the right half."""
        return (self.first + self.end + 1) // 2


@dataclass(frozen=True)
class MetadataTable(StateTable):
    """A table with a leaf for each number below `jobs`; a leaf's job has its number, where it is claimed."""

    @property
    def leaves(self) -> int:
        return self.jobs

    def partition_id(self, job: int) -> str:
        return self.path(job)[-1]

    def path(self, leaf: int) -> list[str]:
        """The ids of the partitions from the root down to the leaf of a number, without the tree."""
        # before a partition is divided, as many were divided as `divided` counts; its halves' ids count on
        first, end, divided, path = 0, self.jobs, 0, [ROOT]
        while end - first > 1:
            middle = (first + end + 1) // 2
            if leaf < middle:
                path.append(f"0-{2 * divided}")
                end, divided = middle, divided + 1
            else:
                path.append(f"0-{2 * divided + 1}")
                first, divided = middle, divided + middle - first
        return path

    def keys(self, job: int) -> tuple[bytes, bytes]:
        return _key(job * KEYS_PER_LEAF), _key((job + 1) * KEYS_PER_LEAF - 1)

    def nodes(self) -> Iterator[Node]:
        """Every partition, a parent before its children, left before right."""
        divided = 0
        todo: list[tuple[str, str | None, int, int]] = [(ROOT, None, 0, self.jobs)]
        while todo:
            partition_id, parent_id, first, end = todo.pop()
            if end - first == 1:
                yield Node(partition_id, parent_id, first, end, None)
                continue
            left, right = f"0-{2 * divided}", f"0-{2 * divided + 1}"
            divided += 1
            node = Node(partition_id, parent_id, first, end, (left, right))
            yield node
            todo += [(right, partition_id, node.middle, end), (left, partition_id, first, node.middle)]


def metadata_table(
    tables: Tables,
    name: str,
    leaves: int,
    files_per_leaf: int = FILES_PER_JOB,
    layout: str = "file_table",
    *,
    claimed_leaves: int = 0,
    full_leaves: int = 0,
    above_leaves: int = 0,
    **properties: Any,
) -> MetadataTable:
    """A table whose leaves have so many files each, which nobody has claimed.

    Some leaves, evenly spread, may differ: the files of `claimed_leaves` are their jobs', and `full_leaves`
    have rows enough to be split. `above_leaves` partitions that were divided have one reference each, too.
    """
    [record] = tables.empties([name], layout, properties)
    table = MetadataTable(record, leaves, files_per_job=files_per_leaf)
    wanted = _Wanted(spread(leaves, claimed_leaves), spread(leaves, full_leaves), above_leaves)
    with tables.connection() as conn, conn.transaction():
        nodes = list(table.nodes())
        _fill_partitions(conn, record, nodes)
        _fill_files(conn, table, nodes, wanted)
        _copy(
            conn,
            _COPY_JOBS,
            (f"{record.table_id}\t{table.job_id(n)}\t{table.partition_id(n)}\n" for n in wanted.claimed),
        )
    tables.settle([table])
    return table


def spread(whole: int, some: int) -> range:
    """The numbers of some of the whole, as evenly as steps can be."""
    return range(0, whole, max(1, whole // some))[:some] if some else range(0)


class _Wanted(NamedTuple):
    claimed: range
    full: range
    above: int


def _fill_partitions(conn: psycopg.Connection[Any], record: TableRecord, nodes: Sequence[Node]) -> None:
    leaves_end = nodes[0].end

    def bound(leaf: int) -> str:
        return "{NULL}" if leaf in (0, leaves_end) else f'{{"\\\\\\\\x{_key(leaf * KEYS_PER_LEAF).hex()}"}}'

    def line(node: Node) -> str:
        begin = f"{record.table_id}\t{node.partition_id}\t{node.parent_id or _NULL}\t0"
        bounds = f"{bound(node.first)}\t{bound(node.end)}"
        if node.children is None:
            return f"{begin}\t{_NULL}\t{bounds}\t{_NULL}\t{_NULL}\t{_NULL}\t{_NULL}\n"
        point = f"\\\\x{_key(node.middle * KEYS_PER_LEAF).hex()}"
        return f"{begin}\t0\t{bounds}\t0\t{point}\t{node.children[0]}\t{node.children[1]}\n"

    _copy(conn, _COPY_PARTITIONS, map(line, nodes))
    created = [node.partition_id for node in nodes if node.children is None]
    conn.execute(_ADD_EPOCH, (record.table_id, [], created))


def _fill_files(
    conn: psycopg.Connection[Any], table: MetadataTable, nodes: Sequence[Node], wanted: _Wanted
) -> None:
    record, layout = table.record, known_layout(table.record.layout)
    own = layout.tables(record.table_id)["file_reference"]
    conn.execute(_MAKE_STOCK)
    _copy(conn, _COPY_STOCK, _stock(table, nodes, wanted))
    conn.execute(_ADD_REFERENCES.format(table=own), (record.table_id,))
    conn.execute(_FACTS)
    values = {"table_id": record.table_id, "salt_buckets": record.properties.salt_buckets}
    conn.execute(layout.on("adopt", record.table_id), values)
    conn.execute("drop table stock cascade")


def _stock(table: MetadataTable, nodes: Sequence[Node], wanted: _Wanted) -> Iterator[str]:
    """A line for each file."""
    files = table.files_per_job
    full_rows = table.record.properties.split_threshold_rows // max(1, files) + 1
    above = [node for node in nodes if node.children is not None]
    above = [above[n] for n in spread(len(above), wanted.above)]
    ingests = [f"{prefix}/" for prefix in table.ingests()]
    for node in heapq.merge(
        (node for node in nodes if node.children is None), above, key=lambda node: node.first
    ):
        n = node.first
        is_leaf = node.children is None
        job = table.job_id(n) if is_leaf and n in wanted.claimed else _NULL
        rows = full_rows if is_leaf and n in wanted.full else ROWS_PER_FILE
        low, high = table.keys(n)[0].hex(), table.keys(node.end - 1)[1].hex()
        facts = f"{BYTES_PER_FILE}\t{rows}\t\\\\x{low}\t\\\\x{high}\t{job}\n"
        for prefix in ingests if is_leaf else ingests[:1]:
            name = f"{prefix}{node.partition_id}.parquet"
            yield f"{node.partition_id}\t{narrow_hex(name)}\t{name}\t{facts}"


_NULL = "\\N"


def _copy(conn: psycopg.Connection[Any], statement: str, lines: Iterator[str]) -> None:
    held: list[str] = []
    with conn.cursor().copy(statement) as copy:
        for line in lines:
            held.append(line)
            if len(held) == _LINES_AT_ONCE:
                copy.write("".join(held))
                held.clear()
        copy.write("".join(held))


def _key(value: int) -> bytes:
    return encode_value(LONG, value)
