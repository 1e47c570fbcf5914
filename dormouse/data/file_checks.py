"""Checks of a whole file: its rows, their order, statistics and sketches must be as they were written."""

from __future__ import annotations

import math
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dormouse.data.arrow_schema import check_stored, is_ascending, written_schema
from dormouse.data.object_access import parquet_object
from dormouse.errors import DormouseError, EngineFailed, InvalidData, ObjectNotFound, one_line
from dormouse.model.loops import ahead
from dormouse.model.region import Region, decode_key, encode_key, encode_value
from dormouse.model.schema import Schema
from dormouse.model.table import ProblemKind
from dormouse.objects.store import ObjectStore

# The rows in which two arrays of equal length and type differ, including nested types.

Flags = npt.NDArray[np.bool_]


def differ(wanted: pa.Array, there: pa.Array) -> Flags:
    """Returns, for each row, whether the values of the two arrays differ.

    Two nulls are equal, and so are two NaNs. 0.0 and -0.0 differ, since a copy must keep the sign.
    """
    kind = wanted.type
    one_is_null = _flags(pc.xor(pc.is_null(wanted), pc.is_null(there)))
    both = _flags(pc.and_(pc.is_valid(wanted), pc.is_valid(there)))
    if pa.types.is_null(kind):
        return one_is_null
    if pa.types.is_struct(kind):
        # flatten() returns a null struct's fields as null
        pairs = zip(wanted.flatten(), there.flatten(), strict=True)
        parts: Flags = np.logical_or.reduce([one_is_null, *(differ(*pair) for pair in pairs)])
        return parts
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        return one_is_null | _lists_differ(wanted, there, both)
    differs = _flags(pc.fill_null(pc.not_equal(wanted, there), False))
    if pa.types.is_floating(kind):
        nan = _flags(pc.fill_null(pc.and_(pc.is_nan(wanted), pc.is_nan(there)), False))
        same_sign = pc.equal(_sign(wanted), _sign(there))
        differs = (differs | ~_flags(pc.fill_null(same_sign, True))) & ~nan
    return differs | one_is_null


def _lists_differ(wanted: pa.Array, there: pa.Array, both: Flags) -> Flags:
    """Returns a flag for each row: true if its two lists or maps differ. Rows with a null are false.

    `both` marks the rows in which neither value is null.
    """
    counts, others = (np.diff(np.asarray(one.offsets)) for one in (wanted, there))
    differs: Flags = both & (counts != others)
    alike = both & ~differs
    elements = differ(*(_elements(one, alike) for one in (wanted, there)))
    rows = np.repeat(np.flatnonzero(alike), counts[alike])
    differs[rows[elements]] = True
    return differs


def _elements(lists: pa.Array, of: Flags) -> pa.Array:
    """Returns the elements of the lists or maps in the rows marked by `of`; map entries become structs."""
    starts = np.asarray(lists.offsets)
    counts = np.diff(starts)[of]
    # positions of the elements: consecutive, from each row's first
    ends = np.cumsum(counts)
    places = np.arange(counts.sum()) + np.repeat(starts[:-1][of] - (ends - counts), counts)
    if not pa.types.is_map(lists.type):
        return lists.values.take(pa.array(places))
    columns = [part.take(pa.array(places)) for part in (lists.keys, lists.items)]
    return pa.StructArray.from_arrays(columns, ["key", "value"])


def _sign(values: pa.Array) -> pa.Array:
    bits = values.cast(pa.float64()).view(pa.int64())
    return pc.less(bits, 0)


def _flags(values: pa.Array) -> Flags:
    flags: Flags = values.to_numpy(zero_copy_only=False)
    return flags


READ_ROWS = 65_536
Found = tuple[ProblemKind, str]


@dataclass(frozen=True, slots=True)
class Recorded:
    """The recorded facts of a file.

    `region` is the region of the only partition that refers to the file; None if there are several.
    """

    row_count: int | None
    min_key: bytes | None
    max_key: bytes | None
    region: Region | None


def file_problems(store: ObjectStore, name: str, schema: Schema, recorded: Recorded) -> list[Found]:
    """Returns every difference between a file and its records; empty for a file as it was written.

    It reads every page, in bounded memory. Raises `ObjectNotFound`. A damaged file may crash the process,
    since Arrow trusts its footer: see `FileReader`.
    """
    now, schema = schema, written_schema(schema, name)
    read = _Read(schema)
    try:
        with parquet_object(store, name, verify=True) as file:
            check_stored(file.schema_arrow, now, name)
            metadata, coded = file.metadata, _coded_texts(file, schema)
        how = {"metadata": metadata, "read_dictionary": coded}
        with parquet_object(store, name, verify=True, **how) as file:
            for number in range(file.num_row_groups):
                read.row_group(file, number)
    except InvalidData as error:
        return [*read.found, ("object_unreadable", str(error))]
    recorded = replace(recorded, region=_called(recorded.region, now, schema))
    return [*read.found, *_counts_and_keys(read, schema, recorded), *_sketches(store, name, schema, read)]


def _called(region: Region | None, now: Schema, then: Schema) -> Region | None:
    """Returns a region with the row keys' names in the schema `then`, instead of those in `now`."""
    called = dict(zip(now.row_key_names, then.row_key_names, strict=True))
    return None if region is None else Region({called[name]: item for name, item in region.items()})


def _coded_texts(file: pq.ParquetFile, schema: Schema) -> list[str]:
    """Returns the text columns, except keys, that have a dictionary in every row group.

    Reading such a column as a dictionary is faster.
    """
    groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    coded = [
        {one.path_in_schema for one in map(group.column, range(group.num_columns)) if one.has_dictionary_page}
        for group in groups
    ]
    texts = {field.name for field in file.schema_arrow if field.type in (pa.string(), pa.binary())}
    return sorted(texts.intersection(*coded).difference(schema.key_names))


class _Read:
    """The facts gathered while a file's rows are read."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self.rows = 0
        self.found: list[Found] = []
        self.bounds: dict[str, tuple[Any, Any]] = {}
        self.first: tuple[Any, ...] = ()
        self.last: tuple[Any, ...] = ()
        self._before = b""
        self._sorted = True

    def row_group(self, file: pq.ParquetFile, number: int) -> None:
        seen = _Columns(file.metadata.row_group(number), self._schema.row_key_names)
        for batch in ahead(file.iter_batches(READ_ROWS, row_groups=[number]), 1):
            if batch.num_rows:
                ascends = self._keys(batch.select(self._schema.key_names))
                seen.add(batch, self._schema.key_names[0] if ascends else "")
                self.rows += batch.num_rows
        for name in self._schema.row_key_names:
            low, high = seen.bounds.get(name, (None, None))
            if low is not None:
                known = self.bounds.get(name, (low, high))
                self.bounds[name] = min(known[0], low), max(known[1], high)
        self.found += [("statistics", f"row group {number}: {what}") for what in seen.wrong()]

    def _keys(self, keys: pa.RecordBatch) -> bool:
        """Records a batch's first and last key, and any unsorted rows; returns whether its keys ascend."""
        first, last = (tuple(column[at].as_py() for column in keys.columns) for at in (0, -1))
        row_keys = len(self._schema.row_keys)
        self.first, self.last = self.first or first[:row_keys], last[:row_keys]
        fields = self._schema.key_fields
        follows, ascends = self._before <= encode_key(fields, first), is_ascending(keys)
        if self._sorted and not (follows and ascends):
            self._sorted = False
            where = f"in the {keys.num_rows:,} rows after row {self.rows:,}, from {first!r} to {last!r}"
            self.found.append(("not_sorted", f"rows are out of order {where}"))
        self._before = encode_key(fields, last)
        return ascends


class _Columns:
    """The null counts, minima and maxima of a row group's columns, to be compared with its statistics.

    Nested columns are left out. Minima and maxima are kept for keys and for columns whose statistics have
    them.
    """

    def __init__(self, group: pq.RowGroupMetaData, keys: Sequence[str]) -> None:
        columns = (group.column(position) for position in range(group.num_columns))
        self._said = {one.path_in_schema: one.statistics for one in columns if one.statistics is not None}
        self._bounded = {*keys, *(name for name, said in self._said.items() if said.has_min_max)}
        self.bounds: dict[str, tuple[Any, Any]] = {}
        self._nulls: dict[str, int] = {}

    def add(self, batch: pa.RecordBatch, ascending: str = "") -> None:
        """Adds the rows of a batch; `ascending` names a column whose values are known to ascend, if any."""
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if pa.types.is_nested(column.type):
                continue
            self._nulls[name] = self._nulls.get(name, 0) + column.null_count
            values = column
            if pa.types.is_dictionary(column.type):
                # an index that is not in the dictionary raises an error
                values = column.dictionary.take(pc.unique(column.indices))
            elif name == ascending and pa.types.is_string(column.type) and not column.null_count:
                values = column.take(pa.array([0, len(column) - 1]))
            if name not in self._bounded:
                continue
            with suppress(pa.ArrowNotImplementedError):
                low, high = pc.min_max(values).as_py().values()
                if low is not None and not (isinstance(low, float) and math.isnan(low)):
                    known = self.bounds.get(name, (low, high))
                    self.bounds[name] = min(known[0], low), max(known[1], high)

    def wrong(self) -> Iterator[str]:
        """Yields a message for each column whose values contradict the row group's statistics.

        A minimum below all values, or a maximum above them, is no contradiction: long texts are shortened.
        """
        for name, said in self._said.items():
            if name not in self._nulls:
                continue
            if said.has_null_count and said.null_count != self._nulls[name]:
                yield f"{name} has {self._nulls[name]:,} nulls, its statistics say {said.null_count:,}"
            if said.has_min_max and name in self.bounds:
                with suppress(TypeError, NotImplementedError, UnicodeDecodeError):
                    if said.min > self.bounds[name][0] or said.max < self.bounds[name][1]:
                        yield f"values of {name} lie outside of its statistics' bounds"


def _counts_and_keys(read: _Read, schema: Schema, recorded: Recorded) -> Iterator[Found]:
    if recorded.row_count is not None and recorded.row_count != read.rows:
        yield "row_count", f"it has {read.rows:,} rows, and was written with {recorded.row_count:,}"
    if not read.rows:
        return
    ends = (("first", read.first, recorded.min_key), ("last", read.last, recorded.max_key))
    for what, found, known in ends:
        if known is not None and encode_key(schema.row_keys, found) != known:
            was = decode_key(schema.row_keys, known)
            yield "key_range", f"its {what} key is {found!r}, and was written as {was!r}"
    for name, within in (recorded.region or {}).items():
        low, high = read.bounds[name]
        if not (within.contains(low) and within.contains(high)):
            of_partition = f"its partition's {within.min!r} to {within.max!r}"
            yield "key_range", f"{name} is from {low!r} to {high!r}, outside of {of_partition}"


def _sketches(store: ObjectStore, name: str, schema: Schema, read: _Read) -> Iterator[Found]:
    from dormouse.data.sketches import load_sketches

    try:
        sketches = load_sketches(store, name, schema)
    except ObjectNotFound:  # a file that the caller registered may have none
        return
    except InvalidData as error:
        yield "object_unreadable", str(error)
        return
    if sketches.row_count != read.rows:
        yield "statistics", f"its sketches are of {sketches.row_count:,} rows, and it has {read.rows:,}"
    for field in schema.row_keys:
        bounds = tuple(encode_value(field.type, value) for value in read.bounds.get(field.name, ()))
        sketch = sketches.keys.get(field.name)
        if bounds and (sketch is None or (sketch.min, sketch.max) != bounds):
            yield "statistics", f"its sketches have other bounds of {field.name}"


# Files are read in a process of their own: Arrow's C++ trusts a file's footer, so a damaged file may crash
# it.

_OF_DAMAGE = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}


class FileReader:
    """A client of a child process that checks files, started when it is first needed and ended by `close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def problems(self, store: ObjectStore, name: str, schema: Schema, recorded: Recorded) -> list[Found]:
        """Returns the result of `file_problems`; if the file crashes the process, returns that as a problem.

        Raises `EngineFailed` when the process ends for another reason.
        """
        process = self._process = self._process or _started()
        assert process.stdin is not None  # noqa: S101 both are pipes
        assert process.stdout is not None  # noqa: S101
        try:
            pickle.dump((store, name, schema, recorded), process.stdin)
            process.stdin.flush()
            answer: list[Found] | DormouseError = pickle.load(process.stdout)  # noqa: S301 of our own process
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            return [("object_unreadable", _why_it_ended(self.close()))]
        if isinstance(answer, DormouseError):
            raise answer
        return answer

    def close(self) -> int:
        """Ends the process; returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        with process:  # closing its pipes ends the process
            pass
        return process.returncode


def _why_it_ended(code: int) -> str:
    if -code in _OF_DAMAGE:
        return f"reading it crashes the process ({signal.Signals(-code).name}): it is damaged"
    raise EngineFailed(f"the process that reads files ended ({code}): out of memory, or it was killed")


def _started() -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    # in its own process group it gets no Ctrl-C; it ends when its pipe is closed
    return subprocess.Popen(
        [sys.executable, "-m", "dormouse.data.file_checks"], stdin=pipe, stdout=pipe, process_group=0
    )


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    while True:
        try:
            store, name, schema, recorded = pickle.load(requests)  # noqa: S301 of the process that started us
        except EOFError:
            return
        answer: list[Found] | DormouseError
        try:
            answer = file_problems(store, name, schema, recorded)
        except DormouseError as error:
            answer = error
        except Exception as error:  # damaged values may raise anything
            answer = [("object_unreadable", f"{type(error).__name__}: {one_line(error)}")]
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # output that libraries print must not mix with the answers
        _serve(sys.stdin.buffer, answers)
