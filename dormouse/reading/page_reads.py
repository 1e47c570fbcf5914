"""Look-ups of one key in a sorted Parquet file, which read only the pages that can have the key.

The pages are copied into a small Parquet file in memory, which pyarrow decodes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import takewhile
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as _is

from dormouse.data.arrow_schema import arrow_type, exact, written_schema
from dormouse.data.newest import first_of_keys
from dormouse.data.transform import Transform
from dormouse.model.schema import Schema, is_as_stored
from dormouse.model.table import DELETED_AT, is_keyed, newest_first, stored_schema
from dormouse.model.types import INT, LONG, Field
from dormouse.objects.store import ObjectStore
from dormouse.reading.file_cache import KEPT, KnownFile, OpenFile, opened
from dormouse.reading.file_pages import (
    NUMBERS,
    TEXTS,
    Fetched,
    FilePages,
    Rows,
    as_in_index,
    decoded_rows,
    integer,
    pages_of,
)
from dormouse.reading.gone_rows import without
from dormouse.reading.page_index import (
    NotUnderstood,
    Part,
    RowGroup,
)
from dormouse.reading.page_values import coded_page, plain_page
from dormouse.reading.planner import Scan
from dormouse.reading.row_filter import PLAIN, remains, rendered
from dormouse.reading.row_sets import RowSet
from dormouse.reading.where import Question
from dormouse.state.context import TableContext

PAGES_MAX = 4
"""The most pages of a column that a look-up reads for one key. A query engine reads more pages faster."""
ROWS_MAX = 32_768
"""The most rows of a column that are decoded for one key.

Pages have many more rows in files of earlier releases and of other writers.
"""
FOUND_MAX = 256
"""The most rows of one key that a look-up reads.

It reads each row by itself if the column has a dictionary, so a query engine reads more rows faster.
"""
FILES_MAX = 16
"""The most files of a group of leaves for a look-up. A query engine merges more files faster."""

DELETIONS_MAX = 7
"""The most deletions by which a look-up tests each row. Beside more, a file is read once to find the rows."""

# The rows of one file.


def can_look_up(keys: Sequence[Field], columns: Sequence[Field]) -> bool:
    """Returns whether `rows_of` supports these keys and columns, by their types."""
    return all(one.type in (*NUMBERS, *TEXTS) for one in keys) and not any(
        one.type.is_nested for one in columns
    )


def rows_of(
    store: ObjectStore,
    name: str,
    byte_count: int,
    key: Mapping[Field, Any],
    columns: Sequence[str],
    *,
    is_likely: bool = False,
    content: bytes | None = None,
) -> list[pa.RecordBatch] | None:
    """Returns the rows of a table's file that have a key, in the file's order.

    `key` has the values, as Arrow takes them, of the first row key or of the first few row keys. The file is
    sorted by its row keys and has these columns, which `can_look_up` accepts. If `is_likely`, the file
    probably has the key, and more is read at once. `content` has the file's bytes, if they are in memory.

    Returns None when a query engine has to read the file. This includes an object that does not exist, is
    damaged, or has a size other than `byte_count`: the engine's reader then raises the error.
    """
    try:
        wanted = {one.name: pa.scalar(value, arrow_type(one.type)) for one, value in key.items()}
        with opened(store, name, byte_count, content) as source:
            if (whole := KEPT.whole(source)) is not None:
                at = _places({name: whole[name] for name in wanted}, wanted)
                if not len(at):
                    return []
                found = whole.select(columns)
                return [found if len(at) == len(found) else found.take(pa.array(at))]
            return _Lookup(KEPT.file(source), source, next(iter(key)), wanted, columns, is_likely).rows()
    except Exception:  # the numbers in a damaged file can be anything, and cause any error
        return None


def _places(keys: Mapping[str, pa.Array], wanted: Mapping[str, pa.Scalar]) -> np.ndarray[Any, Any]:
    """Returns the numbers of the rows that have the wanted value of each key; the rows are sorted by them."""
    (first, number), *others = wanted.items()
    if not others and _is.is_integer(number.type):
        values = keys[first].to_numpy()
        ends = (int(values.searchsorted(number.as_py(), side)) for side in ("left", "right"))
        return np.arange(*ends)
    alike = (pc.equal(keys[name], value) for name, value in wanted.items())
    return np.flatnonzero(reduce(pc.and_, alike).to_numpy(zero_copy_only=False))


class KeyBounds(NamedTuple):
    """The smallest and largest value of the first key in a row group, and its number of rows."""

    low: int
    high: int
    row_count: int


def row_group_bounds(store: ObjectStore, name: str, byte_count: int, key: Field) -> list[KeyBounds]:
    """Returns the bounds of the first key in each row group of a table's file on this machine.

    `key` has the name that it has in the file. Returns an empty list for a file that is not on this machine,
    cannot be read or lacks bounds, and for keys that are not INT or LONG.
    """
    if key.type not in (INT, LONG):
        return []
    try:
        groups = [(one.chunks[key.name].bounds, one.row_count) for one in _groups(store, name, byte_count)]
    except Exception:
        return []
    known = [KeyBounds(integer(ends[0]), integer(ends[1]), rows) for ends, rows in groups if ends is not None]
    return known if len(known) == len(groups) else []


def row_groups_in_memory(store: ObjectStore, name: str, byte_count: int) -> list[tuple[int, int]] | None:
    """Returns each row group's row count and size in memory, of a table's file on this machine.

    Returns None when a size is not known, and an empty list for a file that is not on this machine.
    """
    try:
        found = [(one.row_count, one.byte_count) for one in _groups(store, name, byte_count)]
    except Exception:
        return None
    known = [(rows, size) for rows, size in found if size is not None and rows > 0]
    return known if len(known) == len(found) else None


def _groups(store: ObjectStore, name: str, byte_count: int) -> list[RowGroup]:
    """Returns a file's row groups, none if it is not on this machine; raises any error if it is damaged."""
    if store.local_path(name) is None:
        return []
    with opened(store, name, byte_count) as source:
        return KEPT.file(source).groups


class _Lookup(FilePages):
    """A look-up of one key in one file.

    It reads pages of the key columns first. Pages of other columns follow only if the key is found, unless
    the key is likely to be in the file, or one more round trip would cost more than these pages.
    """

    def __init__(
        self,
        file: KnownFile,
        source: OpenFile,
        first: Field,
        key: Mapping[str, pa.Scalar],
        columns: Sequence[str],
        is_likely: bool,
    ) -> None:
        super().__init__(file, source, first, key)
        self._columns, self._key, self._is_likely = columns, key, is_likely
        self._wanted = as_in_index(first, key[first.name])

    def rows(self) -> list[pa.RecordBatch]:
        wanted = self._wanted
        held = [number for number, (low, high) in enumerate(self.group_bounds()) if low <= wanted <= high]
        if len(held) > PAGES_MAX:
            raise NotUnderstood("a key of many rows")
        return [some for number in held if (some := self._in_group(number)) is not None]

    def _in_group(self, number: int) -> pa.RecordBatch | None:
        candidates = self._candidates(number)
        if candidates is None:
            return None
        chunks, names = self._file.groups[number].chunks, list(self._key)
        others = [name for name in self._columns if name not in self._key]
        is_one_read = self._is_likely or self._source.is_far
        data = self._fetched(number, names + others if is_one_read else names, candidates)
        if self._is_likely:  # opening two small files would cost more than decoding these pages
            names += [name for name in others if not (chunks[name].dictionary or data[name].is_plain)]
        parts = {name: self._whole(number, data[name], candidates) for name in names}
        decoded = decoded_rows(parts, candidates)
        at = _places(decoded, self._key)
        if not len(at):
            return None
        if at[-1] - at[0] >= FOUND_MAX:
            raise NotUnderstood("a key of many rows")
        found = Rows(candidates.start + int(at[0]), candidates.start + int(at[-1]) + 1)
        if not is_one_read:
            data = self._fetched(number, others, found)
        columns = {name: column.slice(int(at[0]), len(at)) for name, column in decoded.items()}
        coded, parts = {}, {}
        for name in others:
            if name in columns:
                continue
            values = self._alone(number, data[name], found)
            if values is None:
                pages_of, has = data[name].of(found)
                parts[name] = Part(data[name].chunk, b"", pages_of), has
            else:
                coded[name] = values
        columns |= decoded_rows(parts, found)
        # copied, since a slice would keep its whole pages in memory
        copied = {name: pa.concat_arrays([column]) for name, column in columns.items()} | coded
        return pa.RecordBatch.from_arrays([copied[name] for name in self._columns], names=self._columns)

    def _candidates(self, number: int) -> Rows | None:
        """Returns the rows of the pages that may have the first key; None without any.

        `number` is the number of the row group.
        """
        chunk = self._file.groups[number].chunks[self._first.name]
        smallest, largest = self.page_bounds(number)
        first = bisect_left(largest, self._wanted)
        end = bisect_right(smallest, self._wanted)
        if first >= end:
            return None
        if end - first > PAGES_MAX:
            raise NotUnderstood("a key of many rows")
        rows = self.pages(number, chunk).first_rows
        return Rows(rows[first], rows[end])

    def _fetched(self, number: int, names: Sequence[str], rows: Rows) -> dict[str, Fetched]:
        """Returns the pages of each column that contain `rows`; caches a remote object's dictionaries."""
        group, spans, wanted = self._file.groups[number], [], []
        known: dict[int, tuple[int, int]] = {}  # most columns have their pages' first rows in one array
        for name in names:
            chunk = group.chunks[name]
            found = self.pages(number, chunk)
            first, end = numbers = known.get(id(found.first_rows)) or pages_of(found, rows)
            known[id(found.first_rows)] = numbers
            if found.first_rows[end] - found.first_rows[first] > ROWS_MAX:
                raise NotUnderstood("pages of many rows")
            start, last = found.offsets[first], end - 1
            spans.append((start, found.offsets[last] + found.sizes[last] - start))
            wanted.append((chunk, found, first, end))
        missing = [
            (chunk, chunk.dictionary)
            for chunk, *_ in wanted
            if chunk.dictionary and self._source.is_far and self.known(number, chunk) is None
        ]
        data = self._source.read([*spans, *(span for _, span in missing)])
        for (chunk, _), dictionary in zip(missing, data[len(spans) :], strict=True):
            self.note(number, chunk, dictionary)
        return {one[0].name: Fetched(*one, found) for one, found in zip(wanted, data, strict=False)}

    def _whole(self, number: int, fetched: Fetched, rows: Rows) -> tuple[Part, Rows]:
        """Returns a key column's pages that contain `rows`, with their dictionary, and the pages' rows."""
        chunk = fetched.chunk
        data, has = fetched.of(rows)
        return Part(chunk, self.dictionary(number, chunk) if chunk.dictionary else b"", data), has

    def _alone(self, number: int, fetched: Fetched, rows: Rows) -> pa.Array | None:
        """Returns the values of `rows` if they are in a dictionary or plain numbers, otherwise None."""
        chunk = fetched.chunk
        data, has = fetched.of(rows)
        if not chunk.dictionary:
            plain = plain_page(data, chunk, has.end - has.start) if fetched.is_one_page else None
            return plain and pa.concat_arrays([plain.value(row - has.start) for row in range(*rows)])
        page = coded_page(data, chunk, has.end - has.start)
        if page is None:
            return None
        places = [page.place(row - has.start) for row in range(*rows)]
        known = self.dictionary(number, chunk)
        for place in places:
            if place is not None and place >= len(known):
                raise NotUnderstood("a place beyond the dictionary")
        # faster than `take` for a few values, and also a copy
        return pa.concat_arrays(
            [pa.nulls(1, known.type) if place is None else known.slice(place, 1) for place in places]
        )


# Look-ups of a key of a table without a query engine.


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
    if not all(keys) or question.conditions or transform.aggregates or transform.age_off:
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
    names = [field.name for field in columns]
    batches: list[pa.RecordBatch] = []
    for scan, key in zip(scans, keys, strict=True):
        size, is_likely = scan.byte_count or 0, len(scans) == 1
        # the digest of a local file was compared, which is then read
        content = None if context.verifies else context.inlined.in_memory(scan.filename)
        found = rows_of(
            context.objects, scan.filename, size, key, names, is_likely=is_likely, content=content
        )
        if found and scan.deletions:
            found = _remaining(schema, scan, found)
        if found is None:
            return None
        batches += found if scan.gone is None else without(found, schema.key_names, [scan.gone])
    if len(batches) > 1:
        order = [(name, "ascending") for name in schema.key_names]
        order += [(name, "descending") for name in newest_by]
        # files differ in the nullability of their columns, and perhaps in their types
        alike = pa.schema([(field.name, arrow_type(field.type)) for field in columns])
        rows = pa.Table.from_batches([exact(batch, alike) for batch in batches]).sort_by(order)
        batches = cast("list[pa.RecordBatch]", rows.combine_chunks().to_batches())
    if newest_by:
        if sum(map(len, batches)) > 1:
            batches = list(first_of_keys(batches, schema.row_key_names))
        batches = [batch.filter(pc.is_null(batch.column(DELETED_AT))) for batch in batches]
    return [batch.select(wanted) for batch in batches]


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
