"""Row tables compared with naive dicts: changes of all kinds, refused changes, and maintenance."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import dormouse as dm
from dormouse.errors import InvalidColumn, InvalidRow, RowConflict, RowNotFound
from tests.machines import run_machine
from tests.row_model import Known, RowModel
from tests.support.api import Instance
from tests.support.state import LAYOUTS

EXAMPLES, STEPS = 15, 40
NAMES = ["a", "b", "c", "d"]
TYPES = ["INTEGER", "DOUBLE", "STRING"]
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "INTEGER": st.one_of(st.none(), st.integers(-9, 9)),
    "DOUBLE": st.one_of(st.none(), st.sampled_from([0.5, 3.0, -1.25])),
    "STRING": st.one_of(st.none(), st.sampled_from(["7", "x", "", "long text"])),
}
REFUSALS = (InvalidColumn, InvalidRow, RowConflict)


class RowMachine(RuleBasedStateMachine):
    instance: Instance
    layout: str

    @initialize()
    def begin(self) -> None:
        columns = [dm.Column("a", "INTEGER", default=1), dm.Column("b", "STRING", size_max=9)]
        properties = dm.TableProperties(split_threshold_rows=8, split_min_rows=2, gc_delay_seconds=0)
        self.rows = self.instance.create_row_table(f"t{next(_numbers)}", columns, properties=properties)
        if self.layout != "file_table":
            self.rows.table.convert_layout(self.layout)
        self.model = RowModel.of(columns)

    def teardown(self) -> None:
        if hasattr(self, "rows"):
            self.instance.drop_table(self.rows.name)

    @rule(data=st.data(), count=st.integers(1, 4), dry_run=st.booleans())
    def change(self, data: st.DataObject, count: int, dry_run: bool) -> None:
        columns, changes = self.model.columns_at(), []
        for _ in range(count):
            change = _a_change(data, self.model, columns)
            changes.append(change)
            columns = _after(columns, change)
        try:
            expected: Any = self._expected(changes)
        except REFUSALS as error:
            expected = error
        for trial in (True, False) if dry_run else (False,):
            self._do(changes, expected, dry_run=trial)
        if not isinstance(expected, Exception):
            self.model.change(changes)

    def _expected(self, changes: list[Any]) -> tuple[list[int], list[int], dict[str, int]]:
        trial = copy.deepcopy(self.model)
        counts = trial.change(changes)
        new = [i for i in trial.rows if i not in self.model.rows]
        return new, list(range(self.model.version + 1, trial.version + 1)), counts

    def _do(self, changes: list[Any], expected: Any, *, dry_run: bool) -> None:
        if isinstance(expected, Exception):
            with pytest.raises(REFUSALS) as raised:
                self.rows.change(changes, dry_run=dry_run)
            kinds = {type(raised.value), type(expected)}
            if kinds == {InvalidRow, RowConflict} and any(isinstance(c, dm.RetypeColumn) for c in changes):
                return  # a row of the change that does not fit the new type is refused at once
            assert len(kinds) == 1, (raised.value, expected)
            if isinstance(raised.value, RowConflict):
                assert sorted(raised.value.rows) == sorted(expected.rows)
            return
        done = self.rows.change(changes, dry_run=dry_run)
        assert (list(done.row_ids), list(done.versions), done.changed) == expected

    @rule()
    def compact(self) -> None:
        assert not self.rows.table.compact(engine="local").errors

    @rule()
    def split(self) -> None:
        self.rows.table.split()

    @rule()
    def collect(self) -> None:
        self.rows.table.collect_garbage()

    @rule()
    def open_again(self) -> None:
        self.rows = self.instance.row_table(self.rows.name)

    @invariant()
    def has_its_rows(self) -> None:
        if hasattr(self, "rows"):
            assert self.rows.version() == self.model.version
            assert self.rows.current().read_all().to_pylist() == self.model.current()
            known = [(c.name, c.type) for c in self.rows.columns()]
            assert known == [(c.name, c.type) for c in self.model.columns_at()]

    @invariant()
    def has_ranges_of_its_rows(self) -> None:
        """Checks that ranges are disjoint, cover every id, and that equal neighbours are merged."""
        if hasattr(self, "rows"):
            ranges = self.rows.store.ranges([(1, len(self.model.rows) + 1)])
            spans = zip(ranges.first, ranges.last, strict=True)
            ids = [row_id for first, last in spans for row_id in range(first, last + 1)]
            assert ids == sorted(self.model.rows)
            at = ranges.find(np.array(ids, np.int64))
            assert [int(v) for v in ranges.version[at]] == [self.model.newest(i) for i in ids]
            assert len(ranges.joined().first) == len(ranges.first)

    @rule(data=st.data())
    def look_at_a_version(self, data: st.DataObject) -> None:
        version = data.draw(st.integers(0, self.model.version))
        assert self.rows.current(version).read_all().to_pylist() == self.model.current(version)
        after = data.draw(st.integers(0, version))
        found = self.rows.changed(after, version).read_all()
        keys = [tuple(row.values()) for row in found.select([0, 1, 2]).to_pylist()]
        assert keys == self.model.changed(after, version)

    @rule()
    def look_at_every_version(self) -> None:
        for row_id, versions in self.model.rows.items():
            for version in versions:
                expected = self.model.read(row_id, version)
                if expected is None:
                    with pytest.raises(RowNotFound, match="was deleted"):
                        self.rows.row(row_id, version)
                else:
                    assert self.rows.row(row_id, version) == expected


def _a_change(data: st.DataObject, model: RowModel, columns: tuple[Known, ...]) -> Any:
    draw = data.draw
    kind = draw(st.sampled_from("iiiuuppprracdtn"))
    name = draw(st.sampled_from(NAMES))
    if kind == "a":
        type_ = draw(st.sampled_from(TYPES))
        return dm.AddColumn(dm.Column(name, type_, default=draw(VALUES[type_])))
    if kind == "d":
        return dm.DropColumn(name)
    if kind == "n":
        return dm.RenameColumn(name, draw(st.sampled_from(NAMES)))
    if kind in "ct":
        type_ = draw(st.sampled_from(TYPES))
        size = draw(st.sampled_from([None, 3, 20])) if type_ == "STRING" else None
        return dm.RetypeColumn(name, type_, size)
    if kind == "i":
        return dm.Insert(draw(st.lists(_cells(columns), min_size=1, max_size=4)))
    known = st.integers(1, len(model.rows) + draw(st.sampled_from([0] * 9 + [1])) or 1)
    ids = draw(st.lists(known, max_size=3, unique=draw(st.sampled_from([True] * 9 + [False]))))
    keys = [(i, draw(_versions(model, i))) for i in ids]
    if kind == "r":
        return dm.Remove(keys)
    rows = [{"ROW_ID": i, "ROW_VERSION": v, **draw(_cells(columns))} for i, v in keys]
    return dm.Update(rows) if kind == "u" else dm.Patch(rows)


def _versions(model: RowModel, row_id: int) -> st.SearchStrategy[int]:
    """Draws row versions to send with a change, mostly the newest one."""
    now = max(model.newest(row_id), 1)
    return st.sampled_from([now] * 8 + [max(now - 1, 1), now + 1])


def _cells(columns: tuple[Known, ...]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={c.name: VALUES[c.type] for c in columns})


def _after(columns: tuple[Known, ...], change: Any) -> tuple[Known, ...]:
    """Returns the columns after a change, approximately, so that most random changes fit them."""
    if hasattr(change, "rows"):
        return columns
    try:
        trial = RowModel([(0, columns)])
        trial.change([change])
        return trial.columns_at()
    except REFUSALS:
        return columns


_numbers = itertools.count()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_version_of_each_row_equals_that_of_a_naive_dict(instance: Instance, layout: str) -> None:
    run_machine(RowMachine, instance, layout, EXAMPLES, STEPS)
