"""The application of updates: a batch of commits is one statement, whatever its size.

The checks are part of the statement, and each commit of a batch is applied or refused on its own. Commits
that change the same reference or file need several statements, which run in one transaction.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg
from psycopg import errors as pg

from dormouse.errors import CommitIdReused, DormouseError, FileAlreadyExists, FileHasReferences, FileNotFound
from dormouse.model.text import check_text, narrow_bytes
from dormouse.postgres.queries import Statement, Uuids, booleans, execute_each, integers, texts
from dormouse.postgres.session import Isolation
from dormouse.postgres.transaction import run_statement
from dormouse.state.files.attempts import WriteAttempts
from dormouse.state.files.layout import OwnTables, Parameters, key_arrays
from dormouse.state.files.operations import (
    OPERATIONS,
    Commit,
    CommitResult,
    Kind,
    Operation,
    RefusedPart,
    of_forgotten,
)

ROUNDS_MAX = 10
_MERGED = 5
"""The position of the column with the merged partitions in a statement's result."""
NOT_WHOLE = "DM001"
"""The SQLSTATE of the error that the SQL function `not_whole` raises."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """A unit that is applied or refused as a whole: one item of a commit, or all its items.

    `commit` is the number of the commit; `first` is the number of the first item in it.
    """

    commit: int
    first: int
    items: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Whole:
    """A statement that applies all of some commits, or fails and applies none.

    `results` are the results of the commits if the statement succeeds.
    """

    statement: Statement
    values: Parameters
    results: list[CommitResult]


def apply_commits(
    own: OwnTables, kind: Kind, commits: Sequence[Commit], *, conn: psycopg.Connection[Any] | None = None
) -> list[CommitResult]:
    """Applies commits of one kind to a table; returns the result of each. See `FileReferenceStore.apply`."""
    operation = OPERATIONS[kind]
    batch = _Batch(own, operation, commits)
    runs = list(batch.runs())
    if conn is None and len(runs) == 1:
        if batch.went_whole(runs[0]):
            return batch.results()
        if not (batch.may_be_applied_in_part or batch.attempts()):
            batch.apply(runs[0], None)
            return batch.results()

    def work(c: psycopg.Connection[Any]) -> list[CommitResult]:
        again = _Batch(own, operation, commits)
        for run in runs:
            again.apply(run, c)
        again.end_attempts(c)
        return again.results()

    return own.following_in(work, operation.name, conn) if runs else batch.results()


def apply_at_once(own: OwnTables, kind: Kind, commit: Commit, checked: Parameters) -> bool:
    """Applies all of one commit with the faster statement, or applies nothing and returns False.

    `checked` has further values that the statement checks.
    """
    operation = OPERATIONS[kind]
    batch = _Batch(own, operation, [commit])
    [units] = batch.runs()
    return batch.may_go_whole and _apply_whole(own, operation, {**batch.values(units), **checked})


def whole_statement(
    own: OwnTables,
    kind: Kind,
    commits: Sequence[Commit],
    names: Sequence[str] = (),
    ending: Sequence[str] = (),
) -> Whole | None:
    """Returns the faster statement for some commits, or None. See `FileReferenceStore.whole`."""
    operation = OPERATIONS[kind]
    batch = _Batch(own, operation, commits)
    runs = list(batch.runs())
    if operation.whole_statement is None or len(runs) != 1 or not batch.may_go_whole:
        return None
    if own.isolation is not Isolation.READ_COMMITTED:
        return None
    values = own.values({**batch.values(runs[0]), "names": texts(names)})
    if ending:
        values["attempt_ids"] = Uuids([bytes.fromhex(attempt_id) for attempt_id in ending])
    return Whole(own.statement(operation.whole_statement), values, batch.results_of(runs[0]))


def _apply_once(
    own: OwnTables, operation: Operation, values: Parameters, conn: psycopg.Connection[Any] | None
) -> Sequence[Any]:
    """Runs an operation's statement once; returns its row, which has the outcome of each unit and commit."""

    def work(c: psycopg.Connection[Any]) -> Sequence[Any]:
        own.wait_for_deletions(c)
        return list(own.execute(c, operation.statement, values).fetchall()[0])

    return own.following_in(work, operation.name, conn, run=run_statement)


def _apply_whole(own: OwnTables, operation: Operation, values: Parameters) -> bool:
    """Applies everything with the faster statement, or applies nothing and returns False."""

    def work(conn: psycopg.Connection[Any]) -> None:
        if own.isolation is not Isolation.READ_COMMITTED:
            own.wait_for_deletions(conn)
            own.execute(conn, statement, values)  # the wait before has begun a transaction
            return
        # not with psycopg's own preparation: it leaks a prepared statement each time its first use fails
        [answer] = execute_each(conn, [(own.statement(statement), own.values(values))])
        if isinstance(answer, psycopg.Error):
            raise answer

    statement = operation.whole_statement or ""
    try:
        own.following_in(work, operation.name, None, run=run_statement)
    except pg.UniqueViolation:
        return False
    except psycopg.DatabaseError as error:
        if error.sqlstate != NOT_WHOLE:
            raise
        return False
    return True


class _Batch:
    """A batch of commits of one kind, and the outcomes that are known so far."""

    def __init__(self, own: OwnTables, operation: Operation, commits: Sequence[Commit]) -> None:
        self._own = own
        self._operation = operation
        self._commits = commits
        self._applied: set[int] = set()
        self._before: set[int] = set()
        self._retried: set[int] = set()
        self._failed: dict[int, dict[int, DormouseError]] = defaultdict(dict)
        self._remembered: dict[int, int] = {}
        self._ids = {n: commit.commit_id for n, commit in enumerate(commits) if commit.commit_id is not None}
        for commit_id in self._ids.values():
            check_text("commit_id", commit_id)
        self._units = [unit for n in range(len(commits)) for unit in self._checked(n)]

    @property
    def may_be_applied_in_part(self) -> bool:
        """True if a commit with an id may be applied in part. Its refused items are then recorded."""
        return self._operation.alone and any(len(self._commits[number].items) > 1 for number in self._ids)

    @property
    def may_go_whole(self) -> bool:
        """True if the faster statement may be tried.

        False if commits may be applied in part and an item was refused already.
        """
        return not (self.may_be_applied_in_part and any(self._failed.values()))

    def runs(self) -> Iterator[list[_Unit]]:
        """Yields the units in lists, each for one statement.

        No two units of a list change the same thing or have the same commit id. Almost always there is one
        list.
        """
        if len(self._units) == 1:
            yield self._units
            return
        run: list[_Unit] = []
        seen: set[Any] = set()
        senders: dict[str, int] = {}
        touches = self._operation.touches
        for unit in self._units:
            touched = {each for item in unit.items for each in touches(item)}
            commit_id = self._ids.get(unit.commit)
            again = commit_id is not None and senders.setdefault(commit_id, unit.commit) != unit.commit
            if again or not seen.isdisjoint(touched):
                yield run
                run, seen, senders = [], set(), {} if commit_id is None else {commit_id: unit.commit}
            run.append(unit)
            seen |= touched
        if run:
            yield run

    def went_whole(self, units: list[_Unit]) -> bool:
        """Applies all units with the faster statement; returns False if that is not possible."""
        if self._operation.whole_statement is None or not self.may_go_whole:
            return False
        if not _apply_whole(self._own, self._operation, self.values(units)):
            return False
        self.results_of(units)
        return True

    def values(self, units: list[_Unit]) -> Parameters:
        """Returns the parameters of the faster statement."""
        commits = list(dict.fromkeys(unit.commit for unit in units))
        values = self._values(self._ordered(units), commits)
        return {**values, "names": texts(()), "schema_version": None}

    def apply(self, units: list[_Unit], conn: psycopg.Connection[Any] | None) -> None:
        """Applies units with one statement, and repeats it for the units that must be sent again.

        A unit is sent again when another commit of the batch was applied before or when its partition was
        merged. It is also sent again when the state changed while its error was looked up. Raises
        SerializationFailure after `ROUNDS_MAX` statements.
        """
        units = self._ordered(units)
        for _ in range(ROUNDS_MAX):
            if not units:
                self._remember_refused(conn)
                return
            units = self._round(units, conn)
        raise pg.SerializationFailure("other transactions keep changing what these commits change")

    def attempts(self, commits: Iterable[int] | None = None, leftovers: bool | None = None) -> list[str]:
        """Returns the ids of the write attempts that the given commits end, by default all commits.

        With `leftovers` True, returns only those of commits that are applied in part; with False, only those
        of commits that are applied whole.
        """
        ended = {
            self._commits[n].attempt_id: None
            for n in (range(len(self._commits)) if commits is None else commits)
            if leftovers in (None, bool(self._failed[n]))
        }
        return [attempt_id for attempt_id in ended if attempt_id is not None]

    def end_attempts(self, conn: psycopg.Connection[Any]) -> None:
        """Ends the write attempts of the applied commits.

        The objects of refused items are collected later.
        """
        for leftovers in (False, True):
            if ended := self.attempts(sorted(self._applied), leftovers):
                WriteAttempts.finish(conn, self._own.table.table_id, ended, leftovers=leftovers)

    def results_of(self, units: list[_Unit]) -> list[CommitResult]:
        """Records that all commits of the units were applied; returns the results of all commits."""
        self._applied |= {unit.commit for unit in units}
        return self.results()

    def results(self) -> list[CommitResult]:
        return [self._result(number) for number in range(len(self._commits))]

    def _checked(self, number: int) -> list[_Unit]:
        """Returns the units of a commit that pass the checks, and records the errors of the others."""
        items = self._commits[number].items
        failed = self._operation.check(self._own.table.name, items)
        self._failed[number].update(failed)
        if not items and (self._operation.statement != "add_files" or number not in self._ids):
            self._applied.add(number)  # an empty update writes nothing
            return []
        if self._operation.alone:
            return [_Unit(number, n, (item,)) for n, item in enumerate(items) if n not in failed]
        return [] if failed else [_Unit(number, 0, items)]

    def _ordered(self, units: list[_Unit]) -> list[_Unit]:
        order = self._operation.order
        return units if order is None else sorted(units, key=lambda unit: order(unit.items[0]))

    def _remember_refused(self, conn: psycopg.Connection[Any] | None) -> None:
        """Stores the refused items of partly applied commits in the database; may be called repeatedly."""
        parts = {
            number: self._refused_part(number)
            for number in sorted(self._applied & self._ids.keys())
            if len(self._failed[number]) > self._remembered.get(number, 0)
        }
        if not parts:
            return
        values = {
            "commit_keys": Uuids([narrow_bytes(self._ids[number]) for number in parts]),
            "refused": texts([json.dumps(part.to_json()) for part in parts.values()]),
        }
        self._own.fetch("remember_refused", values, conn)
        self._remembered |= {number: len(part.failed) for number, part in parts.items()}

    def _round(self, units: list[_Unit], conn: psycopg.Connection[Any] | None) -> list[_Unit]:
        """Sends units in one statement; returns the units that must be sent again."""
        commits = list(dict.fromkeys(unit.commit for unit in units))
        row = _apply_once(self._own, self._operation, self._values(units, commits), conn)
        verdict, before, reused, refused_before = row[:4]
        if before or reused:
            done = {commits[n - 1] for n in (*before, *reused)}
            self._before |= {commits[n - 1] for n in before}
            for n in before:
                self._recall(commits[n - 1], (refused_before or {}).get(str(n)))
            for number in (commits[n - 1] for n in reused):
                commit_id, name = self._ids[number], self._own.table.name
                message = f"commit id {commit_id!r} is that of another commit to table {name!r}, which is "
                message += "applied; nothing of this one was applied"
                self._failed[number][0] = CommitIdReused(message, commit_id=commit_id, table=name)
            return [unit for unit in units if unit.commit not in done]
        self._applied |= {unit.commit for unit, ok in zip(units, verdict, strict=True) if ok}
        late, refused = self._in_place([u for u, ok in zip(units, verdict, strict=True) if not ok], row, conn)
        unsure = {unit.commit for unit in refused if unit.commit in self._ids} - self._retried - self._applied
        if unsure:
            # the transaction that this statement waited for may have applied the same commit: a retry sees it
            self._retried |= unsure
            return late + refused
        if not refused:
            return late
        if self._operation.names_refused:
            return late + self._named(units, row[-1] or (), {unit.commit for unit in late})
        return late + self._explained(refused, conn)

    def _in_place(
        self, units: list[_Unit], row: Sequence[Any], conn: psycopg.Connection[Any] | None
    ) -> tuple[list[_Unit], list[_Unit]]:
        """Divides refused units into two lists.

        The first has the units that name merged partitions, with these replaced by the partitions that took
        their places. The second has the other units.
        """
        in_place = self._operation.in_place
        if in_place is None or not units or not row[_MERGED]:
            return [], units
        places = dict(self._own.fetch("places", {"partition_ids": row[_MERGED]}, conn))
        forgotten = {*row[_MERGED]} - places.keys()
        late, refused = list[_Unit](), list[_Unit]()
        for unit in units:
            items = [in_place(item, places) for item in unit.items]
            errors = of_forgotten(self._own.table.name, items, forgotten)
            if items != list(unit.items):
                late.append(replace(unit, items=items))
            elif errors:
                self._failed[unit.commit].update({unit.first + n: error for n, error in errors.items()})
            else:
                refused.append(unit)
        return late, refused

    def _values(self, units: list[_Unit], commits: list[int]) -> Parameters:
        numbers = {commit: n for n, commit in enumerate(commits, 1)}
        items = [(numbers[unit.commit], item) for unit in units for item in unit.items]
        arrays = self._operation.arrays([n for n, _ in items], [item for _, item in items])
        known = self._ids.keys() - self._applied
        sent = [(n, self._commits[c]) for c, n in numbers.items() if c in known]
        ids = [commit.commit_id or "" for _, commit in sent]
        return {
            **arrays,
            "count": len(commits),
            "kept_seconds": self._own.table.properties.history_retention_seconds,
            "sent": integers([n for n, _ in sent]),
            "commit_keys": Uuids(list(map(narrow_bytes, ids))),
            "commit_ids": texts(ids),
            "contents": Uuids([self._content(commit) if commit.same_content else None for _, commit in sent]),
            "sources": Uuids([commit.source for _, commit in sent]),
            "expire": booleans([commit.expires for _, commit in sent]),
            "attempt_ids": Uuids([bytes.fromhex(attempt_id) for attempt_id in self.attempts(commits)]),
        }

    def _content(self, commit: Commit) -> bytes:
        parts = [self._operation.statement]
        for item in commit.items:
            parts += self._operation.fingerprint(item)
            parts.append("")  # no name is empty or has a NUL, so different contents have different texts
        return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).digest()

    def _named(self, units: list[_Unit], refusals: Sequence[list[Any]], late: set[int]) -> list[_Unit]:
        """Records the errors of the files that the statement named as refused.

        Returns an empty list, as no unit is sent again.
        """
        kind = {(): FileAlreadyExists, (True,): FileHasReferences, (False,): FileNotFound}
        for number, filename, *tracked in refusals:
            unit = units[number - 1]
            if unit.commit in late:
                continue
            names = [getattr(item, "filename", item) for item in unit.items]
            error = kind[tuple(tracked)](self._own.table.name, filename)
            self._failed[unit.commit][names.index(filename)] = error
        return []

    def _explained(self, units: list[_Unit], conn: psycopg.Connection[Any] | None) -> list[_Unit]:
        """Looks up and records why units were refused; returns the units that nothing prevents any more."""
        keys = [key for unit in units for item in unit.items for key in self._operation.keys(item)]
        states = iter(self._own.fetch("reference_states", key_arrays(keys), conn))
        again = []
        for unit in units:
            errors = {}
            for number, item in enumerate(unit.items, unit.first):
                known = [next(states) for _ in self._operation.keys(item)]
                error = self._operation.diagnose(self._own.table.name, item, known)
                if error is not None:
                    errors[number] = error
            self._failed[unit.commit].update(errors)
            if not errors:
                again.append(unit)
        return again

    def _refused_part(self, number: int) -> RefusedPart:
        items, failed = self._commits[number].items, tuple(sorted(self._failed[number].items()))
        return RefusedPart(len(items), failed, tuple(self._mark(items[n]) for n, _ in failed))

    def _recall(self, number: int, refused: dict[str, Any] | None) -> None:
        """Records the errors that a commit's items had when the commit was applied before.

        The items are recognized by their marks, as their order may have changed.
        """
        failed = self._failed[number] = {}
        if not refused:
            return
        part = RefusedPart.from_json(refused, self._own.table.name)
        marks = dict(enumerate(map(self._mark, self._commits[number].items)))
        for (n, error), mark in zip(part.failed, part.marks, strict=True):
            # its own number first, as another item may have the same mark
            place = n if marks.get(n) == mark else next((k for k, m in marks.items() if m == mark), None)
            if place is not None:
                del marks[place]
                failed[place] = error

    def _mark(self, item: Any) -> str:
        return self._content(Commit([item])).hex()

    def _result(self, number: int) -> CommitResult:
        failed = tuple(sorted(self._failed[number].items()))
        if number in self._before:
            return CommitResult("applied_before", failed)
        if number in self._applied:
            return CommitResult("applied", failed)
        return CommitResult("refused", failed)
