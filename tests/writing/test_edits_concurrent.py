"""Edits of two tables by threads: the tables have the rows that the same edits give one after another.

Readers, consumers and readers of earlier moments see only rows that the tables have between two edits.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from itertools import pairwise
from random import Random
from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.errors import CutExpired, EditConflict, ObjectNotFound, QueryOvertaken
from tests.edit_model import (
    ARROW,
    COLUMNS,
    EVERY,
    KEYED,
    REFUSED,
    SMALL,
    Bound,
    Dice,
    Operation,
    Row,
    create,
    exact,
    filled,
    in_order,
)
from tests.small_tables import clock
from tests.stored import at_once
from tests.support.api import Instance, Table
from tests.support.state import LAYOUTS
from tests.tiers import by_tier

CLOCK = dm.Schema(
    [dm.Field("k", dm.LONG)], values=[dm.Field("n", dm.LONG), dm.Field("who", dm.STRING, nullable=True)]
)
SECONDS_MAX = 600.0
State = dict[str, list[Row]]


@dataclass
class Race:
    """The threads' edits. Each is a transaction that also adds 1 to a clock and notes its id there.

    `made` has the operations of each acknowledged edit, by its id; `seen` has reads of all tables, each with
    the clock's number.
    """

    instance: Instance
    seed: int
    made: dict[str, Sequence[Operation]] = field(default_factory=dict)
    seen: list[tuple[int, dict[str, list[tuple[Any, ...]]]]] = field(default_factory=list)
    moments: list[Any] = field(default_factory=list)
    fed: dict[str, list[list[tuple[Any, ...]]]] = field(default_factory=lambda: {KEYED: [], EVERY: []})
    over: threading.Event = field(default_factory=threading.Event)

    def edit(self, thread: int, times: int) -> None:
        dice = Dice(Random(f"{self.seed} {thread}"))
        for number in range(times):
            edit_id = f"{thread}-{number}"
            names = dice.pick([(KEYED,), (EVERY,), (KEYED, EVERY), (EVERY, KEYED)])
            operations = [dice.operation(name, COLUMNS) for name in names]
            while True:
                try:
                    self._apply(edit_id, operations)
                    self.made[edit_id] = operations
                except EditConflict:
                    continue
                except REFUSED:  # two rows of a source match one row, as the rows are now
                    pass
                break

    def _apply(self, edit_id: str, operations: Sequence[Operation]) -> None:
        with self.instance.transaction(edit_id) as transaction:
            transaction.update("clock", {"k": 0}, {"n": dm.sql("n + 1"), "who": edit_id})
            for one in operations:
                one.to(Bound(transaction, one.name))

    def maintain(self) -> None:
        while not self.over.wait(0.01):
            for name in (KEYED, EVERY, "clock"):
                table = self.instance.table(name)
                assert not table.compact(engine="local").errors
                table.split()
                table.merge()
                table.collect_garbage()

    def look(self) -> None:
        while not self.over.wait(0.02):
            self.seen.append(self._read())
            self.moments.append(clock(self.instance))

    def look_back(self) -> None:
        while not self.over.wait(0.05):
            if self.moments:
                try:
                    self.seen.append(self._read(random.choice(self.moments)))
                except CutExpired:
                    continue

    def _read(self, as_of: Any = None) -> tuple[int, dict[str, list[tuple[Any, ...]]]]:
        """Reads all tables by one statement."""
        listed = ", ".join(f'"{name}"' for name in COLUMNS)
        text = (
            "select 'clock' as of, n as k, " + ", ".join(f'null as "{name}"' for name in COLUMNS[1:]) + " "
            f"from clock union all select '{KEYED}', {listed} from {KEYED} "
            f"union all select '{EVERY}', {listed} from {EVERY}"
        )
        while True:
            try:
                rows = self.instance.sql(text, as_of=as_of).read_all().to_pylist()
                break
            except (ObjectNotFound, QueryOvertaken):  # files are collected without a delay
                continue
        [number] = [row["k"] for row in rows if row["of"] == "clock"]
        return number, {
            name: in_order([row for row in rows if row["of"] == name], COLUMNS) for name in (KEYED, EVERY)
        }

    def consume(self, name: str) -> None:
        """Applies the changes that a consumer gets to a copy of the rows, and notes each copy."""
        consumer, copy = self.instance.table(name).consumer("copy"), list[tuple[Any, ...]]()
        is_over = False
        while not is_over:
            is_over = self.over.wait(0.01)
            for change in consumer.read().read_all().to_pylist():
                row = exact(change, COLUMNS)
                if name == KEYED:
                    copy = [one for one in copy if one[0] != row[0]]
                elif change["_change"] == "delete":
                    copy.remove(row)
                if change["_change"] != "delete":
                    copy.append(row)
            consumer.acknowledge()
            self.fed[name].append(sorted(copy))

    def order(self) -> list[str]:
        """Returns the ids of the edits in the order of their commits, which the clock's changes tell."""
        changes = self.instance.table("clock").changes(None).read_all().to_pylist()
        ticks = sorted((row["n"], row["who"]) for row in changes if row["_change"] == "insert")
        assert [n for n, _ in ticks] == list(range(len(ticks))), "a tick was lost"
        return [who for _, who in ticks[1:]]

    def check(self) -> None:
        """Replays the edits one after another, and compares the rows that were read."""
        order = self.order()
        assert sorted(order) == sorted(self.made)
        state: State = {KEYED: [], EVERY: []}
        states = [_rows_of_state(state)]
        for edit_id in order:
            for one in self.made[edit_id]:
                done = one.on(state[one.name], COLUMNS)
                assert not done.is_refused
                state[one.name] = done.rows
            states.append(_rows_of_state(state))
        assert self._read() == (len(order), states[-1])
        for number, found in self.seen:
            assert found == states[number], f"after {number} edits"
        for name, copies in self.fed.items():
            at = 0
            for copy in copies:
                while at < len(states) and states[at][name] != copy:
                    at += 1
                assert at < len(states), f"the changes of {name} give rows that it never had"
            assert copies[-1] == states[-1][name]


def _rows_of_state(state: State) -> dict[str, list[tuple[Any, ...]]]:
    return {name: in_order([filled(row, COLUMNS) for row in rows], COLUMNS) for name, rows in state.items()}


def race(instance: Instance, layout: str, seed: int, threads: int, times: int) -> None:
    """Runs edits by threads, with readers and maintenance beside them, and checks what they did."""
    for kind in (KEYED, EVERY):
        create(instance, kind, kind, layout, gc_delay_seconds=5).consumer("copy")
    properties = dm.TableProperties(**{**SMALL, "gc_delay_seconds": 5})  # type: ignore[arg-type]
    instance.create_table("clock", CLOCK, layout=layout, properties=properties)
    instance.table("clock").ingest(pa.table({"k": [0], "n": [0], "who": [""]}))
    found = Race(instance, seed)
    beside = [found.maintain, found.look, found.look_back]
    beside += [lambda name=name: found.consume(name) for name in (KEYED, EVERY)]  # type: ignore[misc]
    failed: list[BaseException] = []
    running = [threading.Thread(target=_noting(work, failed)) for work in beside]
    for thread in running:
        thread.start()
    try:
        outcomes = at_once(*[lambda n=n: found.edit(n, times) for n in range(threads)])
    finally:
        found.over.set()
        for thread in running:
            thread.join(SECONDS_MAX)
    assert outcomes == [None] * threads
    assert failed == []
    found.check()
    for name in (KEYED, EVERY):
        while instance.table(name).compact(engine="local", full=True).jobs_run:
            pass
    found.check()
    assert instance.check(deep=True).problems == ()


def _noting(work: Callable[[], None], failed: list[BaseException]) -> Callable[[], None]:
    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    return run


def test_edits_by_threads_have_an_order(instance: Instance) -> None:
    race(instance, "file_table", seed=1, threads=3, times=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_edits_by_threads_have_an_order(instance: Instance, layout: str, seed: int) -> None:
    race(instance, layout, seed, threads=4, times=12)


ROWS = 12


def mark(instance: Instance, tables: Sequence[str], name: str, low: int, high: int) -> None:
    """Appends a name to the text of the rows with keys in a range, in one transaction."""
    values = {"s": dm.sql(f"s || '{name},'")}
    while True:
        try:
            with instance.transaction(name) as transaction:
                for table in tables:
                    transaction.update(table, {"k": dm.Range(low, high)}, values)
            return
        except EditConflict:
            continue


def marked(table: Table) -> dict[int, list[str]]:
    rows = table.query(columns=["k", "s"]).read_all().to_pylist()
    assert len(rows) == ROWS
    return {row["k"]: row["s"].split(",")[:-1] for row in rows}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_edits_of_ranges_that_overlap_have_an_order_without_a_clock(instance: Instance, layout: str) -> None:
    """Each edit appends its name to rows, so that each row tells in which order its edits came."""
    row = dict.fromkeys(COLUMNS) | {"t": 0, "s": ""}
    schema = pa.schema([ARROW.field(name) for name in COLUMNS])
    rows = pa.Table.from_pylist([{**row, "k": key} for key in range(ROWS)], schema=schema)
    for kind in (KEYED, EVERY):
        create(instance, kind, kind, layout, split_threshold_rows=1_000).ingest(rows)
    expected: dict[tuple[str, int], set[str]] = {}

    def work(thread: int) -> None:
        dice = Random(thread)
        for number in range(by_tier(3, 6)):
            name, low = f"{thread}-{number}", dice.randrange(ROWS)
            high = min(ROWS, low + dice.choice([1, 1, 3, 6]))
            tables = dice.sample([KEYED, EVERY], dice.choice([1, 2]))
            for table in tables:
                for key in range(low, high):
                    expected.setdefault((table, key), set()).add(name)
            mark(instance, tables, name, low, high)

    def maintain() -> None:
        for _ in range(4):
            for kind in (KEYED, EVERY):
                assert not instance.table(kind).compact(engine="local").errors

    outcomes = at_once(*[lambda n=n: work(n) for n in range(4)], maintain)
    assert outcomes == [None] * 5
    before: dict[str, set[str]] = {}
    for kind in (KEYED, EVERY):
        for key, names in marked(instance.table(kind)).items():
            assert len(names) == len(set(names)), "an edit was made twice"
            assert set(names) == expected.get((kind, key), set()), "an edit was lost"
            for earlier, later in pairwise(names):
                before.setdefault(later, set()).add(earlier)
    TopologicalSorter(before).prepare()  # raises CycleError if no order gives these rows
