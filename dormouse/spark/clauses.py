"""The clauses of a merge in Spark SQL, over the rows `t` of a table and `s` of a source, and their checks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession
from pyspark.sql.functions import expr
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import BooleanType, DataType, StructType

from dormouse.data.arrow_schema import check_columns
from dormouse.errors import InvalidData, InvalidInput, InvalidQuery
from dormouse.model.edits import SOURCE, TARGET, Sql
from dormouse.model.schema import Field, Schema
from dormouse.sources.source import unkeyed
from dormouse.spark.frames import backquoted
from dormouse.state.context import TableContext
from dormouse.writing.edit_rules import SEEN, Clause, ClauseReader, Kind, read_on

_INTEGERS = {"byte", "short", "integer", "long"}
_TELLS_TIME = re.compile(r"current_|curdate|\bnow\b|localtime|unix_timestamp", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Expression:
    """A checked expression.

    `columns` are pairs: the name of the rows, and that of the column. `equated` has columns of the table with
    those of the source that are equal to them, without a conversion, wherever the expression is true;
    `is_equality` means that it is true wherever these are equal. For an expression that is only a column of
    the source, `copied` is that column.
    """

    text: str
    type: DataType
    columns: frozenset[tuple[str, str]]
    equated: Mapping[str, str]
    is_equality: bool
    copied: str | None


class Expressions:
    """The columns of the table and of the source, for checks of expressions. Call it on a thread of Spark."""

    def __init__(self, spark: SparkSession, target: StructType, source: StructType) -> None:
        rows, others = (
            spark.createDataFrame([], columns).alias(name)
            for name, columns in ((TARGET, target), (SOURCE, source))
        )
        self._pairs = rows.crossJoin(others)

    def checked(self, what: str, text: str, kind: Kind, *, repeats: bool = False) -> Expression:
        """Checks an expression over the rows that the clauses of a kind have.

        With `repeats`, it must be a condition that has the same value each time. Raises `InvalidQuery`.
        """
        try:
            with _unlogged():
                made = self._pairs.select(expr(text))
            [kind_of] = [one.dataType for one in made.schema]
            plan = made._jdf.queryExecution().analyzed()
            is_one = plan.nodeName() == "Project" and plan.children().head().nodeName() == "Join"
            found = plan.expressions().head()
        except (PySparkException, ValueError) as error:
            raise InvalidQuery(f"{what}: {text!r} is no expression: {_first_line(error)}") from None
        if not is_one or plan.subqueriesAll().nonEmpty():
            raise InvalidQuery(
                f"{what}: {text!r} is over many rows; an expression is over one row, and has no aggregates, "
                "windows or subqueries"
            )
        columns = frozenset(_columns(plan.references()))
        for rows, name in columns:
            if rows not in SEEN[kind]:
                raise InvalidQuery(
                    f"{what}: {text!r} names {rows}.{name}, and such a clause has no row {rows}"
                )
        if repeats and kind_of != BooleanType():
            raise InvalidQuery(f"{what}: {text!r} is {kind_of.simpleString()}, not a condition")
        if repeats and not found.deterministic():
            raise InvalidQuery(f"{what}: {text!r} has another value each time, so it cannot select rows")
        plain = found.child() if found.nodeName() == "Alias" else found
        copied = None
        if plain.nodeName() == "AttributeReference":
            copied = next((name for rows, name in columns if rows == SOURCE), None)
        pairs = [*_equated(found)]
        equated = dict(filter(None, pairs))
        return Expression(text, kind_of, columns, equated, len(equated) == len(pairs), copied)


@contextmanager
def _unlogged() -> Iterator[None]:
    """Keeps PySpark from logging the stack trace of a wrong expression, since its error has one line."""
    logger = PySparkLogger.getLogger("SQLQueryContextLogger")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _columns(attributes: Any) -> Iterator[tuple[str, str]]:
    """Yields the rows and the column of each of Spark's attributes."""
    each = attributes.iterator()
    while each.hasNext():
        one = each.next()
        yield one.qualifier().mkString("."), one.name()


def _equated(expression: Any) -> Iterator[tuple[str, str] | None]:
    """Yields for each part of a condition the columns of the table and of the source that it equates.

    Yields None for another part, and for columns that are converted first.
    """
    name = expression.nodeName()
    if name == "Alias":
        yield from _equated(expression.child())
    elif name == "And":
        yield from _equated(expression.left())
        yield from _equated(expression.right())
    elif name == "EqualTo":
        sides = [_uncast(one) for one in (expression.left(), expression.right())]
        if all(one.nodeName() == "AttributeReference" for one in sides):
            columns = dict(pair for one in sides for pair in _columns(one.references()))
            yield (columns[TARGET], columns[SOURCE]) if len(columns) == len(sides) else None
        else:
            yield None
    else:
        yield None


def _uncast(expression: Any) -> Any:
    """Returns an integer without its cast to a wider type."""
    if expression.nodeName() == "Cast":
        kinds = {one.dataType().typeName() for one in (expression, expression.child())}
        return expression.child() if kinds <= _INTEGERS else expression
    return expression


def _first_line(error: Exception) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


@dataclass(frozen=True, slots=True)
class Value:
    """A new value of a column: an expression, or without one a constant, which is a Python value.

    For an expression that is only a column of the source, `copied` is that column.
    """

    expression: str | None = None
    constant: Any = None
    copied: str | None = None


@dataclass(frozen=True, slots=True)
class Clauses:
    """The condition that joins rows of the table and of the source, and the clauses, in their order.

    `columns` are those of the table on which the choice of rows depends, and `joining` those of them that
    decide whether a row of the table is one of these rows at all. `tells_time` means that the choice may also
    depend on the time.
    """

    on: Expression
    listed: tuple[Clause[Value], ...]
    columns: frozenset[str]
    joining: frozenset[str]
    tells_time: bool

    def having(self, kind: Kind) -> list[Clause[Value]]:
        return [one for one in self.listed if one.kind == kind]

    def are_new(self, schema: Schema) -> bool:
        """Returns whether rows that clauses insert have row keys that the table does not have."""
        equated = self.on.equated
        inserts = [one for one in self.having("not_matched") if one.action == "insert"]
        return not inserts or (
            self.on.is_equality
            and equated.keys() <= set(schema.row_key_names)
            and all(one.values[name].copied == column for one in inserts for name, column in equated.items())
        )

    @property
    def reads_all(self) -> bool:
        """True if rows of the table are changed that no row of the source matches."""
        return any(one.action != "nothing" for one in self.having("by_source"))

    @property
    def join(self) -> str:
        """The kind of the join of the table and the source that has all rows which clauses may change."""
        inserts = any(one.action != "nothing" for one in self.having("not_matched"))
        return {(False, False): "inner", (True, False): "right", (False, True): "left"}.get(
            (inserts, self.reads_all), "full"
        )


def clauses_of(context: TableContext, made: Expressions, source: StructType, on: Any, when: Any) -> Clauses:
    """Returns the clauses of a merge, checked against the columns of the table and of the source.

    Raises `InvalidInput`, and `InvalidQuery` and `InvalidData` for what does not fit the columns.
    """
    what, schema, names = f"merge into table {context.table.name!r}", context.schema, set(source.names)
    if len(names) < len(source):
        raise InvalidInput(f"{what}: a column comes twice in the source; rename one")
    given = read_on(what, schema, names, on, backquoted)
    joined = made.checked(f"{what}: on", given.text, "matched", repeats=True)
    equal = {name for name, column in joined.equated.items() if name == column}
    engine = _Engine(schema, made)
    reader = ClauseReader[Value](engine, what, context, names, equal.intersection(schema.row_key_names))
    listed = tuple(reader.read(when))
    used = [joined, *(one for _, one in engine.conditions)]
    first = [joined, *(one for kind, one in engine.conditions if kind == "by_source")]
    tells_time = any(_TELLS_TIME.search(one.text) for one in used)
    return Clauses(joined, listed, _of_target(used), _of_target(first), tells_time)


class _Engine:
    """The checks of `edit_rules.Engine` by Spark, which keep the checked conditions."""

    def __init__(self, schema: Schema, made: Expressions) -> None:
        self._schema = schema
        self._made = made
        self.conditions: list[tuple[Kind, Expression]] = []

    def condition(self, what: str, given: Sql, kind: Kind) -> str:
        found = self._made.checked(what, given.text, kind, repeats=True)
        self.conditions.append((kind, found))
        return found.text

    def expression(self, what: str, column: Field, given: Sql, kind: Kind) -> Value:
        found = self._made.checked(what, given.text, kind)
        try:
            kinds = pa.schema([(column.name, to_arrow_type(found.type))])
            check_columns(kinds, unkeyed([column]))
        except (PySparkException, InvalidData) as error:
            raise InvalidData(f"{what}: {_first_line(error)}") from None
        return Value(found.text, copied=found.copied)

    def constant(self, column: Field, value: Any) -> Value:
        return Value(constant=value)

    def of_source(self, what: str, column: Field) -> Value:
        given = Sql(f"{SOURCE}.{backquoted(column.name)}")
        return self.expression(f"{what}: {column.name!r}", column, given, "matched")

    def left_out(self, what: str, column: Field) -> Value:
        # a task would find it only after the rows were read and joined
        if not self._schema.is_optional(column.name):
            raise InvalidQuery(
                f"{what}: column {column.name!r} must not be null, and has no default: give it a value"
            )
        return Value(constant=self._schema.default(column.name))


def _of_target(expressions: Iterable[Expression]) -> frozenset[str]:
    return frozenset(name for one in expressions for rows, name in one.columns if rows == TARGET)
