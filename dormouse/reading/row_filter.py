"""The conditions that select the rows of files, as one filter for all engines: slices, deletions, conditions.

A filter is a tree of tests on columns, made only from a plan and a question. `rendered` turns it into an
expression of an engine, which supplies its language's form of each node. `PLAIN` is an engine that tests rows
in Python; tests compare the other engines with it.

A filter has SQL's three values: a test of a null column is unknown, and a row counts if its filter is true.
The values of a column have one order: -0.0 equals 0.0, and NaN is the largest number and equals itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import and_, ge, gt, le, lt, or_
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dormouse.model.loops import joined
from dormouse.model.region import KeyRanges, KeyValue, Range
from dormouse.model.schema import Field, Schema

if TYPE_CHECKING:
    from dormouse.reading.where import Condition, Deletion

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class InRanges:
    """A test that a column lies in at least one of `ranges`. Without ranges it is false.

    Each range is bounded below, above, or on both sides.
    """

    field: Field
    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class IsNull:
    """A test that a column is null."""

    field: Field


@dataclass(frozen=True, slots=True)
class Every:
    """A test that a row meets all of `parts`. Without parts it is true."""

    parts: tuple[Filter, ...]


@dataclass(frozen=True, slots=True)
class Some:
    """A test that a row meets at least one of `parts`, of which there is at least one."""

    parts: tuple[Filter, ...]


@dataclass(frozen=True, slots=True)
class Fails:
    """A test that a filter is false or unknown for a row."""

    part: Filter


@dataclass(frozen=True, slots=True)
class Given:
    """An expression written for one engine, such as a test of the file from which a row comes."""

    expression: Any


Filter = InRanges | IsNull | Every | Some | Fails | Given
EVERY_ROW = Every(())
SIGNS = {"<": lt, "<=": le, ">": gt, ">=": ge}


def in_slices(schema: Schema, slices: Iterable[KeyRanges]) -> Filter:
    """Returns the filter of rows that lie in any of the slices; keys are never null."""
    found = [_in_slice(schema, ranges) for ranges in slices]
    return EVERY_ROW if EVERY_ROW in found else some(found)


def _in_slice(schema: Schema, ranges: KeyRanges) -> Filter:
    named = [field for field in schema.row_keys if field.name in ranges]
    bounded = [field for field in named if Range() not in ranges[field.name]]
    return every(InRanges(field, tuple(ranges[field.name])) for field in bounded)


def meets(condition: Condition) -> Filter:
    """Returns the filter of rows that meet a condition."""
    null = IsNull(condition.field)
    if Range() in condition.ranges:
        return EVERY_ROW if condition.or_null else Fails(null)
    found = InRanges(condition.field, condition.ranges)
    return Some((found, null)) if condition.or_null else found


def is_of(schema: Schema, deletion: Deletion) -> Filter:
    """Returns the filter of rows that a deletion matches."""
    return every([in_slices(schema, [deletion.ranges]), *map(meets, deletion.conditions)])


def remains(
    schema: Schema, deletions: Iterable[Deletion], where: Callable[[Deletion], Filter] = lambda _: EVERY_ROW
) -> Filter:
    """Returns the filter of rows that no deletion matches.

    `where` returns the filter of the rows to which a deletion applies, such as the rows of some files.
    """
    gone = [every([where(one), is_of(schema, one)]) for one in deletions]
    return Fails(some(gone)) if gone else EVERY_ROW


def after(fields: Sequence[Field], key: Sequence[KeyValue], *, inclusive: bool) -> Filter:
    """Returns the filter of rows that sort after `key` by `fields`; with `inclusive` also rows of the key."""
    first = InRanges(fields[0], (Range(key[0]),))
    beyond = InRanges(fields[0], (Range(key[0], min_inclusive=False),))
    if len(fields) == 1:
        return first if inclusive else beyond
    # as a part of its own, the bound of the first field prunes row groups
    return every([first, some([beyond, after(fields[1:], key[1:], inclusive=inclusive)])])


def parted(
    deletions: Sequence[Deletion], *, hides: bool
) -> tuple[tuple[Deletion, ...], tuple[Deletion, ...]]:
    """Divides the deletions of a keyed table's file into two groups.

    A row that a deletion of the first group matches must still be read, because it hides older rows of its
    key. A row that the second group matches is left out when the file is read.

    `hides` is true if a column decides which row of a key is the newest. An older row may then be in a file
    that came later, to which the deletion does not apply. So the deleted row must hide it. Without `hides`,
    the deletion also applies to all older rows. Rows removed by an erasure hide nothing.
    """
    hiding = tuple(one for one in deletions if hides and not one.is_erasure)
    return hiding, tuple(one for one in deletions if not hides or one.is_erasure)


def every(parts: Iterable[Filter]) -> Filter:
    """Returns the filter of rows that meet all parts."""
    left = tuple(part for part in parts if part != EVERY_ROW)
    return left[0] if len(left) == 1 else Every(left)


def some(parts: Sequence[Filter]) -> Filter:
    """Returns the filter of rows that meet any of the parts; without parts, no row does."""
    if not parts:
        return Fails(EVERY_ROW)
    return parts[0] if len(parts) == 1 else Some(tuple(parts))


class Engine(Protocol[T]):
    """A language into which filters are translated; `T` is the type of its expressions."""

    def always(self, value: bool) -> T:
        """Returns an expression that has this value for each row."""
        ...

    def among(self, field: Field, values: Sequence[Any]) -> T:
        """Returns a test that a column has one of `values`, which are not empty."""
        ...

    def compared(self, field: Field, sign: str, value: Any) -> T:
        """Returns a test that compares a column with a value; `sign` is `<`, `<=`, `>` or `>=`."""
        ...

    def within(self, field: Field, item: Range) -> T:
        """Returns a test that a column lies in a range, which is bounded and has more than one value."""
        low, high = (">=" if item.min_inclusive else ">"), ("<=" if item.max_inclusive else "<")
        ends = [(low, item.min), (high, item.max)]
        return self.all_of([self.compared(field, sign, end) for sign, end in ends if end is not None])

    def is_null(self, field: Field) -> T:
        """Returns a test that a column is null; never unknown."""
        ...

    def is_not_null(self, field: Field) -> T:
        """Returns a test that a column has a value; never unknown."""
        ...

    def all_of(self, parts: Sequence[T]) -> T:
        """Returns a test that all of `parts` are true; `parts` is not empty."""
        return joined(parts, and_)

    def any_of(self, parts: Sequence[T]) -> T:
        """Returns a test that at least one of `parts` is true; `parts` is not empty."""
        return joined(parts, or_)

    def fails(self, part: T) -> T:
        """Returns a test that a part is false or unknown."""
        ...

    def given(self, expression: Any) -> T:
        """Returns the expression of a `Given` node unchanged, since it was written for this engine."""
        found: T = expression
        return found


def rendered(node: Filter, engine: Engine[T]) -> T:  # noqa: PLR0911 one a node
    """Returns a filter as an expression of an engine."""
    match node:
        case InRanges(field, ranges):
            return _in_ranges(field, ranges, engine)
        case IsNull(field):
            return engine.is_null(field)
        case Every(()):
            return engine.always(True)
        case Every(parts):
            return engine.all_of([rendered(part, engine) for part in parts])
        case Some(parts):
            return engine.any_of([rendered(part, engine) for part in parts])
        case Fails(Every(())):
            return engine.always(False)
        case Fails(IsNull(field)):
            return engine.is_not_null(field)
        case Fails(part):
            return engine.fails(rendered(part, engine))
        case Given(expression):
            return engine.given(expression)


def rendered_unless_all(node: Filter, engine: Engine[T]) -> T | None:
    """Returns a filter as an expression of an engine; None when every row meets it."""
    return None if node == EVERY_ROW else rendered(node, engine)


def _in_ranges(field: Field, ranges: Sequence[Range], engine: Engine[T]) -> T:
    exact = [item.min for item in ranges if item.is_exact]
    parts = [engine.among(field, exact)] if exact else []
    parts += [engine.within(field, item) for item in ranges if not item.is_exact]
    if not parts:
        return engine.always(False)
    return parts[0] if len(parts) == 1 else engine.any_of(parts)


Row = Mapping[str, Any]
Judged = Callable[[Row], bool | None]


class _Plain(Engine[Judged]):
    """An engine that tests rows in Python.

    An expression is a function that takes a row, a dict by column name.
    """

    def always(self, value: bool) -> Judged:
        return lambda row: value

    def among(self, field: Field, values: Sequence[Any]) -> Judged:
        wanted = [_place(value) for value in values]
        return self._known(field, lambda value: _place(value) in wanted)

    def compared(self, field: Field, sign: str, value: Any) -> Judged:
        end = _place(value)
        return self._known(field, lambda value: bool(SIGNS[sign](_place(value), end)))

    def _known(self, field: Field, judge: Callable[[Any], bool]) -> Judged:
        return lambda row: None if row[field.name] is None else judge(row[field.name])

    def is_null(self, field: Field) -> Judged:
        return lambda row: row[field.name] is None

    def is_not_null(self, field: Field) -> Judged:
        return lambda row: row[field.name] is not None

    def all_of(self, parts: Sequence[Judged]) -> Judged:
        return lambda row: _decided(False, [part(row) for part in parts])

    def any_of(self, parts: Sequence[Judged]) -> Judged:
        return lambda row: _decided(True, [part(row) for part in parts])

    def fails(self, part: Judged) -> Judged:
        return lambda row: not part(row)


def _decided(by: bool, values: Sequence[bool | None]) -> bool | None:
    """Returns `by` if any value is `by`; else None if any value is None; else `not by`."""
    return by if by in values else None if None in values else not by


def _place(value: Any) -> tuple[bool, Any]:
    """Returns a sort key of a value, which sorts as the values of a column do: NaN last."""
    is_nan = isinstance(value, float) and math.isnan(value)
    return is_nan, 0.0 if is_nan else value


PLAIN: Engine[Judged] = _Plain()
