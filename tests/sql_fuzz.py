"""Random tables, random changes of these tables, and statements that are checked between the changes.

A history is a list of steps. It can be printed, repeated, and made shorter while it still shows the fault.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain, islice
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias, TypeVar

import duckdb
import psycopg
import pyarrow as pa

import dormouse as dm
from dormouse.errors import DormouseError
from tests.inlining import INLINED_BYTES
from tests.sql_judges import Judges, Verdict
from tests.sql_statements import Writer
from tests.sql_values import KEYS, POOLS, TYPES, VALUES, Statement
from tests.support.api import Instance
from tests.support.model import DOUBLE, Field, Range, Schema, TableProperties
from tests.support.reading import arrow_schema

Row: TypeAlias = dict[str, Any]
EMPTY = "f"
"""The table that gets no rows."""
MARKS = "is_gone"
AGE = timedelta(days=3_650)
STEPS = 16
"""The number of steps in a round."""
SHRINKING_SECONDS = 60.0
INEXACT = {5e-324, 1e300, 2.0**53}
"""Doubles whose sum depends on the order of the additions."""
T = TypeVar("T")


@dataclass(frozen=True)
class Create:
    table: str
    schema: Schema
    properties: Mapping[str, Any]


@dataclass(frozen=True)
class Ingest:
    table: str
    rows: Sequence[Row]


@dataclass(frozen=True)
class Split:
    """A split of leaves with at least `threshold` rows."""

    table: str
    threshold: int


@dataclass(frozen=True)
class Compact:
    table: str


@dataclass(frozen=True)
class Delete:
    """A deletion of the rows whose key has one of some values, or a value in a range."""

    table: str
    key: str
    where: Sequence[Any] | Range


@dataclass(frozen=True)
class DeleteKeys:
    """A load of marks that delete the keys of rows from a keyed table."""

    table: str
    rows: Sequence[Row]


Step: TypeAlias = Create | Ingest | Split | Compact | Delete | DeleteKeys
History: TypeAlias = Sequence[Step]


def creations(random: Random) -> list[Create]:
    """Returns definitions of tables: plain ones, one that aggregates rows, one that filters rows by age, one
    that keeps the newest row of each key, and one that stays empty.
    """
    keyed = _schema(random)
    return [
        Create("a", _schema(random), _inlined(random)),
        Create("b", _schema(random), {"ingest_file_writing": "one_reference_per_leaf"}),
        _aggregated(_schema(random)),
        Create("d", _schema(random), {"filter": f"age_off(at, {AGE // timedelta(milliseconds=1)})"}),
        Create("e", Schema(keyed.row_keys, [], keyed.values), {"keep": "newest_row", **_inlined(random)}),
        Create(EMPTY, _schema(random), {}),
    ]


def _inlined(random: Random) -> dict[str, Any]:
    """Returns the properties of a table whose small files may be inlined."""
    return {"inline_bytes_max": random.choice((0, INLINED_BYTES))}


def steps(random: Random, made: Sequence[Create]) -> Iterator[Step]:
    """Yields random steps without end."""
    while True:
        one = random.choice([table for table in made if table.table != EMPTY])
        rows = [row(random, one) for _ in range(random.choice((1, 4, 15)))]
        kinds = [Ingest(one.table, rows), Split(one.table, 4), Compact(one.table), _deletion(random, one)]
        if "keep" in one.properties:
            kinds[-1] = DeleteKeys(one.table, rows[:4])
        yield from random.choices(kinds, (10, 8, 2, 3))


def _deletion(random: Random, made: Create) -> Delete:
    key = random.choice(made.schema.row_keys)
    some = sorted(random.sample(POOLS[key.type], 2))
    where = random.choice(
        (some[:1], some, Range(*some), Range(some[0], max_inclusive=True), Range(max=some[1]))
    )
    return Delete(made.table, key.name, where)


def row(random: Random, made: Create) -> Row:
    """Returns a random row.

    Doubles that a query may sum have the same sum in any order, because a join may compare the sums.
    """
    is_summed = "sum(" in made.properties.get("aggregate", "")

    def value(field: Field) -> Any:
        if field.nullable and random.random() < 0.2:
            return None
        pool = POOLS[field.type]
        return random.choice(
            [x for x in pool if x not in INEXACT] if is_summed and field.type == DOUBLE else pool
        )

    return {one.name: value(one) for one in made.schema.fields}


def _schema(random: Random) -> Schema:
    keys = random.sample(KEYS, random.randrange(1, 4))
    sort_keys = random.sample([name for name in KEYS if name not in keys], random.randrange(2))
    values = {"at", *random.sample(VALUES, random.randrange(3, len(VALUES)))}
    return Schema(
        [Field(name, TYPES[name]) for name in keys],
        [Field(name, TYPES[name]) for name in sort_keys],
        [Field(name, TYPES[name], random.random() < 0.7) for name in VALUES if name in values],
    )


def _aggregated(schema: Schema) -> Create:
    kept = [one for one in schema.values if not one.type.is_nested]
    functions = {
        one.name: "sum" if one.type == DOUBLE else ("min", "max")[n % 2] for n, one in enumerate(kept)
    }
    aggregate = ", ".join(f"{function}({name})" for name, function in functions.items())
    return Create("c", Schema(schema.row_keys, schema.sort_keys, kept), {"aggregate": aggregate})


def merged(schema: Schema, aggregate: str, rows: Sequence[Row]) -> list[Row]:
    """Returns one row for each key, merged by an `aggregate` property; NaN counts as the largest number."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for one in rows:
        groups[tuple(one[name] for name in schema.key_names)].append(one)
    functions = [(name, _FUNCTIONS[function]) for function, name in re.findall(r"(\w+)\((\w+)\)", aggregate)]
    return [
        dict(zip(schema.key_names, key, strict=True))
        | {name: _of_known(function, [one[name] for one in group]) for name, function in functions}
        for key, group in groups.items()
    ]


def _of_known(function: Callable[[list[Any]], Any], values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    return function(known) if known else None


def _matches(row: Row, step: Delete) -> bool:
    value = row[step.key]
    return step.where.contains(value) if isinstance(step.where, Range) else value in step.where


def _place(value: Any) -> tuple[bool, Any]:
    return value != value, value


_FUNCTIONS: Mapping[str, Callable[[list[Any]], Any]] = {
    "sum": sum,
    "min": lambda values: min(values, key=_place),
    "max": lambda values: max(values, key=_place),
}


class Lake:
    """All tables of an instance, and the rows that they should have."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self.as_of: datetime | None = None
        """The moment at which statements read the tables; None for the present."""
        self._created: dict[str, Create] = {}
        self._rows: dict[str, list[Row]] = {}
        for table in instance.tables():
            instance.drop_table(table.name)

    def do(self, step: Step) -> None:
        if isinstance(step, Create):
            fixed = {"split_min_rows": 2, "compaction_strategy": "basic", "compaction_batch_files": 2}
            properties = TableProperties(**step.properties, **fixed)
            self._instance.create_table(step.table, step.schema, properties=properties)
            self._created[step.table], self._rows[step.table] = step, []
            return
        table = self._instance.table(step.table)
        if isinstance(step, Ingest):
            table.ingest(self._arrow(step.table, step.rows), engine="local")
            self._rows[step.table] += step.rows
        elif isinstance(step, Delete):
            table.delete({step.key: step.where if isinstance(step.where, Range) else [*step.where]})
            self._rows[step.table] = [row for row in self._rows[step.table] if not _matches(row, step)]
        elif isinstance(step, DeleteKeys):
            marks = pa.array([True] * len(step.rows))
            table.upsert(
                self._arrow(step.table, step.rows).append_column(MARKS, marks), MARKS, engine="local"
            )
            self._rows[step.table] += [one | {MARKS: True} for one in step.rows]
        elif isinstance(step, Split):
            table.set_properties(split_threshold_rows=step.threshold)
            table.split()
        else:
            errors = table.compact(engine="local").errors
            assert not errors, errors

    def tables(self) -> dict[str, pa.Table]:
        """Returns the rows that each table should have."""
        return {name: self._arrow(name, self._expected(name)) for name in self._rows}

    def has(self, table: str, rows: Sequence[Row]) -> None:
        """Replaces the rows that a table should have, after an edit."""
        self._rows[table] = [*rows]

    def answer(self, statement: Statement) -> pa.Table:
        answer = self._instance.sql(statement.text, statement.parameters, as_of=self.as_of)
        return answer.read_all()

    def _expected(self, table: str) -> list[Row]:
        created, rows = self._created[table], self._rows[table]
        if "filter" in created.properties:
            oldest = datetime.now(UTC) - AGE
            rows = [one for one in rows if one["at"] is None or one["at"] > oldest]
        if "keep" in created.properties:
            newest = {tuple(one[name] for name in created.schema.key_names): one for one in rows}
            rows = [one for one in newest.values() if MARKS not in one]
        aggregate = created.properties.get("aggregate")
        return merged(created.schema, aggregate, rows) if aggregate else rows

    def _arrow(self, table: str, rows: Sequence[Row]) -> pa.Table:
        return pa.Table.from_pylist(list(rows), schema=arrow_schema(self._created[table].schema))


@dataclass
class Tally:
    """The number of statements with each outcome."""

    asked: int = 0
    refused: int = 0
    by_postgres: int = 0


class Fuzz:
    """A runner of random histories on an instance, with statements between the steps."""

    def __init__(self, instance: Instance, judges: Judges) -> None:
        self.instance = instance
        self._judges = judges

    def run(self, seed: int, rounds: int, statements: int) -> Tally:
        """Runs random histories and statements; returns the number of statements with each outcome.

        For a wrong answer, raises AssertionError with a script that reproduces it.
        """
        random, tally = Random(seed), Tally()
        lake, made = Lake(self.instance), creations(random)
        history: list[Step] = []
        todo = chain(made, steps(random, made))
        writer = Writer(random, {one.table: {f.name: f.type for f in one.schema.fields} for one in made})
        for number in range(rounds):
            before, tables = datetime.now(UTC), lake.tables()
            for step in islice(todo, STEPS):
                history.append(step)
                try:
                    lake.do(step)
                except Exception as error:
                    error.add_note(f"seed {seed}, {len(history)} steps, the last one of {step.table}")
                    raise
            self._judges.learn(lake.tables())
            for _ in range(statements):
                verdict = self.ask(lake, history, writer.statement())
                tally.asked += 1
                tally.refused += verdict.refused
                tally.by_postgres += verdict.by_postgres
            if number:
                self._ask_at(lake, before, tables, [writer.statement() for _ in range(statements // 4)])
        return tally

    def _ask_at(
        self, lake: Lake, moment: datetime, tables: Mapping[str, pa.Table], statements: Sequence[Statement]
    ) -> None:
        """Checks statements over the tables as they were at a moment."""
        self._judges.learn(tables)
        lake.as_of = moment
        try:
            for statement in statements:
                verdict = self._judges.verdict(_answer(lake, statement), statement)
                assert not verdict.wrong, f"{statement} at an earlier moment: {verdict.wrong}"
        finally:
            lake.as_of = None

    def ask(self, lake: Lake, history: History, statement: Statement) -> Verdict:
        """Checks one statement after a history; raises an AssertionError like that of `run`."""
        verdict = self._verdict(lake, statement)
        if verdict.wrong:
            raise AssertionError(script(self._shrunk(history, statement), statement, verdict.wrong))
        return verdict

    def _shrunk(self, history: History, statement: Statement) -> History:
        """Returns the fewest steps and rows found in SHRINKING_SECONDS that still show the fault."""
        end = time.monotonic() + SHRINKING_SECONDS

        def wrong(steps: Sequence[Step]) -> bool:
            return time.monotonic() < end and self._wrong(steps, statement)

        kept = _fewest(history, wrong)
        for place, step in enumerate(kept):
            if isinstance(step, Ingest):
                before, table, after = kept[:place], step.table, kept[place + 1 :]
                rows = _fewest(step.rows, lambda rows: wrong([*before, Ingest(table, rows), *after]))  # noqa: B023 called at once
                kept[place] = Ingest(table, rows)
        return kept

    def _wrong(self, history: History, statement: Statement) -> bool:
        """Returns whether a statement gets a wrong answer after a history; False if the history cannot be
        repeated.
        """
        with suppress(DormouseError, duckdb.Error, psycopg.Error, KeyError):
            lake = Lake(self.instance)
            for step in history:
                lake.do(step)
            self._judges.learn(lake.tables())
            return self._verdict(lake, statement).wrong is not None
        return False

    def _verdict(self, lake: Lake, statement: Statement) -> Verdict:
        ours = _answer(lake, statement)
        verdict = self._judges.verdict(ours, statement)
        if verdict.wrong and isinstance(ours, pa.Table):
            with suppress(duckdb.Error):
                if self._judges.contradict_themselves(self.instance, ours, statement):
                    return Verdict(refused=True)
        return verdict


def _fewest(items: Sequence[T], wrong: Callable[[list[T]], bool]) -> list[T]:
    """Returns the items that are left after removing all that is not needed for `wrong` to be true.

    Parts are removed in ever smaller sizes, down to one item.
    """
    kept, size = [*items], len(items)
    while size:
        for first in reversed(range(0, len(kept), size)):
            fewer = kept[:first] + kept[first + size :]
            if wrong(fewer):
                kept = fewer
        size //= 2
    return kept


def _answer(lake: Lake, statement: Statement) -> pa.Table | Exception:
    try:
        return lake.answer(statement)
    except Exception as error:
        return error


def script(history: History, statement: Statement, wrong: str) -> str:
    """Returns a script that reproduces a wrong answer."""
    done = "".join(f"    {step!r},\n" for step in history)
    answers = wrong.replace("\n", "\n# ")
    return f"""# PYTHONPATH=. python script.py
# {answers}
import datetime
from math import inf, nan

from dormouse.model.region import Range
from dormouse.model.schema import Field, Schema
from dormouse.model.types import *
from tests.sql_fuzz import Compact, Create, Delete, DeleteKeys, Ingest, Split, reproduce
from tests.sql_values import Statement

reproduce([
{done}], {statement!r})
"""


def reproduce(history: History, statement: Statement) -> None:
    """Repeats a history in a new instance, and prints both answers."""
    with TemporaryDirectory() as folder, dm.local(Path(folder) / "lake") as instance:
        lake, judges = Lake(instance), Judges()
        for step in history:
            lake.do(step)
        judges.learn(lake.tables())
        answer = _answer(lake, statement)
        print(answer, judges.verdict(answer, statement).wrong, sep="\n")
