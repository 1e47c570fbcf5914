"""Edits of two tables compared with lists of rows, after random edits, transactions and maintenance.

Each reader is compared, now and at each recorded cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import dormouse as dm
from dormouse.errors import FileReferenceAssignedToJob, InvalidRange, PartitionError
from tests.edit_model import (
    ADDED,
    ADDED_DEFAULT,
    COLUMNS,
    EVERY,
    KEYED,
    REFUSED,
    Bound,
    Dice,
    Done,
    Merge,
    Operation,
    Row,
    create,
    data_of,
    exact,
    in_order,
)
from tests.machines import run_machine
from tests.support.api import Instance
from tests.support.model import Cut
from tests.support.state import LAYOUTS, record_cut

EXAMPLES, STEPS = 6, 15
DICE = st.randoms(use_true_random=False).map(Dice)
NAMES = st.sampled_from([KEYED, EVERY])
State = dict[str, list[Row]]


class EditsMachine(RuleBasedStateMachine):
    """A state machine that makes the same changes to two tables and to lists of rows, and compares them.

    `cuts` has, for each recorded cut, the table, its rows and its columns at that moment.
    """

    instance: Instance
    layout: str

    @initialize(
        writing=st.sampled_from(["one_file_per_leaf", "one_reference_per_leaf"]),
        inline_bytes_max=st.sampled_from([0, 65_536]),
    )
    def begin(self, writing: str, inline_bytes_max: int) -> None:
        number = next(_numbers)
        self.tables = {
            kind: create(
                self.instance,
                kind,
                f"{kind}{number}",
                self.layout,
                ingest_file_writing=writing,
                inline_bytes_max=inline_bytes_max,
            )
            for kind in (KEYED, EVERY)
        }
        self.rows: State = {KEYED: [], EVERY: []}
        self.columns = {KEYED: [*COLUMNS], EVERY: [*COLUMNS]}
        self.cuts: dict[str, list[tuple[Cut, list[Row], list[str]]]] = {KEYED: [], EVERY: []}
        self.names = itertools.count()
        self.last: tuple[Operation, str] | None = None

    def teardown(self) -> None:
        for table in getattr(self, "tables", {}).values():
            self.instance.drop_table(table.name)

    # Edits.

    @rule(name=NAMES, dice=DICE)
    def load(self, name: str, dice: Dice) -> None:
        self._do(dice.load(name, self.columns[name]))

    @rule(dice=DICE)
    def upsert_some_columns(self, dice: Dice) -> None:
        self._do(dice.partial(self.columns[KEYED]))

    @rule(name=NAMES, dice=DICE)
    def edit(self, name: str, dice: Dice) -> None:
        self._do(dice.reading(name, self.columns[name]))

    @rule(name=NAMES, dice=DICE)
    def edit_again_and_again(self, name: str, dice: Dice) -> None:
        """Edits rows twice and loads others between, so that compactions meet several deletions."""
        for _ in range(2):
            self._do(dice.reading(name, self.columns[name]))
            self._do(dice.load(name, self.columns[name]))

    @rule(name=NAMES, dice=DICE)
    def merge_rows_of_the_other_table(self, name: str, dice: Dice) -> None:
        """Merges a query of the other table, with the rows that the query has."""
        other = EVERY if name == KEYED else KEYED
        merge = dice.merge(name, self.columns[name])
        rows = [{key: row[key] for key in COLUMNS} for row in self.rows[other] if row["t"] == 1]
        if self.columns[name] != COLUMNS:
            return
        done = Merge(name, rows, merge.join, merge.clauses)
        query = dm.sql(f"select {listed(COLUMNS)} from {self.tables[other].name} where t = 1")
        self._done(done, lambda **how: done.by(self.tables[name], query, **how))

    @rule(dice=DICE)
    def change_both(self, dice: Dice) -> None:
        """Changes both tables in one transaction, each at first by an edit that reads it."""
        operations: list[Operation] = []
        for name in dice.pick([(KEYED, EVERY), (EVERY, KEYED)]):
            if dice.chance(0.7):
                operations.append(dice.reading(name, self.columns[name]))
            if dice.chance(0.5) or not operations:
                operations.append(dice.load(name, self.columns[name]))
        after, is_refused, may_be_refused = dict(self.rows), False, False
        for one in operations:
            done = one.on(after[one.name], self.columns[one.name])
            after[one.name] = done.rows
            is_refused, may_be_refused = (
                is_refused or done.is_refused,
                may_be_refused or done.may_be_refused,
            )
        note(f"in one transaction: {operations}")
        try:
            with self.instance.transaction() as transaction:
                for one in operations:
                    one.to(Bound(transaction, self.tables[one.name].name))
        except REFUSED:
            assert is_refused or may_be_refused
        else:
            assert not is_refused
            self.rows = after

    @rule(name=NAMES, dice=DICE)
    def leave_a_transaction_by_an_error(self, name: str, dice: Dice) -> None:
        with suppress(_Left, *REFUSED), self.instance.transaction() as transaction:
            bound = Bound(transaction, self.tables[name].name)
            dice.operation(name, self.columns[name]).to(bound)
            raise _Left

    @rule()
    def repeat_the_last_edit(self) -> None:
        if self.last is not None:
            operation, edit_id = self.last
            report = operation.to(self.tables[operation.name], edit_id=edit_id)
            assert not report.applied

    def _do(self, operation: Operation) -> None:
        self._done(operation, lambda **how: operation.to(self.tables[operation.name], **how))

    def _done(self, operation: Operation, change: Callable[..., Any]) -> None:
        """Applies an operation to the table and to the model; a dry run before it has the same counts."""
        note(f"{operation}")
        done = operation.on(self.rows[operation.name], self.columns[operation.name])
        edit_id = f"edit {next(_numbers)}"
        try:
            if hasattr(operation, "where") or isinstance(operation, Merge):
                check_counts(change(dry_run=True), done, applied=False)
            report = change(edit_id=edit_id)
        except REFUSED as error:
            assert done.is_refused or done.may_be_refused, error
            return
        assert not done.is_refused
        check_counts(report, done, applied=True)
        self.rows[operation.name] = done.rows
        if hasattr(report, "edit_id"):
            self.last = operation, edit_id

    @precondition(lambda self: any(columns == COLUMNS for columns in self.columns.values()))
    @rule(name=NAMES)
    def add_column(self, name: str) -> None:
        if self.columns[name] == COLUMNS:
            field = dm.Field(ADDED, dm.LONG, nullable=True)
            self.tables[name].add_column(field, default=ADDED_DEFAULT)
            self.columns[name] = [*COLUMNS, ADDED]
            self.rows[name] = [{**row, ADDED: ADDED_DEFAULT} for row in self.rows[name]]

    # Maintenance.

    @rule(name=NAMES)
    def compact(self, name: str) -> None:
        assert not self.tables[name].compact(engine="local").errors

    @rule(name=NAMES)
    def compact_fully(self, name: str) -> None:
        assert not self.tables[name].compact(engine="local", full=True).errors

    @rule(name=NAMES)
    def split(self, name: str) -> None:
        self.tables[name].split()

    @rule(name=NAMES, at=st.integers(1, 12))
    def divide(self, name: str, at: int) -> None:
        """Splits a leaf at a key. Its files then belong to both children."""
        partitions = self.tables[name].partitions
        leaf = next(one for one in partitions.leaves() if one.region.range("k").contains(at))
        with suppress(FileReferenceAssignedToJob, PartitionError, InvalidRange):
            partitions.split(leaf.partition_id, at)

    @rule(name=NAMES)
    def merge_partitions(self, name: str) -> None:
        self.tables[name].merge()

    @rule(name=NAMES)
    def collect(self, name: str) -> None:
        self.tables[name].collect_garbage()

    @rule(name=NAMES)
    def cut(self, name: str) -> None:
        # the name keeps the cut from expiring
        cut = record_cut(self.tables[name].context, f"cut{next(self.names)}")
        self.cuts[name].append((cut, self.rows[name], self.columns[name]))

    @rule(name=NAMES, data=st.data())
    def restore(self, name: str, data: st.DataObject) -> None:
        cuts = [one for one in self.cuts[name] if one[2] == self.columns[name]]
        if cuts:
            cut, rows, _ = cuts[data.draw(st.integers(0, len(cuts) - 1))]
            self.tables[name].restore(to=cut)
            self.rows[name] = rows
            self.cuts[name] = []  # changes cannot be read across a restore

    # Readers.

    @invariant()
    def has_its_rows(self) -> None:
        for name, table in getattr(self, "tables", {}).items():
            columns = self.columns[name]
            assert in_order(rows_of(table.query()), columns) == in_order(self.rows[name], columns)

    @rule(name=NAMES, dice=DICE)
    def look(self, name: str, dice: Dice) -> None:
        table, columns, rows = self.tables[name], self.columns[name], self.rows[name]
        expected, names = in_order(rows, columns), listed(columns)
        assert in_order(rows_of(self.instance.sql(f"select {names} from {table.name}")), columns) == expected
        with self.instance.duckdb() as opened:
            viewed = opened.execute(f"select {names} from {table.name}").to_arrow_table()
        assert in_order(
            viewed.cast(data_of(rows).schema if rows else viewed.schema).to_pylist(), columns
        ) == (expected)
        where = dice.where(is_mapping=True)
        some = [row for row in rows if where.of(row) is True]
        condition = None if where.given is dm.ALL else where.given
        assert in_order(rows_of(table.query(condition)), columns) == in_order(some, columns)
        assert table.count(condition) == len(some)

    @rule(name=NAMES)
    def look_back(self, name: str) -> None:
        for cut, rows, columns in self.cuts[name][-3:]:
            found = self.tables[name].query(columns=columns, as_of=cut)
            assert in_order(rows_of(found), columns) == in_order(rows, columns)

    @rule(name=NAMES, data=st.data())
    def changes(self, name: str, data: st.DataObject) -> None:
        """Checks that the rows at a cut, with the changes applied, equal the rows at a later cut."""
        cuts = self.cuts[name]
        if not cuts:
            return
        first = data.draw(st.integers(0, len(cuts) - 1))
        last = data.draw(st.integers(first, len(cuts) - 1))
        (after, before, _), (till, now, _) = cuts[first], cuts[last]
        found = rows_of(self.tables[name].changes(after, till, COLUMNS))
        assert replayed(name, before, found) == in_order(now, COLUMNS)


class _Left(Exception):
    """An error that leaves a transaction."""


_numbers = itertools.count()


def listed(columns: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in columns)


def rows_of(answer: Any) -> list[Row]:
    return list(answer.read_all().to_pylist())


def check_counts(report: Any, done: Done, *, applied: bool) -> None:
    if hasattr(report, "applied"):
        assert report.applied == applied
    if hasattr(report, "attempts"):
        assert report.attempts == applied
        counts = {"inserted": done.inserted, "updated": done.updated, "deleted": done.deleted}
        found = {kind: getattr(report, kind, None) for kind in counts}
        if not hasattr(report, "ingest_id") or applied:  # the dry run of a replacement does not read its rows
            assert found == {kind: None if found[kind] is None else counts[kind] for kind in counts}
        assert getattr(report, "rows", done.updated) == done.updated


def replayed(name: str, before: Sequence[Row], changes: Sequence[Row]) -> list[tuple[Any, ...]]:
    """Returns the rows of a moment after changes, in order. Asserts that deleted rows were there."""
    if name == KEYED:
        known = {row["k"]: row for row in before}
        for change in changes:
            assert known.pop(change["k"], None) is not None or change["_change"] == "upsert"
            if change["_change"] == "upsert":
                known[change["k"]] = change
        return in_order([*known.values()], COLUMNS)
    copy = [exact(row, COLUMNS) for row in before]
    for change in changes:
        row = exact(change, COLUMNS)
        copy.append(row) if change["_change"] == "insert" else copy.remove(row)
    return sorted(copy)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_reader_sees_the_rows_of_plain_lists_after_edits(instance: Instance, layout: str) -> None:
    run_machine(EditsMachine, instance, layout, 2, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_reader_sees_the_rows_of_plain_lists_after_many_edits(instance: Instance, layout: str) -> None:
    run_machine(EditsMachine, instance, layout, EXAMPLES, 2 * STEPS)
