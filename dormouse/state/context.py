"""The services of one table in one object, and the address by which another process opens them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, cast

from dormouse.model.cut import Cut, Position, Remembered
from dormouse.model.schema import Schema
from dormouse.model.table import (
    TableProperties,
    TableRecord,
    current_schema,
    is_edited,
    is_keyed,
    placed_schema,
    stored_schema,
)
from dormouse.objects.inlined import InlinedFiles, inlining
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
    """The address by which another process, such as a Spark task, opens a table.

    It contains credentials: never log it. The other process has no commit queue. It commits synchronously,
    even when the table's property `commit` is "async".
    """

    dsn: str = field(repr=False)
    objects_url: str
    objects_options: dict[str, str] = field(repr=False)
    table: TableRecord
    current_rows: bool = False

    @contextmanager
    def open(self) -> Iterator[TableContext]:
        """Yields the table's services, and closes their connections at the end."""
        supplier = ConnectionSupplier(self.dsn, connections_max=TASK_CONNECTIONS_MAX)
        try:
            objects = open_store(self.objects_url, **self.objects_options)
            yield TableContext(self.dsn, supplier, objects, self.table, current_rows=self.current_rows)
        finally:
            supplier.close()


CUTS_REMEMBERED_MAX = 64


class JobCommits(Protocol):
    """A way for jobs to commit through the queue, and to wait until their commit is visible."""

    def commit(self, request: Any, attempt: WriteAttempt) -> bool:
        """Sends a commit request that contains the attempt's id, and waits until it is applied.

        Returns True when it was applied, which ends the attempt. Returns False when another commit with the
        same id was applied before. Raises:

        - `InvalidCommitRequest` when nothing was sent, because the request is too large or adds nothing;
        - `EditConflict` or `SchemaMoved` when an edit must be computed again. The attempt stays open.
        - `CommitRejected`, `AttemptAbandoned` or another `CommitFailed` when nothing was or will be applied;
        - `CommitOutcomeUnknown` only when the database no longer answers.
        """
        ...


@dataclass(frozen=True)
class TableContext:
    """The services of one table.

    - `commits` is set where a committer is known to run.
    - `trees` may be shared with other tables.
    - `reports` is set where ingests are reported.
    - `numbering` is set while a load numbers the rows of the table.
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
    """True if readers of a row table see its current rows, not every version of them."""
    with_places: bool = False
    """True if this reader of a keyed table sees the places of rows, in the column `SEQUENCE`."""
    verify: bool = False
    """True if this reader compares digests even when the table's property `verify_reads` is off."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "objects", inlining(self.objects, self._contents))

    @property
    def inlined(self) -> InlinedFiles:
        """The same as `objects`: the inlined files of the table are files in it."""
        return cast("InlinedFiles", self.objects)

    def _contents(self, filenames: Sequence[str]) -> dict[str, bytes]:
        return self.store.inlined.read(filenames)

    @cached_property
    def schema(self) -> Schema:
        if self.with_places and is_keyed(self.properties):
            return placed_schema(self.table.schema)
        return current_schema(self.table.schema) if self.current_rows else self.table.schema

    @cached_property
    def placed(self) -> TableContext:
        """The services that also read the places of the rows of a keyed table, for edits."""
        return replace(self, with_places=True) if is_keyed(self.properties) else self

    @cached_property
    def stored_schema(self) -> Schema:
        """The columns of the table's files."""
        return stored_schema(self.table.schema, self.properties)

    def schema_id(self, schema: Schema) -> str:
        """Returns an id of one version of the table's columns, present or past."""
        return f"{self.table.uuid}.{schema.version}"

    @property
    def shown(self) -> TableContext:
        """The services for queries that name the table. For a row table, they read its current rows."""
        return replace(self, current_rows=True) if is_edited(self.properties) else self

    @property
    def every_version(self) -> TableContext:
        """The services that read all rows of the files, and so every version of a row table's rows."""
        return replace(self, current_rows=False)

    def verifying(self, verify: bool) -> TableContext:
        """Returns services that compare the digests of files if `verify` is True; else the same services."""
        return replace(self, verify=True) if verify else self

    @property
    def verifies(self) -> bool:
        """True if this process compares the digest of each file when it first reads the file."""
        return self.verify or self.properties.verify_reads

    @property
    def properties(self) -> TableProperties:
        return self.table.properties

    @property
    def async_commits(self) -> JobCommits | None:
        """The queue through which jobs commit, or None if each job commits in a transaction of its own."""
        return self.commits if self.properties.commit == "async" else None

    @property
    def address(self) -> TableAddress:
        return TableAddress(self.dsn, self.objects.url, self.objects.options, self.table, self.current_rows)

    @cached_property
    def shapes(self) -> Shapes:
        return Shapes(self.supplier, self.table)

    def as_of(self, position: Position) -> TableContext:
        """Returns the services of the table with the columns that it had at `position` in its history."""
        return self._having(self.shapes.at(position.snapshot).table)

    def at_cut(self, cut: Cut, find: Callable[[], Position]) -> tuple[TableContext, Position]:
        """Returns the services of the table with the columns that it had at a cut, and the cut's position.

        `find` looks up the position. Both results are cached. The planner checks that they are still valid.
        """
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
        """Clears the cache of cuts."""
        self.__dict__.pop("_cuts", None)

    def _having(self, then: TableRecord) -> TableContext:
        same = then.schema.version == self.schema.version and then.properties == self.properties
        return self if same else replace(self, table=then)

    def followed(self) -> TableContext:
        """Returns services with the table's current name, columns and properties.

        Returns `self` when nothing has changed or the table was dropped.
        """
        now = self.shapes.now()
        if now is None or (now == self.table and now.schema.version == self.schema.version):
            return self
        newer = replace(self, table=now)
        self.__dict__["_newer"] = newer
        return newer

    @property
    def newest_known(self) -> TableContext:
        """The services for the newest version of the table that this process has seen.

        A version has its own name, columns and properties.
        """
        newest = self
        while (newer := newest.__dict__.get("_newer")) is not None:
            newest = newer
        return newest

    @contextmanager
    def writing(
        self, *, loads: bool = False, leftovers: bool = False, durable: bool = True
    ) -> Iterator[tuple[TableContext, WriteAttempt]]:
        """Yields the services with the columns that a writer uses, and its write attempt.

        `loads`, `leftovers` and `durable` are passed to `WriteAttempts.attempt`.
        """
        with self.attempts.attempt(self.table, loads=loads, leftovers=leftovers, durable=durable) as attempt:
            yield self.writing_for(attempt)

    def writing_for(self, attempt: WriteAttempt) -> tuple[TableContext, WriteAttempt]:
        """Returns the services with the columns that a new attempt writes, and the attempt.

        If the columns have changed since these services were made, both returned objects have the current
        columns.
        """
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
