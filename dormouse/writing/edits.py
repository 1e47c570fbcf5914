"""Edits: changes of rows that read before they write, committed together, once, and without a lost update.

Each change computes new files and deletions from what a table had at one moment. One transaction then checks
that no commit since that moment changed rows that concern the change, records the deletions and adds the
files. If a commit did, the change is computed again.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dormouse.errors import (
    CommitOutcomeUnknown,
    DormouseError,
    EditConflict,
    InvalidCommitRequest,
    InvalidInput,
    QueryOvertaken,
)
from dormouse.model.cut import Position
from dormouse.model.edits import COMPUTED_MAX
from dormouse.model.file_reference import FileWithReferences, is_inlined
from dormouse.model.loops import backoff_seconds, portions, tries
from dormouse.model.region import KeyRanges, Range, united
from dormouse.model.schema import SchemaMoved
from dormouse.model.table import DELETED_AT, check_not_edited, is_keyed
from dormouse.model.text import check_text
from dormouse.postgres.connection import ConnectionSupplier
from dormouse.reading.changes import CHANGE, DELETE, INSERT, Near, changes
from dormouse.reading.checked_files import on_current
from dormouse.reading.keyed_changes import UPSERT
from dormouse.reading.where import SCHEMAS_CHASED_MAX
from dormouse.state.commits.edit_requests import edit_of
from dormouse.state.commits.requests import EditTables
from dormouse.state.context import JobCommits, TableContext
from dormouse.state.files.attempts import WriteAttempt
from dormouse.state.files.deletions import NewDeletion
from dormouse.state.files.edits import (
    Disturbance,
    Disturbed,
    Part,
    Read,
    commit,
    disturbances,
    is_committed_at_once,
)
from dormouse.state.history.moments import now
from dormouse.writing.edit_spans import meet, span_of, spans_of
from dormouse.writing.inlining import ASK_ATTEMPTS_MAX, ASK_WAIT_SECONDS_MAX

if TYPE_CHECKING:
    import psycopg

    from dormouse.postgres.connection import Supplier
    from dormouse.reading.table_view import Foreseen

EDIT_ID_BYTES_MAX = 200
OVERTAKEN_MAX = 10
_ID_NAMES = {"edit": "edit_id", "transaction": "transaction_id"}
"""The names of the parameters with ids of kinds of edits; others are loads."""
LOOKS_FREE = 3
"""How often the rows of other commits are looked at while further commits go on; later looks hold them up."""
CHANGED_ROWS = 1_000_000
"""The most changed rows that are compared with an edit at once."""
Changed = Iterator[pa.RecordBatch]
"""Rows that commits added or removed meanwhile, as `reading.changes.changes` returns them."""


@dataclass(frozen=True, slots=True)
class Concern:
    """The rows that a change depends on.

    All have keys in `ranges`. `of` returns whether one of some changed rows concerns the change. It gets the
    rows of files whose keys may lie in the ranges, with the column `_change`, and may stop reading them.
    `of_order` is true for a change that read nothing: only its order among other changes depends on the rows.
    It then counts only beside other changes of the same edit, so that all of them come before or after
    another commit.
    """

    ranges: KeyRanges
    of: Callable[[TableContext, Changed], bool]
    of_order: bool = False

    def __or__(self, other: Concern) -> Concern:
        """Returns the concern of two changes of a table that are one."""

        def of(context: TableContext, changed: Changed) -> bool:
            parts = portions(changed, attrgetter("num_rows"), CHANGED_ROWS)
            return any(one.of(context, iter(some)) for some in parts for one in (self, other))

        return Concern(united([self.ranges, other.ranges]), of)


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of a change at one moment: files and deletions that are not committed yet.

    The deletions do not apply to the rows of the files. `concern` is None for a change that read nothing.
    `counts` are the numbers of changed rows, by kind: "inserted", "updated" and "deleted".
    """

    files: Sequence[FileWithReferences] = ()
    deletions: Sequence[NewDeletion] = ()
    concern: Concern | None = None
    counts: Mapping[str, int] = field(default_factory=dict)


class Change(Protocol):
    """A change of one table, which can be computed again."""

    @property
    def reads_its_keys(self) -> bool:
        """True if the concern of its result contains the keys of all rows that it writes."""
        ...

    def compute(self, context: TableContext, attempt: WriteAttempt, at: Position) -> Computed:
        """Computes the change from the rows of the moment `at`, or from later ones, all of one moment.

        Writes the files of the attempt, and commits nothing. The context has the table's present columns. The
        attempt is not durable: confirm it before the first object is written.
        """
        ...


@dataclass(frozen=True, slots=True)
class Begun:
    """A computation of a change that was begun before it had an attempt, and perhaps its first query."""

    computation: Any
    query: Foreseen | None


class BegunChange(Protocol):
    """A change that may know what it reads before it has an attempt. This saves a round trip."""

    def begun(self, context: TableContext) -> Begun | None: ...

    def compute(
        self, context: TableContext, attempt: WriteAttempt, at: Position, begun: Begun | None = None
    ) -> Computed: ...


class CountedChange(Change, Protocol):
    """A change whose rows can be counted without changing any."""

    def dry_run(self, context: TableContext) -> Mapping[str, int]:
        """Returns the numbers of rows that the change would change, by kind."""
        ...


@dataclass(frozen=True, slots=True)
class Done:
    """The result of an edit: the numbers of changed rows by kind, and how often they were computed.

    `counts` is empty if an edit with this id was applied before. After a dry run there is no id.
    """

    edit_id: str | None
    counts: Mapping[str, int]
    attempts: int
    applied: bool


def edited_alone(
    context: TableContext, change: Change, edit_id: str | None, attempts_max: int, kind: str = "edit"
) -> Done:
    """Applies a change of one table, once for each id. Raises the errors of `Edit.add` and `Edit.commit`."""
    with Edit(context.supplier, edit_id, kind, attempts_max) as edit:
        applied = edit.run(context, change)
        return Done(edit.edit_id, edit.counts if applied else {}, edit.attempts, applied)


def counted(context: TableContext, change: CountedChange) -> Done:
    """Returns the numbers of rows that a change would change, and changes nothing."""
    check_may_edit(context)
    return Done(None, on_current(context, change.dry_run), 0, applied=False)


def check_may_edit(context: TableContext) -> None:
    """Raises `NotARowTable` for a row table."""
    how = "use row_table(…).change or 'dormouse rows change'"
    check_not_edited(context.table.name, context.properties, how)


@dataclass(slots=True)
class _Planned:
    """A change, and its last result, which is valid until another commit changes the rows that it read."""

    change: Change
    context: TableContext
    attempt: WriteAttempt
    at: Position
    computed: Computed
    checked: Read | None = None
    """The rows that its last commit checked."""

    @property
    def is_recorded(self) -> bool:
        """True if the attempt is recorded: it was begun, or has written objects."""
        has_objects = not all(is_inlined(file.filename) for file in self.computed.files)
        return self.attempt.last_deletion is None or has_objects

    def read(self, concern: Concern | None) -> Read | None:
        if concern is None:
            return None
        spans, are_keys = spans_of(self.context.schema, concern.ranges)
        return Read(self.at.snapshot, spans, are_keys)

    @property
    def reads(self) -> Concern | None:
        """The concern for the rows that the change read."""
        concern = self.computed.concern
        return None if concern is None or concern.of_order else concern


class Edit:
    """Changes of one or more tables that are committed together, once for each id. One thread uses it.

    Use it as a context manager: changes that are not committed at the end of the block leave nothing. With
    `leftovers`, each change confirms its attempt, and other processes may still write objects of it; see
    `WriteAttempts.finish`.
    """

    def __init__(
        self,
        supplier: Supplier,
        edit_id: str | None,
        kind: str = "edit",
        attempts_max: int = COMPUTED_MAX,
        *,
        leftovers: bool = False,
    ) -> None:
        self._supplier = supplier
        self._leftovers = leftovers
        if not isinstance(attempts_max, int) or isinstance(attempts_max, bool) or attempts_max < 1:
            raise InvalidInput(f"attempts_max must be a whole number of attempts, not {attempts_max!r}")
        self.is_new = edit_id is None
        self.edit_id = uuid.uuid4().hex if edit_id is None else edit_id
        check_text(_ID_NAMES.get(kind, "ingest_id"), self.edit_id, EDIT_ID_BYTES_MAX)
        self.attempts = 1
        self._commit_id = f"{kind}:{self.edit_id}"
        self._attempts_max = attempts_max
        self._planned: list[_Planned] = []
        self._works: list[Callable[[psycopg.Connection[Any]], object]] = []
        self._open: list[tuple[TableContext, WriteAttempt]] = []
        self._is_sent = False
        """True once a request was sent to the commit queue."""

    def __enter__(self) -> Edit:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None and issubclass(kind, CommitOutcomeUnknown):
            return  # the files may be live; collection decides
        for context, attempt in self._open:
            context.attempts.discard(attempt, leftovers=self._leftovers)

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of changed rows of all changes, by kind."""
        found: dict[str, int] = defaultdict(int)
        for planned in self._planned:
            for kind, count in planned.computed.counts.items():
                found[kind] += count
        return dict(found)

    @property
    def files(self) -> list[FileWithReferences]:
        """The files of all changes."""
        return [file for planned in self._planned for file in planned.computed.files]

    def is_applied(self, context: TableContext) -> bool:
        """Returns whether this edit was applied before, by what a table records."""
        return context.store.is_applied(self._commit_id)

    def run(self, context: TableContext, change: Change) -> bool:
        """Computes and commits a change; returns False if an edit with this id was applied before."""
        if not self.is_new and self.is_applied(context):
            return False
        self.add(context, change)
        return self.commit()

    def add(self, context: TableContext, change: Change, name: str | None = None) -> Computed:
        """Computes a change, which `commit` commits. Raises the errors of its `compute`, and `InvalidInput`.

        A change must not depend on rows that an earlier change of the same edit wrote. With a `name`, raises
        `TableNotFound` if it is not the table's name.
        """
        check_may_edit(context)
        planned = self._computed(context, change, name)
        for earlier in self._planned:
            _check_apart(earlier, planned)
        self._planned.append(planned)
        return planned.computed

    def add_work(self, work: Callable[[psycopg.Connection[Any]], object]) -> None:
        """Makes `commit` also do some work in its transaction, which must have no effect when repeated."""
        self._works.append(work)

    def commit(self) -> bool:
        """Commits all changes; returns False if an edit with this id was applied before.

        Computes changes again whose rows were changed meanwhile. Raises `EditConflict` after `attempts_max`
        computations, `CommitFailed`, and `CommitOutcomeUnknown` if the database no longer answers.
        """
        looks = moves = 0
        while self._planned or self._works:
            for planned in self._planned:
                if planned.reads is not None and planned.computed.counts.get("inserted"):
                    planned.context.attempts.wait_for_older(planned.attempt)
            choose = self._conflicts_under_locks if looks >= LOOKS_FREE else None
            try:
                applied = self._committed(self._parts(), choose)
            except Disturbed as disturbed:
                found = disturbed.disturbances
                conflicts = found if choose is not None else self._conflicts(found)
                looks += 1
                # a request of this edit may be among the commits that disturbed it: then it is sent again
                if conflicts and not (self._is_sent and self.is_applied(self._planned[0].context)):
                    self._compute_again(conflicts)
                    looks = 0
            except SchemaMoved:
                moves += 1
                if moves > SCHEMAS_CHASED_MAX:
                    raise
                self._compute_again([])
            else:
                if applied:
                    self._close()
                return applied
        return True

    # Parts: the changes of each table.

    def _parts(self) -> list[Part]:
        tables: dict[int, list[_Planned]] = defaultdict(list)
        for planned in self._planned:
            planned.checked = planned.read(self._concern_of(planned))
            tables[planned.context.table.table_id].append(planned)
        return [
            Part(
                some[0].context.store,
                [file.placeless for one in some for file in one.computed.files],
                [deletion for one in some for deletion in one.computed.deletions],
                [one.checked for one in some if one.checked is not None],
                [one.attempt.attempt_id for one in some if one.is_recorded or self._leftovers],
                self._leftovers,
            )
            for some in tables.values()
        ]

    def _of(self, disturbance: Disturbance) -> int:
        """Returns the number of the change whose read was disturbed."""
        return next(n for n, planned in enumerate(self._planned) if planned.checked is disturbance.read)

    def _concern_of(self, planned: _Planned) -> Concern | None:
        return planned.computed.concern if len(self._planned) > 1 else planned.reads

    def _conflicts(
        self, disturbances: Sequence[Disturbance], supplier: Supplier | None = None
    ) -> list[Disturbance]:
        """Returns the disturbances that concern their change. The reads of the others count from now on."""
        conflicts = []
        for one in disturbances:
            planned = self._planned[self._of(one)]
            context = planned.context if supplier is None else replace(planned.context, supplier=supplier)
            # not a later moment: the names are those of the files up to this one
            till = replace(one.till, at=max(one.till.at, planned.at.at))
            if _is_concerned(planned.computed.concern, context, planned.at, till, one.files):
                conflicts.append(one)
            else:
                planned.at = till
        return conflicts

    def _conflicts_under_locks(self, disturbances: Sequence[Disturbance]) -> list[Disturbance]:
        """Returns the disturbances that concern their change, while this edit has its locks.

        Uses other connections than this process has, which may all wait for these locks.
        """
        dsn = self._planned[0].context.dsn
        with closing(ConnectionSupplier(dsn, connections_max=2)) as apart:
            return self._conflicts(disturbances, apart)

    def _compute_again(self, conflicts: Sequence[Disturbance]) -> None:
        """Computes changes again, those whose rows were changed, or all if none is given."""
        numbers = sorted(set(map(self._of, conflicts)).union(self._loads())) if conflicts else self._all()
        if conflicts and self.attempts >= self._attempts_max:
            raise _conflict(self._planned[numbers[0]], self.attempts)
        self.attempts += bool(conflicts)
        for number in numbers:
            planned = self._planned[number]
            self._discard(planned.context, planned.attempt)
            self._planned[number] = self._computed(planned.context.followed(), planned.change)
        for earlier, later in combinations(range(len(self._planned)), 2):
            if not {earlier, later}.isdisjoint(numbers):
                _check_apart(self._planned[earlier], self._planned[later])

    def _all(self) -> list[int]:
        return list(range(len(self._planned)))

    def _loads(self) -> list[int]:
        """Returns the numbers of the changes that write keys of a keyed table without reading them.

        When others are computed again, they get later places, as if the whole edit began anew.
        """
        return [
            number
            for number, planned in enumerate(self._planned)
            if planned.attempt.place is not None and not planned.change.reads_its_keys
        ]

    def _computed(self, context: TableContext, change: Change, name: str | None = None) -> _Planned:
        """Computes a change at the present moment, with a new attempt."""

        plans = True

        def once(known: TableContext) -> _Planned:
            begun = rows = None
            if plans and (change.reads_its_keys or not is_keyed(known.properties)):
                # an instance check of a protocol is slow
                if (begin := getattr(change, "begun", None)) is not None:
                    with suppress(DormouseError):  # with columns that may be outdated
                        begun = begin(known)
                then = None if begun is None or begun.query is None else begun.query.request.call
                attempt, at, rows = known.attempts.plan(known.table, name, then)
            else:
                # commits after this moment disturb the load, so that all others have earlier places
                at = now(known)
                attempt = known.attempts.begin(known.table, loads=True, durable=False)
            current, attempt = known.writing_for(attempt)
            self._open.append((current, attempt))
            try:
                if begun is None or current is not known:
                    return _Planned(change, current, attempt, at, change.compute(current, attempt, at))
                query = None if begun.query is None or rows is None else replace(begun.query, rows=rows)
                begun = Begun(begun.computation, query)
                found = cast(BegunChange, change).compute(current, attempt, at, begun)
                return _Planned(change, current, attempt, at, found)
            except BaseException:
                self._discard(current, attempt)
                raise

        for left in reversed(range(OVERTAKEN_MAX)):
            try:
                return on_current(context, once)
            except QueryOvertaken:
                # files of the query were collected, or a row was deleted, which ends a planned attempt: retry
                plans = name is not None
                if not left:
                    raise
        raise AssertionError

    def _discard(self, context: TableContext, attempt: WriteAttempt) -> None:
        self._open.remove((context, attempt))
        context.attempts.discard(attempt, leftovers=self._leftovers)

    def _close(self) -> None:
        """Forgets the attempts that a commit ended."""
        for context, attempt in self._open if self._leftovers else ():
            context.attempts.delete_leftovers(attempt, context.store.own)
        self._open.clear()

    def _along(self, conn: psycopg.Connection[Any]) -> None:
        for work in self._works:
            work(conn)

    def _committed(
        self,
        parts: Sequence[Part],
        choose: Callable[[Sequence[Disturbance]], Sequence[Disturbance]] | None,
    ) -> bool:
        """Commits the parts. If an answer is lost, repeats the transaction, which then finds the commit.

        Uses the commit queue if all tables commit asynchronously, objects were written, and the request is
        not too large for the queue.
        """
        recorded = next((planned for planned in self._planned if planned.is_recorded), None)
        if choose is None and recorded is not None and (commits := self._commits) is not None:
            with suppress(InvalidCommitRequest):
                return self._sent(parts, commits, recorded.attempt)
        unknown: CommitOutcomeUnknown | None = None
        pause = partial(backoff_seconds, seconds_min=0.05, seconds_max=ASK_WAIT_SECONDS_MAX)
        at_once = choose is None and not self._works
        for _ in tries(tries_max=ASK_ATTEMPTS_MAX, pause=pause):
            try:
                if (
                    at_once
                    and unknown is None
                    and is_committed_at_once(self._supplier, parts, self._commit_id)
                ):
                    return True
                applied = commit(self._supplier, parts, self._commit_id, along=self._along, choose=choose)
            except CommitOutcomeUnknown as error:
                unknown = error
                continue
            # an id of this process's own was applied by the transaction whose answer was lost
            return applied or ((unknown is not None or self._is_sent) and self.is_new)
        raise unknown or AssertionError

    @property
    def _commits(self) -> JobCommits | None:
        """The queue, if all tables commit through it. It carries no other work."""
        found = [planned.context.async_commits for planned in self._planned]
        return None if self._works or self._leftovers or None in found else found[0]

    def _sent(self, parts: Sequence[Part], commits: JobCommits, attempt: WriteAttempt) -> bool:
        """Sends the parts as one request, and waits for its outcome, which the attempt tells.

        Otherwise like `_committed`.
        """
        # the request's first table is the one whose attempt is asked for
        ordered = sorted(parts, key=lambda part: part.table_id != attempt.table_id)
        request = EditTables(commit_id=self._commit_id, parts=tuple(map(edit_of, ordered)))
        was_sent, self._is_sent = self._is_sent, True
        try:
            return commits.commit(request, attempt) or (was_sent and self.is_new)
        except EditConflict:
            raise Disturbed(disturbances(self._supplier, parts)) from None


def _is_concerned(
    concern: Concern | None, context: TableContext, at: Position, till: Position, files: frozenset[str] | None
) -> bool:
    """Returns whether commits between two moments changed rows that concern a change."""
    if concern is None:
        return False
    try:
        found = changes(context, at, till, near=Near(concern.ranges, files), as_known=True)
        return concern.of(context, iter(found))
    except DormouseError:
        return True  # what changed is no longer known, or cannot be read: compute again


def _check_apart(earlier: _Planned, later: _Planned) -> None:
    """Raises `InvalidInput` if a change depends on rows that an earlier one of the same edit changed."""
    if earlier.context.table.table_id != later.context.table.table_id:
        return
    schema, concern = later.context.schema, later.reads
    read = later.read(concern)
    reads = [] if read is None else [*read.spans]
    reads += [span_of(schema, deletion) for deletion in later.computed.deletions]
    removed = [span_of(schema, deletion) for deletion in earlier.computed.deletions] if reads else []
    files = [
        file
        for file in earlier.computed.files
        if any(meet((file.min_key or b"", file.max_key or b""), span) for span in reads)
    ]
    depends = concern is not None and any(meet(one, other) for one in removed for other in reads)
    if not depends and files:
        # what was just written is looked at like the rows of other commits, if it is at hand
        known = [_rows_of(later.context, file) for file in files]
        rows = [one for one in known if one is not None]
        depends = concern is None or len(rows) < len(files) or concern.of(later.context, iter(rows))
    if depends:
        raise InvalidInput(
            f"table {later.context.table.name!r}: this change reads or deletes rows that an earlier one of "
            "the same transaction changed; make both by one update or one merge_into, or use two transactions"
        )


def _rows_of(context: TableContext, file: FileWithReferences) -> pa.RecordBatch | None:
    """Returns the rows of an inlined file that is not committed, as `changes` would; None for an object."""
    if file.content is None or CHANGE in context.schema:
        return None
    rows = pq.read_table(pa.BufferReader(file.content)).combine_chunks()
    gone = rows.column(DELETED_AT).is_valid() if is_keyed(context.properties) else None
    kinds = pa.repeat(pa.scalar(INSERT), rows.num_rows) if gone is None else pc.if_else(gone, DELETE, UPSERT)
    rows = rows.select(context.schema.names).append_column(CHANGE, kinds)
    return rows.to_batches()[0] if rows.num_rows else None


def _conflict(planned: _Planned, attempts: int) -> EditConflict:
    name, concern = planned.context.table.name, planned.computed.concern
    ranges = concern.ranges if concern is not None else KeyRanges()
    where = ", ".join(f"{key} {_said(ranges.enclosing(key))}" for key in ranges) or "all keys"
    return EditConflict(
        f"table {name!r}, {where}: other commits changed these rows each of the {attempts} times that the "
        "edit was computed; nothing was changed: try again when fewer others change them",
        table=name,
    )


def _said(item: Range) -> str:
    if item.is_exact:
        return f"{item.min!r}"
    ends = (("from", item.min), ("to", item.max))
    return " ".join(f"{word} {end!r}" for word, end in ends if end is not None) or "of any value"
