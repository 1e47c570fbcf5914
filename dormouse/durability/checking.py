"""Checks of the database and the object store: tables, files of cells, payloads, and all other objects.

A check only reads, in bounded memory, while everything runs. What it finds is a suspicion, as things change
meanwhile: it is looked at again, and a problem only when it is still there.
"""

from __future__ import annotations

import heapq
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from dormouse.durability.orphans import Known, is_quarantined, is_there
from dormouse.errors import InvalidName, ObjectNotFound, PartitionNotFound, TableNotFound
from dormouse.model.loops import Progress, no_progress
from dormouse.model.region import Region
from dormouse.model.table import Problem, TableRecord, is_edited, stored_schema
from dormouse.model.text import narrow_bytes
from dormouse.model.types import is_text
from dormouse.objects.names import ANSWERS, SKETCHES_SUFFIX
from dormouse.objects.store import ObjectStore
from dormouse.payloads.pack import FOLDER, written
from dormouse.postgres.connection import Supplier
from dormouse.postgres.lease import ClockJump
from dormouse.state.files.checks import FileChecks, TrackedFile
from dormouse.state.files.layout import OwnTables
from dormouse.state.files.write_streams import PutFile, PutFiles
from dormouse.state.partitions.store import PartitionStore
from dormouse.state.partitions.trees import tree_problems

if TYPE_CHECKING:
    from dormouse.data.file_checks import FileReader

PROBLEMS_OF_ONE_MAX = 1_000
"""Of payloads, and of the cells of one table."""
CHUNK_BYTES = 1 << 20
RUN_OBJECTS = 100_000
"""Sorted in memory at once; what there is more waits on disk."""
PROBLEMS_MAX = 10_000
"""With so many problems a check ends."""
UNKNOWN_MAX = 1_000
"""Of objects that nothing knows so many are told, and of those that are quarantined so many are counted."""
SUSPECTS_MAX = 1_000


def payload_problems(supplier: Supplier, objects: ObjectStore, *, deep: bool) -> list[Problem]:
    """What is found, and found again: what was collected meanwhile is no problem."""
    first = list(islice(_payload_problems(supplier, objects, deep), PROBLEMS_OF_ONE_MAX))
    if not first:
        return []
    again = {one.filename for one in _payload_problems(supplier, objects, deep)}
    return [one for one in first if one.filename in again]


def _payload_problems(supplier: Supplier, objects: ObjectStore, deep: bool) -> Iterator[Problem]:
    sizes = dict(objects.list(FOLDER))
    for name, size, digest, needed in written(supplier):
        found = sizes.get(name)
        if not needed:
            continue
        if found is None:
            yield Problem("object_missing", None, None, name, "the store does not have it")
        elif found != size:
            detail = f"it has {found:,} bytes, and was written with {size:,}"
            yield Problem("object_size", None, None, name, detail)
        elif deep and _payload_digest(objects, name) != digest:
            yield Problem("object_digest", None, None, name, "its bytes are not those that were written")


def _payload_digest(objects: ObjectStore, name: str) -> bytes | None:
    try:
        return sha256(objects.get(name)).digest()
    except ObjectNotFound:
        return None


def cell_file_problems(
    supplier: Supplier, objects: ObjectStore, table: TableRecord, *, deep: bool
) -> list[Problem]:
    """Of the files that were noted; none of a table that was dropped meanwhile."""
    if not is_edited(table.properties):
        return []
    files = PutFiles(supplier, table)
    sizes = dict(objects.list(files.prefix))
    found = (
        problem
        for file in files.noted()
        if (problem := _cell_file_problem(objects, table.name, file, sizes.get(file.object_name), deep))
    )
    problems = list(islice(found, PROBLEMS_OF_ONE_MAX))
    return problems if problems and any(files.noted()) else []


def _cell_file_problem(
    objects: ObjectStore, table: str, file: PutFile, listed: int | None, deep: bool
) -> Problem | None:
    name = file.object_name
    try:
        # what is not listed so may have been put since
        size = listed if listed == file.byte_count else objects.size(name)
        if size != file.byte_count:
            detail = f"it has {size:,} bytes, and was written with {file.byte_count:,}"
            return Problem("object_size", table, None, name, detail)
        if deep and _digest(objects, name) != file.sha256:
            return Problem("object_digest", table, None, name, "its bytes are not those that were written")
    except ObjectNotFound:
        return Problem("object_missing", table, None, name, "the store does not have it")
    return None


def _digest(objects: ObjectStore, name: str) -> str:
    digest = sha256()
    with objects.reader(name) as source:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


# A listing of objects in the order in which the database reads files: by the ids of their names.


class Listed(NamedTuple):
    """An object; the id is its file's, as hexadecimal digits, which its sketches have too."""

    file_id: str
    name: str
    byte_count: int


def by_file(objects: Iterable[tuple[str, int]]) -> Iterator[Listed]:
    """(name, bytes) in the order of the ids of files, in bounded memory."""
    lines = map(_line, objects)
    with ExitStack() as stack:
        runs: list[Iterable[str]] = []
        while run := sorted(islice(lines, RUN_OBJECTS)):
            if len(run) < RUN_OBJECTS:
                runs.append(run)
                break
            file = stack.enter_context(tempfile.TemporaryFile("w+", encoding="ascii"))
            file.writelines(run)
            file.seek(0)
            runs.append(file)
        yield from map(_listed, heapq.merge(*runs))


def _line(listed: tuple[str, int]) -> str:
    name, size = listed
    file_id = narrow_bytes(name.removesuffix(SKETCHES_SUFFIX)).hex()
    return f"{file_id} {size} {json.dumps(name)}\n"


def _listed(line: str) -> Listed:
    file_id, size, name = line.split(" ", 2)
    return Listed(file_id, json.loads(name), int(size))


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What was checked: tables, files and their bytes; with `deep` the bytes were read.

    `problems` are at most 10,000 and a few: with so many, a check ends. Objects that nothing knows come last,
    the first thousand. `quarantined` are none: what another timeline wrote, and is kept for a way back to it;
    they are counted up to a thousand and a few. `clock_jumps` are those of the database's clock in the last
    week, and no problems, as they were healed.
    """

    tables: int
    files: int
    bytes: int
    seconds: float
    problems: tuple[Problem, ...]
    quarantined: int = 0
    clock_jumps: tuple[ClockJump, ...] = ()


@dataclass
class _Unknown:
    """Objects that the database does not know; `quarantined` counts those that may be another timeline's."""

    objects: ObjectStore
    known: Known
    adopted: int
    problems: list[Problem] = field(default_factory=list)
    quarantined: int = 0

    @property
    def is_full(self) -> bool:
        return len(self.problems) >= UNKNOWN_MAX

    def look(self, table: str | None, names: Sequence[str]) -> None:
        """Notes those that the database does not know now, and that are still there."""
        asked = [name for name in names if not self._has_enough_like(name)]
        for name in self.known.unknown(asked) if asked else ():
            if not is_there(self.objects, name):
                continue
            if is_quarantined(name, self.adopted):
                self.quarantined += 1
            elif not name.startswith(f"{ANSWERS}/"):  # what was sent for no job is expired with jobs
                detail = "the database does not know it: see dormouse orphans"
                self.problems.append(Problem("object_unknown", table, None, name, detail))

    def _has_enough_like(self, name: str) -> bool:
        return self.quarantined >= UNKNOWN_MAX if is_quarantined(name, self.adopted) else self.is_full


@dataclass
class _Done:
    unknown: _Unknown
    tables: int = 0
    files: int = 0
    bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        return len(self.problems) >= PROBLEMS_MAX

    def report(self) -> CheckReport:
        seconds = time.monotonic() - self.began
        problems = (*self.problems, *self.unknown.problems[:UNKNOWN_MAX])
        counts = self.tables, self.files, self.bytes, seconds
        return CheckReport(*counts, problems, self.unknown.quarantined)


class Checker:
    """Checks tables of one instance. `progress` is called with the files done.

    What is not known, and was written under an incarnation before `adopted`, is quarantined. With `notes`,
    files that were written without a digest, and read well, have one from then on.
    """

    def __init__(
        self,
        supplier: Supplier,
        objects: ObjectStore,
        known: Known,
        *,
        adopted: int = 0,
        deep: bool = False,
        notes: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self._notes = notes
        self._deep = deep
        self._apart: FileReader | None = None
        if deep:
            from dormouse.data.file_checks import FileReader

            self._apart = FileReader()
        self._supplier = supplier
        self._objects = objects
        self._progress = progress or no_progress
        self._done = _Done(_Unknown(objects, known, adopted))

    def run(
        self,
        tables: Sequence[TableRecord],
        *,
        rest: bool = False,
        finished: Callable[[str], object] = lambda table: None,
    ) -> CheckReport:
        """Checks the tables, and the `rest`: what of the store is no table's. Once."""
        try:
            for table in tables:
                if not self._done.is_over:
                    with suppress(TableNotFound):  # dropped meanwhile
                        self._table(table)
                        self._done.tables += 1
                        finished(table.name)
        finally:
            if self._apart is not None:
                self._apart.close()
        return self.rest(tables) if rest else self._done.report()

    def rest(self, tables: Sequence[TableRecord]) -> CheckReport:
        """Checks what of the store is no table's; what begins as the objects of `tables` is not looked at."""
        if not self._done.is_over:
            self._done.problems += payload_problems(self._supplier, self._objects, deep=self._deep)
            self._unknown(tables)
        return self._done.report()

    def _table(self, table: TableRecord) -> None:
        checks = FileChecks(OwnTables(self._supplier, table))
        self._done.problems += _twice(lambda: [*tree_problems(self._supplier, table), *checks.problems()])
        reader = _Reader(self._supplier, self._objects, table, self._apart) if self._apart else None
        of_table = _TableObjects(self._objects, table, checks, self._done, reader, self._notes)
        of_table.check(self._progress)
        self._done.problems += cell_file_problems(self._supplier, self._objects, table, deep=self._deep)

    def _unknown(self, tables: Sequence[TableRecord]) -> None:
        owned = tuple(prefix for table in tables for prefix in table.object_prefixes)
        others = (
            name
            for name, _ in self._objects.list()
            if not name.startswith(owned) and not Known.is_record(name)
        )
        while (names := list(islice(others, SUSPECTS_MAX))) and not self._done.is_over:
            self._done.unknown.look(None, names)
            if self._done.unknown.is_full:
                return


class _TableObjects:
    """The objects of one table, beside its files."""

    def __init__(
        self,
        objects: ObjectStore,
        table: TableRecord,
        checks: FileChecks,
        done: _Done,
        reader: _Reader | None,
        notes: bool,
    ) -> None:
        self._notes = notes
        self._objects = objects
        self._table = table
        self._checks = checks
        self._done = done
        self._reader = reader
        self._without: list[TrackedFile] = []
        self._strange: list[str] = []
        self._doubtful: list[tuple[TrackedFile, str]] = []

    def check(self, progress: Progress) -> None:
        listed = by_file(self._possible(self._listed()))
        ahead: Listed | None = next(listed, None)
        for page in self._checks.pages(with_references=self._reader is not None):
            for file in page:
                key = file.file_id.hex
                while ahead is not None and ahead.file_id < key:
                    self._suspect_object(ahead.name)
                    ahead = next(listed, None)
                found: list[Listed] = []
                while ahead is not None and ahead.file_id == key:
                    found.append(ahead)
                    ahead = next(listed, None)
                self._file(file, found)
                if self._reader is not None:
                    progress(self._done.files, None)
                if self._done.is_over:
                    return
            progress(self._done.files, None)
        for rest in chain([ahead] if ahead is not None else [], listed):
            self._suspect_object(rest.name)
        self._confirm()
        self._note_digests()

    def _listed(self) -> Iterator[tuple[str, int]]:
        return chain.from_iterable(map(self._objects.list, self._table.object_prefixes))

    def _possible(self, listed: Iterator[tuple[str, int]]) -> Iterator[tuple[str, int]]:
        for name, size in listed:
            if is_text(name):
                yield name, size
            else:
                self._suspect_object(name)

    def _file(self, file: TrackedFile, found: list[Listed]) -> None:
        sizes = {one.name: one.byte_count for one in found}
        if not file.filename.startswith(self._table.object_prefixes):
            # a caller's own name: others may be beside it, so that it is looked up alone
            size = _size(self._objects, file.filename)
        else:
            size = sizes.get(file.filename)
            if size is not None and file.filename + SKETCHES_SUFFIX not in sizes:
                self._doubt(file, file.filename + SKETCHES_SUFFIX)
        if size is None or size != file.byte_count is not None:
            self._doubt(file, file.filename)
        if self._reader is not None and size is not None and file.references:
            self._read(self._reader, file)
        self._done.files += 1
        self._done.bytes += size or 0

    def _read(self, reader: _Reader, file: TrackedFile) -> None:
        try:
            found = reader.problems(file)
        except ObjectNotFound:
            self._doubt(file, file.filename)
            return
        if found and self._checks.referenced([file.file_id]):
            self._done.problems += found
        if not found and file.digest is None and self._notes:
            self._without.append(file)
            if len(self._without) >= SUSPECTS_MAX:
                self._note_digests()

    def _note_digests(self) -> None:
        """Of files that have none, and were read without a problem."""
        if not self._without:
            return
        from dormouse.data.file_checks import digest_of_object

        found = {}
        for file in self._without:
            with suppress(ObjectNotFound):  # collected since
                found[file.file_id] = digest_of_object(self._objects, file.filename)[1]
        if found:
            self._checks.note_digests(found)
        self._without = []

    def _doubt(self, file: TrackedFile, name: str) -> None:
        self._doubtful.append((file, name))
        if len(self._doubtful) >= SUSPECTS_MAX:
            self._confirm()

    def _suspect_object(self, name: str) -> None:
        self._strange.append(name)
        if len(self._strange) >= SUSPECTS_MAX:
            self._confirm()

    def _confirm(self) -> None:
        self._done.unknown.look(self._table.name, self._strange)
        sizes = {name: _size(self._objects, name) for _, name in self._doubtful}
        # what is collected loses its references long before its object
        referenced = self._checks.referenced([file.file_id for file, _ in self._doubtful])
        for file, name in self._doubtful:
            if file.file_id in referenced:
                tracked = referenced[file.file_id] if name == file.filename else None
                self._done.problems += self._wrong(name, sizes[name], tracked)
        self._strange, self._doubtful = [], []

    def _wrong(self, name: str, size: int | None, tracked: int | None) -> Iterator[Problem]:
        if size is None and _size(self._objects, name) is None:
            yield Problem("object_missing", self._table.name, None, name, "the store does not have it")
        elif size is not None and tracked is not None and size != tracked:
            detail = f"it has {size:,} bytes, and was written with {tracked:,}"
            yield Problem("object_size", self._table.name, None, name, detail)


class _Reader:
    """Reads files of one table whole."""

    def __init__(
        self, supplier: Supplier, objects: ObjectStore, table: TableRecord, apart: FileReader
    ) -> None:
        self._objects = objects
        self._table = table
        self._stored = stored_schema(table.schema, table.properties)
        self._partitions = PartitionStore(supplier, table)
        self._apart = apart

    def problems(self, file: TrackedFile) -> list[Problem]:
        """What is read of a file whose bytes are not those that were written tells nothing more."""
        from dormouse.data.file_checks import Recorded, digest_problems, file_problems

        name, found = file.filename, []
        if file.digest is not None:
            found = digest_problems(self._objects, name, file.digest)
        if not found:
            region = self._region(file.partition_id)
            recorded = Recorded(file.row_count, file.min_key, file.max_key, region)
            read = self._apart.problems if file.digest is None else file_problems
            found = read(self._objects, name, self._stored, recorded)
        return [Problem(kind, self._table.name, file.partition_id, name, detail) for kind, detail in found]

    def _region(self, partition_id: str | None) -> Region | None:
        try:
            return None if partition_id is None else self._partitions.partition(partition_id).region
        except PartitionNotFound:  # which is a problem that was found before
            return None


def _size(objects: ObjectStore, name: str) -> int | None:
    try:
        return objects.size(name)
    except (ObjectNotFound, InvalidName):
        return None


def _twice(look: Callable[[], list[Problem]]) -> list[Problem]:
    """What is found, and found again: what changed meanwhile is no problem."""
    first = look()
    if not first:
        return []
    known = {(one.kind, one.partition_id, one.filename) for one in first}
    return [one for one in look() if (one.kind, one.partition_id, one.filename) in known]
