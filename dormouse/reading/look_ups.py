"""Look-ups of keys of a table, which read pages of its files without a query engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import takewhile
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.arrow_schema import arrow_type, exact, written_schema
from dormouse.data.datafusion_session import sorted_session
from dormouse.data.newest import first_of_keys
from dormouse.data.transform import Transform
from dormouse.model.schema import Schema, is_as_stored
from dormouse.model.table import DELETED_AT, is_keyed, newest_first, stored_schema
from dormouse.model.types import Field
from dormouse.reading.gone_rows import without
from dormouse.reading.key_lists import KeyList, rows_of_keys
from dormouse.reading.page_reads import FOUND_MAX, can_look_up, rows_of
from dormouse.reading.planner import Scan
from dormouse.reading.row_filter import PLAIN, remains, rendered
from dormouse.reading.row_sets import RowSet
from dormouse.reading.scan_session import DATAFUSION
from dormouse.reading.streams import Interruption
from dormouse.reading.where import Deletion, Question
from dormouse.state.context import TableContext

FILES_MAX = 16
"""The most files of a group of leaves for a look-up. A query engine merges more files faster."""
DELETIONS_MAX = 7
"""The most deletions by which a look-up tests each row. Beside more, a file is read once to find the rows."""
LIST_FILES_MAX = 64
"""The most files of a group of leaves for a look-up of many keys."""
LIST_DELETIONS_MAX = 64
"""The most deletions by which a look-up of many keys tests the rows of a file."""
LIST_BYTES_MAX = 64 * 1024 * 1024
"""The most bytes of rows that a look-up of many keys holds. A query engine streams more rows."""
_THREADS_MAX = 4


def may_answer(question: Question, transform: Transform) -> bool:
    """Returns whether look-ups may answer a question: they neither test values nor merge or hide rows."""
    return not (question.conditions or transform.aggregates or transform.age_off)


def looked_up(
    context: TableContext, schema: Schema, question: Question, transform: Transform, scans: Sequence[Scan]
) -> Iterable[pa.RecordBatch] | None:
    """Returns the rows of some files that have one key, read without a query engine, in key order.

    The rows have the keys and the columns of the question. In a keyed table they are the newest rows of each
    key, without marks of deletion. Returns None when a query engine has to read the rows. It does so if more
    than one key is wanted, if the table aggregates rows or hides some by their age, and if deletions may
    match rows of a keyed table or many rows of a file.
    """
    keys = [_key_of(schema, scan) for scan in scans] if len(scans) <= FILES_MAX else [{}]
    look_up = _LookUp.of(context, schema, question, transform, scans) if all(keys) else None
    if look_up is None:
        return None
    batches: list[pa.RecordBatch] = []
    for scan, key in zip(scans, keys, strict=True):
        found = look_up.of_key(scan, key, is_likely=len(scans) == 1)
        if found and scan.deletions:
            found = _remaining(schema, scan, found)
        if found is None:
            return None
        batches += look_up.without_gone(scan, found)
    is_one = all(len(key) == len(schema.row_keys) for key in keys)
    return look_up.newest(batches, are_sorted=len(batches) <= 1, are_of_one_key=is_one)


def list_looked_up(
    context: TableContext,
    schema: Schema,
    question: Question,
    transform: Transform,
    scans: Sequence[Scan],
    interruption: Interruption,
) -> Iterable[pa.RecordBatch] | None:
    """Returns the rows of some files that have one of a list of keys, as `looked_up` does.

    Raises `DormouseError` if it is interrupted.
    """
    if len(scans) > LIST_FILES_MAX or max(len(scan.deletions) for scan in scans) > LIST_DELETIONS_MAX:
        return None
    look_up = _LookUp.of(context, schema, question, transform, scans)
    alike_keys = dict.fromkeys(scan.slices for scan in scans) if look_up else {}
    lists = {slices: KeyList.of(schema, slices) for slices in alike_keys}
    if look_up is None or None in lists.values():
        return None
    sizes: list[int] = []

    def read(scan: Scan) -> list[pa.RecordBatch] | None:
        if sum(sizes) > LIST_BYTES_MAX:
            return None
        interruption.check()
        found = look_up.of_list(scan, cast("KeyList", lists[scan.slices]), interruption)
        sizes.append(LIST_BYTES_MAX + 1 if found is None else sum(batch.nbytes for batch in found))
        return None if found is None else look_up.without_gone(scan, found)

    if len(scans) == 1:
        parts = [read(scans[0])]
    else:
        with ThreadPoolExecutor(min(len(scans), _THREADS_MAX), "dormouse-keys") as threads:
            parts = list(threads.map(read, scans))
    # most files of a group have the same deletions
    alike: dict[tuple[Deletion, ...], list[pa.RecordBatch]] = defaultdict(list)
    for scan, part in zip(scans, parts, strict=True):
        if part is None or sum(sizes) > LIST_BYTES_MAX:
            return None
        alike[scan.deletions] += part
    left = [_left(schema, deletions, look_up.alike(some)) for deletions, some in alike.items()]
    return look_up.newest(left, are_sorted=len(scans) == 1)


class _LookUp:
    """A look-up of keys in some files of a table."""

    def __init__(
        self,
        context: TableContext,
        schema: Schema,
        wanted: Sequence[str],
        columns: Sequence[Field],
        newest_by: Sequence[str],
    ) -> None:
        self._context, self._schema, self._wanted = context, schema, list(wanted)
        self._names = [field.name for field in columns]
        self._newest_by = newest_by
        # files differ in the nullability of their columns, and perhaps in their types
        self._alike = pa.schema([(field.name, arrow_type(field.type)) for field in columns])

    @staticmethod
    def of(
        context: TableContext, schema: Schema, question: Question, transform: Transform, scans: Sequence[Scan]
    ) -> _LookUp | None:
        """Returns the look-up in some files; None when a query engine has to read them."""
        if not may_answer(question, transform):
            return None
        properties = context.properties
        newest_by = newest_first(properties) if is_keyed(properties) else ()
        stored = stored_schema(schema, properties)
        wanted = list(dict.fromkeys((*schema.key_names, *question.columns)))
        hidden = [*newest_by, DELETED_AT] if newest_by else []
        tested = [name for one in scans for deletion in one.deletions for name in deletion.tested]
        if not set(tested) <= set(stored.names):
            return None
        columns = [stored.field(name) for name in dict.fromkeys((*wanted, *hidden, *tested))]
        # a look-up needs files whose replaced rows are known by their keys, written with the current columns
        are_plain = all(
            one.byte_count
            and not (one.deletions and newest_by)
            and (one.gone is None or one.gone.has_whole_keys)
            and is_as_stored(written_schema(stored, one.filename), stored)
            for one in scans
        )
        if not (are_plain and can_look_up(schema.key_fields, columns)):
            return None
        return _LookUp(context, schema, wanted, columns, newest_by)

    def of_key(self, scan: Scan, key: Mapping[Field, Any], *, is_likely: bool) -> list[pa.RecordBatch] | None:
        """Returns the rows of a file that have a key, with those that deletions match."""
        objects, size = self._context.objects, scan.byte_count or 0
        content = self._content(scan)
        return rows_of(objects, scan.filename, size, key, self._names, is_likely=is_likely, content=content)

    def of_list(self, scan: Scan, keys: KeyList, interruption: Interruption) -> list[pa.RecordBatch] | None:
        """Returns the rows of a file that have one of some keys, with those that deletions match."""
        objects, size, content = self._context.objects, scan.byte_count or 0, self._content(scan)
        return rows_of_keys(
            objects, scan.filename, size, keys, self._names, content=content, interruption=interruption
        )

    def _content(self, scan: Scan) -> bytes | None:
        # the digest of a local file was compared, which is then read
        return None if self._context.verifies else self._context.inlined.in_memory(scan.filename)

    def without_gone(self, scan: Scan, batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
        """Returns the rows of a file without those that are known to be deleted."""
        return batches if scan.gone is None else list(without(batches, self._schema.key_names, [scan.gone]))

    def alike(self, batches: Sequence[pa.RecordBatch]) -> pa.Table:
        """Returns rows of several files."""
        return pa.Table.from_batches([exact(batch, self._alike) for batch in batches], self._alike)

    def newest(
        self, batches: list[pa.RecordBatch], *, are_sorted: bool, are_of_one_key: bool = False
    ) -> list[pa.RecordBatch]:
        """Returns the rows in key order; of a keyed table the newest of each key, without marks."""
        schema, newest_by = self._schema, self._newest_by
        if newest_by and are_of_one_key and all(batch.num_rows == 1 for batch in batches):
            with suppress(ValueError, OverflowError):  # times that Python cannot hold
                batches, are_sorted = [max(batches, key=self._place)] if len(batches) > 1 else batches, True
        if not are_sorted:
            order = [(name, "ascending") for name in schema.key_names]
            order += [(name, "descending") for name in newest_by]
            rows = self.alike(batches).sort_by(order)
            batches = cast("list[pa.RecordBatch]", rows.combine_chunks().to_batches())
        if newest_by:
            if sum(map(len, batches)) > 1:
                batches = list(first_of_keys(batches, schema.row_key_names))
            batches = [batch.filter(pc.is_null(batch.column(DELETED_AT))) for batch in batches]
        return [batch.select(self._wanted) for batch in batches]

    def _place(self, row: pa.RecordBatch) -> list[Any]:
        """Returns the values by which a row is newer than others of its key."""
        return [row.column(name)[0].as_py() for name in self._newest_by]


def _left(schema: Schema, deletions: Sequence[Deletion], rows: pa.Table) -> pa.RecordBatch:
    """Returns the rows that none of the deletions matches."""
    [batch] = rows.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], rows.schema)]
    is_gone = np.zeros(batch.num_rows, bool)
    others = []
    for one in deletions if batch.num_rows else ():
        if isinstance(one.rows, RowSet):
            # all bounds of such a deletion are those of the rows that it lists
            is_gone |= one.rows.search().flags([batch.column(field.name) for field in one.rows.fields])
        else:
            others.append(one)
    if others:
        session = sorted_session(options={"datafusion.execution.target_partitions": "1"})
        stays = rendered(remains(schema, others), DATAFUSION).alias("stays")
        found = session.create_dataframe([[batch]]).select(stays).collect()
        is_gone |= ~np.concatenate([one.column(0).to_numpy(zero_copy_only=False) for one in found])
    return batch.filter(pa.array(~is_gone))


def _remaining(schema: Schema, scan: Scan, batches: list[pa.RecordBatch]) -> list[pa.RecordBatch] | None:
    """Returns the rows that no deletion of the scan matches. All rows have the key of the scan.

    Returns None for too many rows or deletions, and for times that Python cannot hold.
    """
    if sum(map(len, batches)) > FOUND_MAX or len(scan.deletions) > DELETIONS_MAX:
        return None
    for one in scan.deletions:
        if isinstance(one.rows, RowSet):
            # all bounds of such a deletion are those of the rows that it lists
            names, search = [field.name for field in one.rows.fields], one.rows.search()
            batches = [
                batch.filter(pa.array(~search.flags(batch.select(names).columns))) for batch in batches
            ]
    others = [one for one in scan.deletions if not isinstance(one.rows, RowSet)]
    [near] = scan.slices[0][schema.row_keys[0].name]
    is_kept = rendered(remains(schema, others, near=near), PLAIN)
    names = [*dict.fromkeys((*schema.row_key_names, *(name for one in others for name in one.tested)))]
    try:
        kept = [[bool(is_kept(row)) for row in batch.select(names).to_pylist()] for batch in batches]
    except (ValueError, OverflowError):
        return None
    return [batch.filter(pa.array(some, pa.bool_())) for batch, some in zip(batches, kept, strict=True)]


def is_look_up(schema: Schema, scans: Sequence[Scan]) -> bool:
    """Returns whether each of the scans wants one key only."""
    return all(_key_of(schema, scan) for scan in scans)


def _key_of(schema: Schema, scan: Scan) -> dict[Field, Any]:
    """Returns the values of the leading row keys, if the scan wants one key only; otherwise an empty dict."""
    if len(scan.slices) != 1:
        return {}
    wanted = scan.slices[0]
    leading = list(takewhile(lambda field: field.name in wanted, schema.row_keys))
    ranges = [wanted[field.name] for field in leading]
    if len(leading) != len(wanted) or not all(len(one) == 1 and one[0].is_exact for one in ranges):
        return {}
    return {field: one[0].min for field, one in zip(leading, ranges, strict=True)}
