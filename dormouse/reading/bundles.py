"""Bundles of inlined files: one local file with the rows of many, so that a reader opens one file.

A bundle is made when a plan has many inlined files that are read alike. It is the file of a scan that takes
their place. Plans that follow use it together with the newer files, until these are many too. The database
knows no bundles.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dormouse.data.arrow_schema import arrow_schema, exact, with_ids
from dormouse.data.newest import first_of_keys
from dormouse.model.file_reference import INLINED, is_inlined
from dormouse.model.schema import Schema
from dormouse.model.table import TableProperties, is_keyed, newest_first
from dormouse.objects.inlined import BUNDLE
from dormouse.objects.names import parquet_suffix
from dormouse.reading.planner import Scan, Way, ways_of
from dormouse.state.context import TableContext

FILES_MIN = 8
"""The fewest files that are joined. So a plan has fewer inlined files beside a bundle."""
BUNDLES_MAX = 1_000


@dataclass(frozen=True, slots=True)
class _Bundle:
    """The scan of a bundle, and the names of the files in it."""

    scan: Scan
    names: frozenset[str]


_bundles: OrderedDict[tuple[str, str, int], _Bundle] = OrderedDict()
_lock = threading.Lock()


def bundled(context: TableContext, scans: Sequence[Scan], referenced: Set[str]) -> tuple[Scan, ...]:
    """Returns the scans of a group, in which those of many inlined files are replaced by that of a bundle.

    `referenced` has the inlined files to which the plan's partitions refer, also those without wanted rows.
    Only files without deletions that have the table's present columns are joined, and none if the reader
    verifies digests.
    """
    if context.verifies:
        return tuple(scans)
    inlined = [scan for scan in scans if is_inlined(scan.filename)]
    whole = len({scan.filename for scan in inlined}) == len(referenced)
    joined: dict[int, Scan] = {}
    for way, some in ways_of(inlined, _kind).items():
        if way.deletions or way.kind[1] != context.schema.version or len(some) < FILES_MIN:
            continue
        others = referenced - {scan.filename for scan in some}
        bundle = _bundle_of(context, way, some, frozenset() if whole else others, is_whole=whole)
        if bundle is not None and bundle.names.isdisjoint(
            scan.filename
            for scan in inlined
            if _kind(scan) != way.kind or scan.slices != way.slices or scan.deletions
        ):
            scan = replace(bundle.scan, slices=way.slices)
            joined |= {id(one): scan for one in some if one.filename in bundle.names}
    if not joined:
        return tuple(scans)
    left = [scan for scan in scans if id(scan) not in joined]
    return (*{id(scan): scan for scan in joined.values()}.values(), *left)


def _kind(scan: Scan) -> tuple[str, int]:
    return scan.partition_id, scan.schema_version


def _bundle_of(
    context: TableContext, way: Way, scans: Sequence[Scan], others: Set[str], *, is_whole: bool
) -> _Bundle | None:
    """Returns a bundle that has most of some files, or None if it would have few.

    It may also have some of the `others`, which have no wanted rows. If the scans are not the whole of what
    the partition refers to, no bundle is made.
    """
    key = context.table.uuid, *way.kind
    with _lock:
        known = _bundles.get(key)
    names = frozenset(scan.filename for scan in scans)
    if known is not None and not (known.names <= names | others and context.inlined.has(known.scan.filename)):
        known = None
    rest = [scan for scan in scans if known is None or scan.filename not in known.names]
    if len(rest) < FILES_MIN or not is_whole:
        return known
    made = _made(context, way, names, rest if known is None else [known.scan, *rest])
    if made is None:
        return known
    with _lock:
        _bundles[key] = made
        _bundles.move_to_end(key)
        while len(_bundles) > BUNDLES_MAX:
            _bundles.popitem(last=False)
    return made


def _made(context: TableContext, way: Way, names: frozenset[str], scans: Sequence[Scan]) -> _Bundle | None:
    """Returns a bundle of some files; None if one of them no longer exists, which its reader will report."""
    context.inlined.fetch(scan.filename for scan in scans)
    paths = [context.objects.local_path(scan.filename) for scan in scans]
    if any(path is None or not path.exists() for path in paths):
        return None
    rows = joined_rows(filter(None, paths), context.stored_schema, context.properties)
    content = encoded(rows, context.stored_schema)
    digest = blake2b("\0".join(sorted(names)).encode(), digest_size=16).hexdigest()
    name = f"{context.table.object_prefix}{INLINED}/{digest}/{BUNDLE}{parquet_suffix(context.schema.version)}"
    context.inlined.add(name, content)
    low, high = [scan.min_key for scan in scans], [scan.max_key for scan in scans]
    scan = replace(
        scans[0],
        filename=name,
        slices=way.slices,
        byte_count=len(content),
        deletions_till=min(scan.deletions_till for scan in scans),
        min_key=None if None in low else min(filter(None, low)),
        max_key=None if None in high else max(filter(None, high)),
        row_count=None,
    )
    return _Bundle(scan, names)


def joined_rows(paths: Iterable[Path], schema: Schema, properties: TableProperties) -> pa.Table:
    """Returns the rows of local files that have the columns of `schema`, in the order of the files' rows.

    For a keyed table, only the newest row of each key.
    """
    from dormouse.data.leaf_sorter import sort_indices  # it loads the library of sketches

    columns = with_ids(arrow_schema(schema), schema)
    tables = []
    for path in paths:
        with pq.ParquetFile(path) as file:
            tables += file.read(schema.names, use_threads=False).to_batches()
    rows = pa.Table.from_batches([exact(batch.select(schema.names), columns) for batch in tables], columns)
    descending = newest_first(properties) if is_keyed(properties) else ()
    order = sort_indices(rows, schema.row_key_names if descending else schema.key_names, descending)
    rows = (rows if order is None else rows.take(order)).combine_chunks()
    if descending:
        rows = pa.Table.from_batches(first_of_keys(rows.to_batches(), schema.row_key_names), columns)
    return rows


def encoded(rows: pa.Table, schema: Schema) -> bytes:
    """Returns sorted rows as the bytes of a Parquet file that this process reads."""
    sink = pa.BufferOutputStream()
    told = [field.name for field in schema.fields if not (field.type.is_floating or field.type.is_nested)]
    pq.write_table(
        rows,
        sink,
        compression="none",
        use_dictionary=False,
        write_statistics=told,
        write_page_index=True,
        store_schema=False,
    )
    return bytes(sink.getvalue().to_pybytes())
