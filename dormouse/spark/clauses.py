"""The clauses of a merge in Spark SQL, over the rows `t` of a table and `s` of a source, and their checks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession
from pyspark.sql.functions import expr
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import BooleanType, DataType, StructType

from dormouse.data.arrow_schema import arrow_type, check_columns
from dormouse.errors import InvalidData, InvalidInput, InvalidQuery
from dormouse.model.edits import (
    Columns,
    Condition,
    Sql,
    When,
    WhenMatched,
    WhenNotMatched,
)
from dormouse.model.schema import Field, Schema
from dormouse.model.table import is_keyed
from dormouse.reading.where import unknown, value_of
from dormouse.spark.frames import backquoted
from dormouse.state.context import TableContext

Kind = Literal["matched", "not_matched", "by_source"]
Action = Literal["update", "insert", "delete", "nothing"]
TARGET, SOURCE = "t", "s"
"""The names of the rows of the table and of the source in conditions and expressions."""
_SEEN: Mapping[Kind, tuple[str, ...]] = {
    "matched": (TARGET, SOURCE),
    "not_matched": (SOURCE,),
    "by_source": (TARGET,),
}
"""The rows that the clauses of a kind have."""
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
            if rows not in _SEEN[kind]:
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
class Clause:
    """A clause. It sets columns to expressions, or to constants, which are Python values.

    `copied` has the columns that it sets to a column of the source, with that column.
    """

    kind: Kind
    action: Action
    condition: str | None = None
    expressions: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    copied: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Clauses:
    """The condition that joins rows of the table and of the source, and the clauses, in their order.

    `columns` are those of the table on which the choice of rows depends, and `joining` those of them that
    decide whether a row of the table is one of these rows at all. `tells_time` means that the choice may also
    depend on the time.
    """

    on: Expression
    listed: tuple[Clause, ...]
    columns: frozenset[str]
    joining: frozenset[str]
    tells_time: bool

    def having(self, kind: Kind) -> list[Clause]:
        return [one for one in self.listed if one.kind == kind]

    def are_new(self, schema: Schema) -> bool:
        """Returns whether rows that clauses insert have row keys that the table does not have."""
        equated = self.on.equated
        inserts = [one for one in self.having("not_matched") if one.action == "insert"]
        return not inserts or (
            self.on.is_equality
            and equated.keys() <= set(schema.row_key_names)
            and all(one.copied.get(name) == column for one in inserts for name, column in equated.items())
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
    return _Reader(context, made, source).read(on, when)


class _Reader:
    def __init__(self, context: TableContext, made: Expressions, source: StructType) -> None:
        self._what = f"merge into table {context.table.name!r}"
        self._context = context
        self._schema = context.schema
        self._made = made
        self._source = {one.name: one.dataType for one in source}
        self._conditions: list[tuple[Kind, Expression]] = []
        if len(self._source) < len(source):
            raise InvalidInput(f"{self._what}: a column comes twice in the source; rename one")

    def read(self, on: Any, when: Any) -> Clauses:
        joined = self._joining(on)
        given = [when] if isinstance(when, When) else when
        if isinstance(given, str) or not isinstance(given, Sequence):
            given = ()
        listed = [
            self._clause(f"{self._what}: clause {number}", one, joined) for number, one in enumerate(given, 1)
        ]
        if all(one.action == "nothing" for one in listed):
            raise InvalidInput(
                f"{self._what}: no clause updates, deletes or inserts; give dm.WhenMatched, "
                "dm.WhenNotMatched or dm.WhenNotMatchedBySource"
            )
        used = [joined, *(one for _, one in self._conditions)]
        first = [joined, *(one for kind, one in self._conditions if kind == "by_source")]
        tells_time = any(_TELLS_TIME.search(one.text) for one in used)
        return Clauses(joined, tuple(listed), _of_target(used), _of_target(first), tells_time)

    def _joining(self, on: Any) -> Expression:
        what = f"{self._what}: on"
        if isinstance(on, str) and on in self._schema:
            on = [on]
        if isinstance(on, Sequence) and not isinstance(on, str):
            names = [one.name for one in self._fields(what, on)]
            self._check_in_source(what, names)
            on = " AND ".join(f"{TARGET}.{backquoted(name)} = {SOURCE}.{backquoted(name)}" for name in names)
        return self._made.checked(what, _text(what, on), "matched", repeats=True)

    def _clause(self, what: str, clause: object, joined: Expression) -> Clause:
        if not isinstance(clause, When):
            raise InvalidInput(
                f"{what}: {clause!r} is no clause; use dm.WhenMatched, dm.WhenNotMatched or "
                "dm.WhenNotMatchedBySource"
            )
        if isinstance(clause, WhenNotMatched):
            where = self._where(what, clause.condition, "not_matched")
            if clause.insert is None:
                return Clause("not_matched", "nothing", where)
            values = self._values(what, clause.insert, "not_matched")
            self._check_has_all(what, {*values[0], *values[1]})
            return Clause("not_matched", "insert", where, *values)
        kind: Kind = "matched" if isinstance(clause, WhenMatched) else "by_source"
        where = self._where(what, clause.condition, kind)
        if clause.update is None:
            return Clause(kind, "delete" if clause.delete else "nothing", where)
        if clause.delete:
            raise InvalidInput(f"{what}: a clause updates or deletes, not both")
        expressions, constants, _ = self._values(what, clause.update, kind)
        if clause.update == "*":
            # a key that is equal in both stays as it is
            same = {name for name, other in joined.equated.items() if name == other}
            keys = same.intersection(self._schema.row_key_names)
            expressions = {name: text for name, text in expressions.items() if name not in keys}
        self._check_keys(what, {*expressions, *constants})
        return Clause(kind, "update", where, expressions, constants)

    def _where(self, what: str, condition: Condition, kind: Kind) -> str | None:
        if condition is None:
            return None
        found = self._made.checked(what, _text(what, condition), kind, repeats=True)
        self._conditions.append((kind, found))
        return found.text

    def _values(
        self, what: str, columns: Columns, kind: Kind
    ) -> tuple[dict[str, str], dict[str, Any], dict[str, str]]:
        """Returns `expressions`, `constants` and `copied` of a clause."""
        given: Mapping[str, Any] = columns if isinstance(columns, Mapping) else {}
        if not isinstance(columns, Mapping):
            if columns != "*" and (isinstance(columns, str) or not isinstance(columns, Sequence)):
                raise InvalidInput(f'{what}: {columns!r} is neither "*", nor columns, nor values by column')
            if kind == "by_source":
                raise InvalidInput(
                    f"{what}: without a row of the source, give new values as a dict by column"
                )
            listed = [one for one in self._schema.names if one in self._source] if columns == "*" else columns
            names = [one.name for one in self._fields(what, listed)]
            self._check_in_source(what, names)
            given = {name: Sql(f"{SOURCE}.{backquoted(name)}") for name in names}
        if not given:
            raise InvalidInput(f"{what}: it sets no column; name some")
        expressions, constants, copied, types = {}, {}, {}, {}
        for one in self._fields(what, given):
            if isinstance(value := given[one.name], Sql):
                found = self._made.checked(f"{what}: {one.name!r}", value.text, kind)
                expressions[one.name], types[one.name] = found.text, found.type
                if found.copied is not None:
                    copied[one.name] = found.copied
            else:
                constants[one.name] = _constant(what, one, value)
        _check_types(what, self._schema, types)
        return expressions, constants, copied

    def _fields(self, what: str, names: Iterable[object]) -> list[Field]:
        for name in names:
            if name not in self._schema:
                raise InvalidQuery(f"{what}: {unknown('column', name, self._schema.names)}")
        return [self._schema.field(str(name)) for name in names]

    def _check_in_source(self, what: str, names: Sequence[str]) -> None:
        if not names:
            raise InvalidInput(f"{what}: it names no column that both the table and the source have")
        for name in names:
            if name not in self._source:
                raise unknown("column", name, self._source, f"{what}: the source has no")

    def _check_has_all(self, what: str, names: set[str]) -> None:
        for name in self._schema.names:
            if name not in names and not self._schema.is_optional(name):
                raise InvalidQuery(
                    f"{what}: column {name!r} must not be null, and has no default: give it a value"
                )

    def _check_keys(self, what: str, names: Iterable[str]) -> None:
        keys = self._schema.row_key_names if is_keyed(self._context.properties) else ()
        if changed := next((name for name in names if name in keys), None):
            raise InvalidQuery(
                f"{what}: the table keeps one row for each key, and {changed!r} is a row key, which no "
                "update changes; delete the row and insert another"
            )


def _of_target(expressions: Iterable[Expression]) -> frozenset[str]:
    return frozenset(name for one in expressions for rows, name in one.columns if rows == TARGET)


def _text(what: str, condition: object) -> str:
    if isinstance(condition, Sql):
        return condition.text
    if not isinstance(condition, str) or not condition.strip():
        raise InvalidInput(f"{what}: give a condition in Spark SQL, not {condition!r}")
    return condition


def _constant(what: str, column: Field, value: Any) -> Any:
    """Returns a constant as a value of a column's type. Raises `InvalidQuery` if it does not fit."""
    if value is None and not column.nullable:
        raise InvalidQuery(f"{what}: column {column.name!r} must not be null")
    try:
        if value is None or column.type.is_nested:
            return pa.array([value], arrow_type(column.type))[0].as_py()
        return value_of(column, value)
    except InvalidQuery as error:
        raise InvalidQuery(f"{what}: {error}") from None
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        raise InvalidQuery(f"{what}: {column.name!r} is {column.type}, and {value!r} does not fit") from None


def _check_types(what: str, schema: Schema, types: Mapping[str, DataType]) -> None:
    """Raises `InvalidData` for expressions of types that do not fit their columns."""
    try:
        columns = [
            (one.name, to_arrow_type(types[one.name]) if one.name in types else arrow_type(one.type))
            for one in schema.fields
        ]
        check_columns(pa.schema(columns), schema)
    except (PySparkException, InvalidData) as error:
        raise InvalidData(f"{what}: {_first_line(error)}") from None
