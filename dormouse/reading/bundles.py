"""Bundles of inlined files: one local file with the rows of many, so that a reader opens one file.

A bundle is made when a plan has many inlined files to which one partition refers. It is the file of a scan
that takes their place, and has the rows that lie in the partition. Plans that follow use it together with the
newer files, until these are many too. The database knows no bundles.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import count
from operator import attrgetter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dormouse.data.arrow_schema import exact, file_schema
from dormouse.data.datafusion_session import sorted_session
from dormouse.data.newest import first_of_keys
from dormouse.errors import ObjectNotFound
from dormouse.model.file_reference import INLINED, is_inlined
from dormouse.model.locks import process_lock
from dormouse.model.loops import portions
from dormouse.model.region import KeyRanges, Range
from dormouse.model.schema import Schema
from dormouse.model.table import TableProperties, is_keyed, newest_first
from dormouse.model.types import INT, Field
from dormouse.objects.inlined import BUNDLE
from dormouse.objects.names import parquet_suffix
from dormouse.reading.planner import NO_BOUNDS, Scan
from dormouse.reading.row_filter import TESTS_MAX, InRanges, in_slices, remains, rendered
from dormouse.reading.scan_session import DATAFUSION
from dormouse.reading.where import Deletion
from dormouse.state.context import TableContext
from dormouse.state.files.facts import References

FILES_MIN = 8
"""The fewest files that are joined. So a plan has fewer inlined files beside a bundle."""
DELETIONS_MIN = 64
"""The deletions of some files, each counted for each file, from which even few files are joined."""
BUNDLES_MAX = 1_000


@dataclass(frozen=True)
class _Bundle:
    """The scan of a bundle, and the deletions that each of its files had, by name.

    The bundle has rows of its partition alone, and none that these deletions match. Their numbers alone do
    not tell them apart: after a restore of the database, other deletions get the numbers of those that it
    lost.
    """

    scan: Scan
    applied: Mapping[str, frozenset[Deletion]]
    may_grow: bool = True
    """False if the pending deletions of the scan may not apply to files that have no wanted rows."""

    @cached_property
    def references(self) -> frozenset[tuple[str, str]]:
        """The references of the partition to the files."""
        return frozenset((self.scan.partition_id, name) for name in self.applied)

    def of(self, scans: Sequence[Scan], referenced: References, wanted: KeyRanges) -> _Bundle | None:
        """Returns the bundle with those deletions of a plan that were not applied to it.

        Returns None if it has rows of a file that is not in the plan's `scans` and to which the partition
        does not refer: they were compacted. Also returns None if it lacks rows of the ranges `wanted`: the
        plan may be of an earlier moment.
        """
        here = {scan.filename: scan for scan in scans}
        if not all(name in here for _, name in referenced.lack(self.references)):
            return None
        found = [(here[name], applied) for name, applied in self.applied.items() if name in here]
        pending = {one for scan in scans for one in scan.deletions}
        # those that no scan lists match no wanted rows, or are not pending at the plan's moment
        if any(one.may_match(wanted) for one in frozenset().union(*(has for _, has in found)) - pending):
            return None
        left = dict.fromkeys(one for scan, has in found for one in scan.deletions if one not in has)
        # the others, which their keys exclude from a file, may be tested for its rows as well
        if any(
            one.deletion_id <= scan.deletions_till and one not in scan.deletions
            for scan, _ in found
            for one in left
        ):
            return None
        # those of a file with rows of other partitions limit all keys that the query limits
        slices = next((scan.slices for scan in scans if scan.home), scans[0].slices)
        scan = replace(self.scan, slices=slices, deletions=tuple(left))
        is_newer = all(one.deletion_id > scan.deletions_till for one in left)
        return replace(self, scan=scan, may_grow=is_newer or len(found) == len(self.applied))


_bundles: OrderedDict[tuple[str, str, int], _Bundle] = OrderedDict()
_lock = process_lock()


def bundled(
    context: TableContext, scans: Sequence[Scan], referenced: References, wanted: KeyRanges
) -> tuple[Scan, ...]:
    """Returns the scans of a group, in which those of many inlined files are replaced by that of a bundle.

    `referenced` has the references of the plan's partitions to inlined files, as `QueryPlan.inlined` has, and
    `wanted` the ranges of the plan. A bundle has no rows that deletions match. Files of earlier columns are
    not joined, nor files with wanted rows of several partitions, nor files with deletions in a keyed table,
    nor any if the reader verifies digests.
    """
    if context.verifies:
        return tuple(scans)
    version, keyed = context.schema.version, is_keyed(context.properties)
    usable = [
        scan
        for scan in scans
        if is_inlined(scan.filename)
        and scan.home is not None
        and scan.schema_version == version
        and not (scan.deletions and keyed)
    ]
    divided = {scan.partition_id for scan in usable if scan.home}
    alike: dict[tuple[str, tuple[KeyRanges, ...]], list[Scan]] = defaultdict(list)
    for scan in usable:
        alike[scan.partition_id, () if scan.partition_id in divided else scan.slices].append(scan)
    joined: dict[int, Scan] = {}
    for some in alike.values():
        if not _are_many(some):
            continue
        found = _bundle_of(context, some, referenced, wanted)
        here = set(map(id, some))
        apart = {scan.filename for scan in scans if id(scan) not in here}
        if found is not None and found.applied.keys().isdisjoint(apart):
            joined |= {id(one): found.scan for one in some if one.filename in found.applied}
    if not joined:
        return tuple(scans)
    left = [scan for scan in scans if id(scan) not in joined]
    return (*{id(scan): scan for scan in joined.values()}.values(), *left)


def _are_many(scans: Sequence[Scan]) -> bool:
    """Returns whether some files are read faster as one, because they or their deletions are many."""
    return len(scans) >= FILES_MIN or sum(len(scan.deletions) for scan in scans) >= DELETIONS_MIN


def _bundle_of(
    context: TableContext, scans: Sequence[Scan], referenced: References, wanted: KeyRanges
) -> _Bundle | None:
    """Returns a bundle that has most of some files of one partition, or None if it would have few.

    It may also have files without wanted rows to which the partition refers.
    """
    key = context.table.uuid, scans[0].partition_id, scans[0].schema_version
    with _lock:
        known = _bundles.get(key)
    if known is not None:
        known = (
            None if context.inlined.lacking([known.scan.filename]) else known.of(scans, referenced, wanted)
        )
    rest = [scan for scan in scans if known is None or scan.filename not in known.applied]
    is_old = known is not None and len(known.scan.deletions) > TESTS_MAX
    if not (is_old or _are_many(rest)):
        return known
    grows = known is not None and known.may_grow
    made = _made(context, scans, rest, known) if grows else _made(context, scans, scans, None)
    if made is None:
        return known
    with _lock:
        _bundles[key] = made
        _bundles.move_to_end(key)
        while len(_bundles) > BUNDLES_MAX:
            _bundles.popitem(last=False)
    return made


def _made(
    context: TableContext, scans: Sequence[Scan], rest: Sequence[Scan], known: _Bundle | None
) -> _Bundle | None:
    """Returns a bundle of the files in the `known` one and of the `rest`; `scans` are those that are wanted.

    Returns None if a file no longer exists, which its reader will report.
    """
    inputs = sorted([*rest, *([] if known is None else [known.scan])], key=attrgetter("deletions_till"))
    context.inlined.fetch(scan.filename for scan in inputs)
    try:
        files = [
            context.inlined.in_memory(scan.filename) or context.objects.get(scan.filename) for scan in inputs
        ]
    except ObjectNotFound:
        return None
    listed = dict.fromkeys(one for scan in inputs for one in scan.deletions)
    deletions = []
    for scan in inputs:
        own = {one.deletion_id for one in scan.deletions}
        # those that the file's keys exclude are tested as well, so that a deletion applies to a run of files
        deletions.append([d for d in listed if d.deletion_id > scan.deletions_till or d.deletion_id in own])
    region = next((scan.home for scan in inputs if scan.home), NO_BOUNDS)
    rows = joined_rows(files, deletions, context.stored_schema, context.properties, region)
    content = encoded(rows, context.stored_schema)
    applied = dict[str, frozenset[Deletion]]()
    if known is not None:
        tested = frozenset(deletions[inputs.index(known.scan)])
        applied = {name: before | tested for name, before in known.applied.items()}
    for scan in scans:
        applied[scan.filename] = applied.get(scan.filename, frozenset()) | frozenset(scan.deletions)
    # equal rows may be in another order if they came from other bundles
    digest = blake2b(content, digest_size=16, key=scans[0].partition_id.encode()[:64]).hexdigest()
    name = f"{context.table.object_prefix}{INLINED}/{digest}/{BUNDLE}{parquet_suffix(context.schema.version)}"
    context.inlined.add(name, content)
    low, high = [scan.min_key for scan in inputs], [scan.max_key for scan in inputs]
    scan = replace(
        scans[0],
        filename=name,
        byte_count=len(content),
        deletions=(),
        deletions_till=max(scan.deletions_till for scan in inputs),
        min_key=None if None in low else min(filter(None, low)),
        max_key=None if None in high else max(filter(None, high)),
        row_count=None,
        home=NO_BOUNDS,
    )
    return _Bundle(scan, applied)


def _remaining(
    tables: Sequence[pa.Table],
    deletions: Sequence[Sequence[Deletion]],
    schema: Schema,
    region: KeyRanges,
) -> Sequence[pa.Table]:
    """Returns the rows of each table that lie in the region and that the deletions of the table leave.

    All tables are tested at once, since they are small and a plan for each would cost more than the tests.
    """
    places: dict[Deletion, list[Range]] = defaultdict(list)
    for number, some in enumerate(deletions):
        for one in some:
            before = places[one].pop() if places[one] and places[one][-1].max == number else Range(number)
            places[one].append(Range(before.min, number + 1))
    if not (places or region) or not any(table.num_rows for table in tables):
        return tables
    names = dict.fromkeys([*schema.row_key_names, *(name for one in places for name in one.tested)])
    place = Field(next(name for n in count() if (name := f"file{n}") not in names), INT)
    numbers = np.repeat(np.arange(len(tables), dtype=np.int32), [table.num_rows for table in tables])
    rows = pa.concat_tables(tables).select(list(names)).append_column(place.name, pa.array(numbers))
    session = sorted_session(options={"datafusion.execution.target_partitions": "1"})
    frame = session.create_dataframe([rows.to_batches()])
    stays = np.ones(rows.num_rows, bool)
    # DataFusion takes more than twice as long to plan twice as many conditions
    tests = [
        remains(schema, some, lambda one: InRanges(place, tuple(places[one])))
        for some in portions(places, lambda _: 1, TESTS_MAX)
    ]
    for stay in [*tests, *([in_slices(schema, [region])] if region else [])]:
        found = frame.select(rendered(stay, DATAFUSION).alias("stays")).collect()
        stays &= np.concatenate([one.column(0).to_numpy(zero_copy_only=False) for one in found])
    parts = np.split(stays, np.cumsum([table.num_rows for table in tables])[:-1])
    return [table.filter(pa.array(part)) for table, part in zip(tables, parts, strict=True)]


def joined_rows(
    files: Iterable[Path | bytes],
    deletions: Sequence[Sequence[Deletion]],
    schema: Schema,
    properties: TableProperties,
    region: KeyRanges = NO_BOUNDS,
) -> pa.Table:
    """Returns the rows of files that have the columns of `schema`, in the order of the files' rows.

    `files` are paths, or the bytes of files. Rows outside the region are left out, and those that deletions
    match. `deletions` has the deletions of each file. A file of a keyed table has none. For a keyed table,
    only the newest row of each key is returned.
    """
    from dormouse.data.leaf_sorter import sort_indices  # it loads the library of sketches

    columns = file_schema(schema)
    tables = []
    for place in files:
        with pq.ParquetFile(pa.BufferReader(place) if isinstance(place, bytes) else place) as file:
            batches = file.read(schema.names, use_threads=False).select(schema.names).to_batches()
        tables.append(pa.Table.from_batches([exact(batch, columns) for batch in batches], columns))
    rows = pa.concat_tables(_remaining(tables, deletions, schema, region))
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
