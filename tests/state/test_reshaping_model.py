"""Changes of columns in any order, among ingests, deletes and compactions, compared with a model.

Each reader is checked, also as of each cut.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import dormouse as dm
from tests.by_ranges import compact_by_ranges
from tests.machines import run_machine
from tests.reshaped import Naive, Shaped, check
from tests.support.api import Instance
from tests.support.model import DataType
from tests.support.state import LAYOUTS

EXAMPLES, STEPS = 4, 30
SCHEMA = dm.Schema(
    [dm.Field("k", dm.LONG)],
    [dm.Field("t", dm.LONG)],
    [dm.Field("a", dm.INT, nullable=True), dm.Field("b", dm.FLOAT, nullable=True)],
)
NAMES = ("a", "b", "c", "d")
SMALL = st.integers(-2, 2)
OF_TYPE: dict[str, Any] = {
    "int": int,
    "long": lambda n: n << 40,
    "float": lambda n: n / 2,
    "double": lambda n: n / 10,
    "string": str,
}
NEW: list[DataType] = [dm.INT, dm.FLOAT, dm.STRING, dm.DOUBLE]


class Machine(RuleBasedStateMachine):
    """A state machine of a table and its naive model. The test sets and closes `instance`."""

    instance: Instance
    layout: str
    numbers = itertools.count()

    @initialize(by_hand=st.booleans())
    def begin(self, by_hand: bool) -> None:
        name = f"t{next(self.numbers)}"
        properties = dm.TableProperties(compaction_strategy="basic", compaction_batch_files=2)
        points = [3] if by_hand else []
        table = self.instance.create_table(
            name, SCHEMA, layout=self.layout, split_points=points, properties=properties
        )
        self.other = self.instance.table(name)
        self.shaped = Shaped(self.instance, table, Naive.of(SCHEMA))
        self.keys = itertools.count()
        self.turns = itertools.count()

    @property
    def values(self) -> list[dm.Field]:
        return list(self.shaped.table.schema.values)

    @rule(numbers=st.lists(SMALL, min_size=1, max_size=3), null=st.booleans())
    def ingest(self, numbers: list[int], null: bool) -> None:
        schema = self.shaped.table.schema
        rows = []
        for number in numbers:
            key = next(self.keys)
            row: dict[str, Any] = {schema.names[0]: key, schema.names[1]: key}
            for field in schema.values:
                row[field.name] = None if null and field.nullable else OF_TYPE[field.type.name](number)
            rows.append(row)
        self.shaped.ingest(*rows)

    @rule(
        name=st.sampled_from(NAMES), kind=st.sampled_from(NEW), number=st.none() | SMALL, whole=st.booleans()
    )
    def add(self, name: str, kind: DataType, number: int | None, whole: bool) -> None:
        if name not in self.shaped.table.schema:
            default = None if number is None else OF_TYPE[kind.name](number)
            self.shaped.add(dm.Field(name, kind, nullable=default is None or not whole), default)

    @rule(new_name=st.sampled_from((*NAMES, "key")), which=st.integers(0, 4))
    def rename(self, new_name: str, which: int) -> None:
        names = self.shaped.table.schema.names
        name = names[min(which, len(names) - 1)]
        if new_name not in names and name != self.shaped.table.schema.names[1]:
            self.shaped.rename(name, new_name)

    @precondition(lambda self: len(self.values) > 1)
    @rule(which=st.integers(0, 3))
    def drop(self, which: int) -> None:
        field = self.values[which % len(self.values)]
        named = {name for one in self.pending for name in one}
        if self.shaped.model.names[field.name] not in named:
            self.shaped.drop(field.name)
        else:
            with pytest.raises(dm.errors.InvalidSchema, match="is used by pending deletion"):
                self.shaped.table.drop_column(field.name)

    @rule()
    def widen(self) -> None:
        wider = {dm.INT: dm.LONG, dm.FLOAT: dm.DOUBLE}
        for field in self.values:
            if field.type in wider:
                self.other.widen_column(field.name, wider[field.type])
                return

    @rule(which=st.integers(0, 3), number=SMALL)
    def delete(self, which: int, number: int) -> None:
        field = self.values[which % len(self.values)]
        self.shaped.delete(field.name, OF_TYPE[field.type.name](number))

    @property
    def pending(self) -> list[list[int]]:
        """The column ids that each pending deletion names. Other deletions of the model are left out."""
        pending = {one.deletion_id for one in self.shaped.table.deletions()}
        return [ids for number, ids in self.shaped.deleted.items() if number in pending]

    @rule(by_ranges=st.booleans())
    def compact(self, by_ranges: bool) -> None:
        report = compact_by_ranges(self.other.context) if by_ranges else self.other.compact()
        assert report.given_up == 0

    @rule()
    def collect(self) -> None:
        self.shaped.table.collect_garbage()
        self.shaped.check()

    @rule()
    def cut(self) -> None:
        self.shaped.cut(f"cut{len(self.shaped.moments)}")

    @invariant()
    def same(self) -> None:
        """Checks the current rows, and at each step those of another cut.

        All are checked after each collection, and at the end.
        """
        if hasattr(self, "turns"):
            check(self.shaped.table, self.instance, self.shaped.model)
            if moments := [*self.shaped.moments.items()]:
                name, model = moments[next(self.turns) % len(moments)]
                check(self.shaped.table, self.instance, model, name)

    def teardown(self) -> None:
        if hasattr(self, "turns"):
            self.shaped.check()
            assert self.instance.check(deep=True, table=self.shaped.table.name).problems == ()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_readers_agree_with_the_model_after_any_changes_of_columns(instance: Instance, layout: str) -> None:
    run_machine(Machine, instance, layout, EXAMPLES, STEPS)
