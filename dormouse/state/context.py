"""Everything that works on one table, wired together; and its address, for other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from dormouse.model.cut import Cut, Position, Remembered
from dormouse.model.schema import Schema
from dormouse.model.table import TableProperties, TableRecord, current_schema, is_edited, stored_schema
from dormouse.objects.store import ObjectStore, open_store
from dormouse.postgres.connection import ConnectionSupplier, Supplier
from dormouse.state.files.attempts import WriteAttempt, WriteAttempts
from dormouse.state.files.compaction_jobs import CompactionJobs
from dormouse.state.files.deletions import Deletions
from dormouse.state.files.garbage import GarbageCollector
from dormouse.state.files.round_reports import LastRounds, RoundReports
from dormouse.state.files.shapes import Shapes
from dormouse.state.files.store import FileReferenceStore
from dormouse.state.partitions import PartitionStore
from dormouse.state.trees import TreeCache

if TYPE_CHECKING:
    from dormouse.state.files.attempts import Numbering

TASK_CONNECTIONS_MAX = 2


@dataclass(frozen=True)
class TableAddress:
    """How another process, such as a Spark task, opens the same table. Has credentials: never log it.

    That process has no commit queue, and commits synchronously, whatever the table's property says.
    """

    dsn: str = field(repr=False)
    objects_url: str
    objects_options: dict[str, str] = field(repr=False)
    table: TableRecord
    current_rows: bool = False

    @contextmanager
    def open(self) -> Iterator[TableContext]:
        """The table's services, over connections that are closed at the end."""
        supplier = ConnectionSupplier(self.dsn, connections_max=TASK_CONNECTIONS_MAX)
        try:
            objects = open_store(self.objects_url, **self.objects_options)
            yield TableContext(self.dsn, supplier, objects, self.table, current_rows=self.current_rows)
        finally:
            supplier.close()


CUTS_REMEMBERED_MAX = 64


class JobCommits(Protocol):
    """A commit queue, for jobs that wait until their commit is visible.

    True when it is applied, and the attempt ended; False when another commit with the id was applied before.
    Raises `InvalidCommitRequest` when nothing was sent, since it is too large for the queue or adds nothing;
    `CommitRejected`, `AttemptAbandoned` and other `CommitFailed` when nothing is applied, nor will be; and
    `CommitOutcomeUnknown` only when the database does not answer any more.
    """

    def commit(self, request: Any, attempt: WriteAttempt) -> bool:
        """Applies a commit request that names the attempt, and ends it."""
        ...


@dataclass(frozen=True)
class TableContext:
    """The services of one table; `commits` where a committer is known to run; `trees` may be shared.

    `reports` where ingests are told of; `numbering` where a load gives its rows running numbers.
    """

    dsn: str = field(repr=False)
    supplier: Supplier
    objects: ObjectStore
    table: TableRecord
    commits: JobCommits | None = field(default=None, repr=False, compare=False)
    trees: TreeCache = field(default_factory=TreeCache, repr=False, compare=False)
    reports: RoundReports | None = field(default=None, repr=False, compare=False)
    numbering: Numbering | None = field(default=None, repr=False, compare=False)
    current_rows: bool = False
    """Whether a row table is read as its current rows, and not as every version of them."""
    verify: bool = False
    """Whether this reader was asked to compare digests, whatever the table's property is."""

    @cached_property
    def schema(self) -> Schema:
        return current_schema(self.table.schema) if self.current_rows else self.table.schema

    @cached_property
    def stored_schema(self) -> Schema:
        """The columns of the table's files."""
        return stored_schema(self.table.schema, self.properties)

    def schema_id(self, schema: Schema) -> str:
        """Returns an id for columns that the table has or had, which changes with them."""
        return f"{self.table.uuid}.{schema.version}"

    @property
    def shown(self) -> TableContext:
        """The services for readers of the table by its name, which have the current rows of a row table."""
        return replace(self, current_rows=True) if is_edited(self.properties) else self

    @property
    def every_version(self) -> TableContext:
        """The services that read all rows of the files."""
        return replace(self, current_rows=False)

    def verifying(self, verify: bool) -> TableContext:
        """Returns the services for a reader that compares digests if `verify`, or else as the table says."""
        return replace(self, verify=True) if verify else self

    @property
    def verifies(self) -> bool:
        """Returns whether the digest of each file is compared, at its first read of the process."""
        return self.verify or self.properties.verify_reads

    @property
    def properties(self) -> TableProperties:
        return self.table.properties

    @property
    def async_commits(self) -> JobCommits | None:
        """The queue that jobs commit through; None: each commits in a transaction of its own."""
        return self.commits if self.properties.commit == "async" else None

    @property
    def address(self) -> TableAddress:
        return TableAddress(self.dsn, self.objects.url, self.objects.options, self.table, self.current_rows)

    @cached_property
    def shapes(self) -> Shapes:
        return Shapes(self.supplier, self.table)

    def as_of(self, position: Position) -> TableContext:
        """The services of the table with the columns that it had then."""
        return self._having(self.shapes.at(position.snapshot).table)

    def at_cut(self, cut: Cut, find: Callable[[], Position]) -> tuple[TableContext, Position]:
        """As `as_of`, and where the cut is. Both are remembered; whoever plans asks whether they hold."""
        known: dict[Cut, tuple[TableContext, Position]] = self.__dict__.setdefault("_cuts", {})
        if cut not in known:
            position = find()
            then = self.shapes.at(position.snapshot)
            remembered = Remembered(cut.cut_id, then.version, then.properties)
            if len(known) >= CUTS_REMEMBERED_MAX:
                known.clear()
            known[cut] = self._having(then.table), replace(position, remembered=remembered)
        return known[cut]

    def forget_cuts(self) -> None:
        """What is remembered of cuts holds no more."""
        self.__dict__.pop("_cuts", None)

    def _having(self, then: TableRecord) -> TableContext:
        same = then.schema.version == self.schema.version and then.properties == self.properties
        return self if same else replace(self, table=then)

    def followed(self) -> TableContext:
        """The services of the table as it is now: its name, columns, properties; the same when it is gone."""
        now = self.shapes.now()
        if now is None or (now == self.table and now.schema.version == self.schema.version):
            return self
        newer = replace(self, table=now)
        self.__dict__["_newer"] = newer
        return newer

    @property
    def newest_known(self) -> TableContext:
        """Those of the table as it was when it was asked for last."""
        newest = self
        while (newer := newest.__dict__.get("_newer")) is not None:
            newest = newer
        return newest

    @contextmanager
    def writing(
        self, *, loads: bool = False, leftovers: bool = False
    ) -> Iterator[tuple[TableContext, WriteAttempt]]:
        """A write attempt, as of `WriteAttempts`, and the services for the columns by which it writes."""
        with self.attempts.attempt(self.table, loads=loads, leftovers=leftovers) as attempt:
            yield self.writing_for(attempt)

    def writing_for(self, attempt: WriteAttempt) -> tuple[TableContext, WriteAttempt]:
        """The services for the columns by which an attempt writes that has just begun, and the attempt so."""
        if attempt.schema_version == self.schema.version:
            return self, attempt
        context = self.followed()
        return context, replace(attempt, schema_version=context.schema.version)

    @cached_property
    def store(self) -> FileReferenceStore:
        return FileReferenceStore(self.supplier, self.table)

    @cached_property
    def deletions(self) -> Deletions:
        return Deletions(self.store)

    @cached_property
    def partitions(self) -> PartitionStore:
        return PartitionStore(self.supplier, self.table, self.trees)

    @cached_property
    def attempts(self) -> WriteAttempts:
        return WriteAttempts(self.supplier, self.objects)

    @cached_property
    def jobs(self) -> CompactionJobs:
        return CompactionJobs(self.supplier, self.table, self.store)

    @cached_property
    def last_rounds(self) -> LastRounds:
        return LastRounds(self.supplier, self.table)

    @cached_property
    def garbage(self) -> GarbageCollector:
        return GarbageCollector(self.supplier, self.store, self.objects, self.attempts)
