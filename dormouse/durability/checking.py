"""Checks of the database and the object store: tables, files of cells, payloads, and all other objects.

A check only reads, in bounded memory, while other processes change the instance. So a difference that it
finds is only suspected at first. It is a problem if it still exists when the check looks again.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from io import BytesIO
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from dormouse.durability.incarnations import last_adopted
from dormouse.durability.ledgers import Ledgers, is_quarantined, is_there
from dormouse.durability.maintaining import InstanceRounds
from dormouse.errors import (
    CheckFailed,
    DormouseError,
    InvalidName,
    ObjectNotFound,
    PartitionNotFound,
    TableNotFound,
)
from dormouse.model.file_reference import is_inlined
from dormouse.model.loops import Progress, no_progress
from dormouse.model.region import Region
from dormouse.model.table import Problem, TableRecord, stored_schema
from dormouse.model.text import narrow_bytes
from dormouse.model.types import is_text
from dormouse.objects.fault import Fault, WrittenObject, compared, digest_of, digest_of_object
from dormouse.objects.inlined import inlining
from dormouse.objects.ledger import Ledger, faults
from dormouse.objects.names import ANSWERS, SKETCHES_SUFFIX
from dormouse.objects.store import ObjectStore
from dormouse.postgres.lease import ClockJump
from dormouse.state.files.checks import PAGE_FILES, TrackedFile
from dormouse.state.files.store import FileReferenceStore
from dormouse.state.partitions import PartitionStore
from dormouse.state.trees import tree_problems

if TYPE_CHECKING:
    from dormouse.data.file_checks import FileReader

PROBLEMS_OF_ONE_MAX = 1_000
"""The most problems that a check reports for one ledger, such as the ledger of payload objects."""
RUN_OBJECTS = 100_000
"""The most object names that are sorted in memory. More names are sorted on disk."""
PROBLEMS_MAX = 10_000
"""The number of problems at which a check ends."""
UNKNOWN_MAX = 1_000
"""The most unknown objects that a check reports, and the most quarantined objects that it counts."""
SUSPECTS_MAX = 1_000


def _problem(fault: Fault, table: str | None, name: str, partition_id: str | None = None) -> Problem:
    return Problem(fault.kind, table, partition_id, name, f"it {fault}")


def by_file(objects: Iterable[tuple[str, int]]) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yields (file id, (name, size in bytes)) for each object, sorted by file id, in bounded memory.

    The database returns files in the same order. File ids are hexadecimal. A sketch has the id of its file.
    """
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


def _listed(line: str) -> tuple[str, tuple[str, int]]:
    file_id, size, name = line.split(" ", 2)
    return file_id, (json.loads(name), int(size))


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of a check.

    - `tables`, `files`, `bytes`: the numbers that were checked. With `deep`, the bytes were also read.
    - `problems`: the problems that were found. A check ends at about 10,000. At most 1,000 unknown objects
      come last.
    - `quarantined`: the number of objects that another timeline may own, counted up to about 1,000. They are
      not problems. They are kept in case that timeline is restored.
    - `clock_jumps`: the jumps of the database's clock in the last week. They are not problems, because
      Dormouse has corrected their effects.
    """

    tables: int
    files: int
    bytes: int
    seconds: float
    problems: tuple[Problem, ...]
    quarantined: int = 0
    clock_jumps: tuple[ClockJump, ...] = ()


@dataclass
class _Done:
    """The counts and problems of a check so far.

    `quarantined` counts objects that another timeline may own.
    """

    ledgers: Ledgers
    adopted: int
    tables: int = 0
    files: int = 0
    bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    unknown: list[Problem] = field(default_factory=list)
    quarantined: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        return len(self.problems) >= PROBLEMS_MAX

    @property
    def has_enough_unknown(self) -> bool:
        return len(self.unknown) >= UNKNOWN_MAX

    def look(self, table: str | None, names: Sequence[str]) -> None:
        """Checks suspected objects again.

        Records those that the database does not know and that still exist.
        """
        is_enough = {True: self.quarantined >= UNKNOWN_MAX, False: self.has_enough_unknown}
        suspects = [name for name in names if not is_enough[is_quarantined(name, self.adopted)]]
        for name in self.ledgers.unknown(suspects) if suspects else ():
            if not is_there(self.ledgers.objects, name):
                continue
            if is_quarantined(name, self.adopted):
                self.quarantined += 1
            elif not name.startswith(f"{ANSWERS}/"):  # data sent for no job is deleted when jobs expire
                detail = "the database does not know it: see dormouse orphans"
                self.unknown.append(Problem("object_unknown", table, None, name, detail))

    def report(self) -> CheckReport:
        seconds = time.monotonic() - self.began
        problems = (*self.problems, *self.unknown[:UNKNOWN_MAX])
        return CheckReport(self.tables, self.files, self.bytes, seconds, problems, self.quarantined)


class Checker:
    """A checker of tables of one instance. It calls `progress` with the number of checked files.

    Unknown objects that were written under an incarnation before `adopted` count as quarantined. With `deep`,
    the checker reads all files. With `deep` and `notes`, it also records digests for files that have none, if
    it finds no problem in them.
    """

    def __init__(
        self,
        ledgers: Ledgers,
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
        self._objects, self._ledgers = ledgers.objects, ledgers
        self._progress = progress or no_progress
        self._done = _Done(ledgers, adopted)

    def run(
        self,
        tables: Sequence[TableRecord],
        *,
        rest: bool = False,
        finished: Callable[[str], object] = lambda table: None,
    ) -> CheckReport:
        """Checks the tables and returns the result. With `rest`, also checks objects that belong to no table.

        Calls `finished` with the name of each checked table. May be called only once.
        """
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
        """Checks the objects that belong to no table, and returns the result.

        These are the objects whose names begin with no prefix of `tables`, which must be all tables.
        """
        if not self._done.is_over:
            self._look_at(self._ledgers.of_instance)
            self._unknown(tables)
        return self._done.report()

    def _table(self, table: TableRecord) -> None:
        supplier, checks = self._ledgers.supplier, self._ledgers.files(table)
        self._done.problems += _twice(lambda: [*tree_problems(supplier, table), *checks.problems()])
        _TableObjects(self._ledgers, table, self._done, self._apart, self._notes).check(self._progress)
        self._look_at(self._ledgers.of_table(table))

    def _look_at(self, ledgers: Sequence[Ledger]) -> None:
        for ledger in ledgers:
            for written, fault in faults(self._objects, ledger, PROBLEMS_OF_ONE_MAX, deep=self._deep):
                self._done.problems.append(_problem(fault, written.table, written.name))

    def _unknown(self, tables: Sequence[TableRecord]) -> None:
        owned = tuple(prefix for table in tables for prefix in table.object_prefixes)
        others = (
            name
            for name, _ in self._objects.list()
            if not name.startswith(owned) and not Ledgers.is_record(name)
        )
        while (names := list(islice(others, SUSPECTS_MAX))) and not self._done.is_over:
            self._done.look(None, names)
            if self._done.has_enough_unknown:
                return


class _TableObjects:
    """A comparison of one table's objects with the files that the database knows.

    With `apart`, it reads the files.
    """

    def __init__(
        self, ledgers: Ledgers, table: TableRecord, done: _Done, apart: FileReader | None, notes: bool
    ) -> None:
        self._inlined = FileReferenceStore(ledgers.supplier, table).inlined
        self._objects = inlining(ledgers.objects, self._inlined.read)
        self._table = table
        self._checks = ledgers.files(table)
        self._done = done
        self._apart = apart
        self._notes = notes
        self._stored = stored_schema(table.schema, table.properties)
        self._partitions = PartitionStore(ledgers.supplier, table)
        self._without: list[TrackedFile] = []
        self._doubtful: list[tuple[TrackedFile | None, str]] = []

    def check(self, progress: Progress) -> None:
        listed: Iterator[tuple[str, Any]] = by_file(self._possible(self._listed()))
        deep = self._apart is not None
        files = ((file.file_id.hex, file) for file in self._checks.files(with_references=deep))
        by_id = heapq.merge(files, listed, key=itemgetter(0))
        for _, of_id in groupby(by_id, itemgetter(0)):
            of_file = [each for _, each in of_id]
            sizes = dict(each for each in of_file if not isinstance(each, TrackedFile))
            if isinstance(of_file[0], TrackedFile):
                self._file(of_file[0], sizes)
                if deep or not self._done.files % PAGE_FILES:
                    progress(self._done.files, None)
            else:
                for name in sizes:
                    self._doubt(None, name)
            if self._done.is_over:
                return
        progress(self._done.files, None)
        self._confirm()
        self._note_digests()
        if deep:
            self._check_listed_rows()

    def _check_listed_rows(self) -> None:
        """Compares the rows that deletions list with their digests. Those that are lost were found before."""
        from dormouse.reading.row_sets import is_named

        for name in self._checks.listed():
            for content in self._inlined.read([name]).values():
                if not is_named(content, name):
                    detail = "the rows that a deletion lists differ from those that were deleted"
                    self._done.problems.append(Problem("object_digest", self._table.name, None, name, detail))

    def _listed(self) -> Iterator[tuple[str, int]]:
        return chain.from_iterable(map(self._objects.list, self._table.object_prefixes))

    def _possible(self, listed: Iterator[tuple[str, int]]) -> Iterator[tuple[str, int]]:
        for name, size in listed:
            if is_text(name):
                yield name, size
            else:
                self._doubt(None, name)

    def _file(self, file: TrackedFile, sizes: dict[str, int]) -> None:
        if is_inlined(file.name):
            size = file.byte_count  # the checks of the database compared it
        elif not file.name.startswith(self._table.object_prefixes):
            # the caller chose the name, and its folder may have other objects, so it is not listed
            size = _size(self._objects, file.name)
        else:
            size = sizes.get(file.name)
            if size is not None and file.name + SKETCHES_SUFFIX not in sizes:
                self._doubt(file, file.name + SKETCHES_SUFFIX)
        if size is None or size != file.byte_count is not None:
            self._doubt(file, file.name)
        if self._apart is not None and size is not None and file.references:
            self._read(self._apart, file)
        self._done.files += 1
        self._done.bytes += size or 0

    def _read(self, apart: FileReader, file: TrackedFile) -> None:
        try:
            problems = self._problems_of(file, apart)
        except ObjectNotFound:
            self._doubt(file, file.name)
            return
        if problems and self._checks.referenced([file.file_id]):
            self._done.problems += problems
        if not problems and file.digest is None and self._notes:
            self._without.append(file)
            if len(self._without) >= SUSPECTS_MAX:
                self._note_digests()

    def _note_digests(self) -> None:
        """Computes and records digests for files that have none and in which the check found no problem."""
        if not self._without:
            return
        digests = {}
        for file in self._without:
            with suppress(ObjectNotFound):  # collected since
                digests[file.file_id] = digest_of_object(self._objects, file.name)[1]
        if digests:
            self._checks.note_digests(digests)
        self._without = []

    def _doubt(self, file: TrackedFile | None, name: str) -> None:
        """Adds a suspected object to a list. `_confirm` checks the objects of this list again.

        `file` is the file to which the object belongs, or None if the database knows no such file.
        """
        self._doubtful.append((file, name))
        if len(self._doubtful) >= SUSPECTS_MAX:
            self._confirm()

    def _confirm(self) -> None:
        doubtful, self._doubtful = self._doubtful, []
        self._done.look(self._table.name, [name for file, name in doubtful if file is None])
        of_files = [(file, name, _size(self._objects, name)) for file, name in doubtful if file is not None]
        # a file loses its references long before its object is collected
        referenced = self._checks.referenced([file.file_id for file, *_ in of_files])
        for file, name, seen in of_files:
            if file.file_id in referenced:
                tracked = referenced[file.file_id] if name == file.name else None
                size = _size(self._objects, name) if seen is None else seen
                if fault := compared(WrittenObject(name, tracked), size):
                    self._done.problems.append(_problem(fault, self._table.name, name))

    def _problems_of(self, file: TrackedFile, apart: FileReader) -> list[Problem]:
        """Reads a file and returns its problems. If its digest differs, returns only this problem."""
        from dormouse.data.file_checks import Recorded, file_problems

        name = file.name
        if file.digest is not None:
            digest = self._digest(name)
            if fault := compared(WrittenObject(name, None, file.digest), *digest):
                return [_problem(fault, self._table.name, name, file.partition_id)]
        recorded = Recorded(file.row_count, file.min_key, file.max_key, self._region(file.partition_id))
        read = apart.problems if file.digest is None else file_problems
        table, partition_id = self._table.name, file.partition_id
        problems = read(self._objects, name, self._stored, recorded)
        return [Problem(kind, table, partition_id, name, detail) for kind, detail in problems]

    def _digest(self, name: str) -> tuple[int, bytes]:
        """Returns the size and digest of a file; those of an inlined file are of what the database has."""
        if not is_inlined(name) or not (found := self._inlined.read([name])):
            return digest_of_object(self._objects, name)
        return len(found[name]), digest_of(BytesIO(found[name]))

    def _region(self, partition_id: str | None) -> Region | None:
        try:
            return None if partition_id is None else self._partitions.partition(partition_id).region
        except PartitionNotFound:  # this problem was reported before
            return None


def _size(objects: ObjectStore, name: str) -> int | None:
    try:
        return objects.size(name)
    except (ObjectNotFound, InvalidName):
        return None


def _twice(look: Callable[[], list[Problem]]) -> list[Problem]:
    """Checks twice, and returns the problems that were found both times.

    A concurrent change looks like a problem only once.
    """
    first = look()
    if not first:
        return []
    known = {(each.kind, each.partition_id, each.filename) for each in first}
    return [each for each in look() if (each.kind, each.partition_id, each.filename) in known]


# The daily checks divide tables into seven shares. With few tables all shares are checked each day, otherwise
# one share a day, so each table once a week. Each share is a round of its own, whose error is reported until
# the share is checked without a problem.

KIND = "check"
"""The text with which the kinds of the rounds of checks begin, such as "check 3".

Earlier releases checked all tables in one round of the kind "check".
"""

REST = f"{KIND} rest"
SHARES = 7
SECONDS_MIN = 60.0
"""The seconds that must be left before a time limit, so that the check of another table begins."""


def checks(
    ledgers: Ledgers, seconds_left: Callable[[], float] = lambda: math.inf
) -> Mapping[str, Callable[[], None]]:
    """Returns the due checks as functions, by the kinds of their rounds.

    The checks of today's share of tables are due, and the checks whose last round failed. Their order is
    random, so that a time limit does not leave out the same checks each day.
    """
    rounds, tables = InstanceRounds(ledgers.supplier), ledgers.catalog.tables()
    shares: dict[str, list[TableRecord]] = {f"{KIND} {number}": [] for number in range(SHARES)}
    kinds = [*shares]
    for table in tables:
        shares[kinds[int(table.uuid, 16) % SHARES]].append(table)
    rounds.divide(KIND, [*kinds, REST])
    today = datetime.now(UTC).toordinal() % SHARES
    due = [each.kind for each in rounds.read() if each.error is not None and each.kind in {*kinds, REST}]
    due += [kind for kind in (kinds if len(tables) <= SHARES else [kinds[today]]) if shares[kind]]
    due += [REST] if today == 0 else []

    def check(kind: str) -> None:
        checker = Checker(ledgers, adopted=last_adopted(ledgers.supplier))
        if kind == REST:
            _check_rest(checker, tables, seconds_left)
        else:
            _check_tables(checker, shares[kind], seconds_left)

    return {kind: partial(check, kind) for kind in random.sample(due, len(due))}


def _check_tables(checker: Checker, tables: Sequence[TableRecord], seconds_left: Callable[[], float]) -> None:
    """Checks tables without reading their files.

    Their order is random, so that a time limit does not leave out the same tables each day. Raises
    `CheckFailed` for problems, and `DormouseError` if the time limit was reached.
    """
    done, problems = 0, tuple[Problem, ...]()
    for table in random.sample(tables, len(tables)):
        if seconds_left() <= SECONDS_MIN:
            break
        problems = checker.run([table]).problems
        done += 1
    if problems:
        raise CheckFailed(problems)
    if done < len(tables):
        raise DormouseError(f"time limit reached: {done:,} of {len(tables):,} tables checked")


def _check_rest(checker: Checker, tables: Sequence[TableRecord], seconds_left: Callable[[], float]) -> None:
    if seconds_left() <= SECONDS_MIN:
        raise DormouseError("time limit reached: the objects of no table were not checked")
    if problems := checker.rest(tables).problems:
        raise CheckFailed(problems)
