"""The conditions that select the rows of files, as one filter for all engines: slices, deletions, conditions.

A filter is a tree of tests on columns, made only from a plan and a question. `rendered` turns it into an
expression of an engine, which supplies its language's form of each node. `PLAIN` is an engine that tests rows
in Python; tests compare the other engines with it.

A filter has SQL's three values: a test of a null column is unknown, and a row counts if its filter is true.
The values of a column have one order: -0.0 equals 0.0, and NaN is the largest number and equals itself.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from operator import and_, ge, gt, le, lt, or_
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dormouse.model.loops import joined, portions
from dormouse.model.region import KeyRanges, KeyValue, Range
from dormouse.model.schema import Field, Schema
from dormouse.reading.row_sets import FewRows, RowSet, joined_sets
from dormouse.reading.where import Condition

if TYPE_CHECKING:
    from dormouse.reading.where import Deletion

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class InRanges:
    """A test that a column lies in at least one of `ranges`. Without ranges it is false.

    Each range is bounded below, above, or on both sides.
    """

    field: Field
    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Among:
    """A test that columns together have the values of one of `rows`.

    It is false or unknown if a column is null. Only a test of one column may be on a floating-point number.
    """

    fields: tuple[Field, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class OneOf:
    """A test that the columns of a set of rows have, together, the values of one of them.

    It is never unknown: null equals null, and NaN equals NaN. Rows with keys outside `ranges` do not count:
    the test may be true or false for them.
    """

    rows: RowSet
    ranges: KeyRanges = KeyRanges()  # noqa: RUF009 immutable


@dataclass(frozen=True, slots=True)
class Searched:
    """A test with two parts: `below` for rows in which a column is less than `point`, `rest` for the others.

    Rows in which the column is null belong to `rest`.
    """

    field: Field
    point: Any
    below: Filter
    rest: Filter


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


Filter = InRanges | Among | OneOf | Searched | IsNull | Every | Some | Fails | Given
EVERY_ROW = Every(())
TESTS_MAX = 16
"""The most alternatives that are tested one after another, without a search for a row's place among them."""
ROWS_TOGETHER_MAX = 1_000_000
"""The most rows that several deletions list and that are searched together."""
SIGNS = {"<": lt, "<=": le, ">": gt, ">=": ge}


def in_slices(schema: Schema, slices: Iterable[KeyRanges]) -> Filter:
    """Returns the filter of rows that lie in any of the slices; keys are never null."""
    found = [_in_slice(schema, ranges) for ranges in slices]
    return EVERY_ROW if EVERY_ROW in found else some(found)


def _in_slice(schema: Schema, ranges: KeyRanges) -> Filter:
    return every(InRanges(field, tuple(ranges[field.name])) for field in _bounded(schema, ranges))


def _bounded(schema: Schema, ranges: KeyRanges) -> list[Field]:
    """Returns the row keys that the ranges bound."""
    named = [field for field in schema.row_keys if field.name in ranges]
    return [field for field in named if Range() not in ranges[field.name]]


def meets(condition: Condition) -> Filter:
    """Returns the filter of rows that meet a condition."""
    null = IsNull(condition.field)
    if Range() in condition.ranges:
        return EVERY_ROW if condition.or_null else Fails(null)
    found = InRanges(condition.field, condition.ranges)
    return Some((found, null)) if condition.or_null else found


def is_of(schema: Schema, deletion: Deletion) -> Filter:
    """Returns the filter of rows that a deletion matches."""
    parts = [in_slices(schema, [deletion.ranges]), *map(meets, deletion.conditions)]
    if isinstance(deletion.rows, FewRows):
        parts.append(Among(deletion.rows.fields, deletion.rows.rows))
    elif deletion.rows is not None:
        parts.append(OneOf(deletion.rows, deletion.ranges))
    return every(parts)


def remains(
    schema: Schema,
    deletions: Iterable[Deletion],
    where: Callable[[Deletion], Filter] = lambda _: EVERY_ROW,
    near: Range | None = None,
) -> Filter:
    """Returns the filter of rows that no deletion matches.

    `where` returns the filter of the rows to which a deletion applies, such as the rows of some files.
    Deletions that apply to the same rows are tested together. `near` is a range of the first row key that has
    all rows: deletions of other keys are left out.
    """
    first = schema.row_keys[0].name
    places: dict[Filter, list[Deletion]] = defaultdict(list)
    for one in deletions:
        is_bounded = near is not None and Range() not in one.ranges.get(first, [Range()])
        ranges = one.ranges.clipped(first, near) if near is not None and is_bounded else one.ranges
        if not ranges.is_empty:
            places[where(one)].append(replace(one, ranges=ranges))
    gone = [every([place, _matched(schema, alike)]) for place, alike in places.items()]
    return Fails(some(gone)) if gone else EVERY_ROW


Tests = Mapping[Field, "Condition"]
"""The tests of a deletion, by column. A row that meets all of them is deleted."""


def _matched(schema: Schema, deletions: Iterable[Deletion]) -> Filter:
    """Returns the filter of rows that any of the deletions matches.

    Deletions by equal values of the same columns become one set. Ranges of one column become disjoint ones,
    among which a row's place is searched, as it is among deletions by several columns.
    """
    rows: dict[tuple[Field, ...], dict[tuple[Any, ...], None]] = defaultdict(dict)
    spans: dict[Field, list[Range]] = defaultdict(list)
    searched: list[Tests] = []
    parts: dict[Filter, None] = {}
    listed: dict[object, list[Deletion]] = defaultdict(list)
    for one in deletions:
        bounded = [Condition(field, one.ranges[field.name]) for field in _bounded(schema, one.ranges)]
        tests = {test.field: test for test in (*bounded, *one.conditions)}
        fields = tuple(tests)
        if isinstance(one.rows, FewRows):
            rows[one.rows.fields] |= dict.fromkeys(_near(schema.row_keys[0], one.ranges, one.rows))
        elif one.rows is not None:
            listed[one.rows.form].append(one)
        elif len(fields) < len(bounded) + len(one.conditions) or not fields:
            parts[is_of(schema, one)] = None
        elif len(fields) == 1 and not tests[fields[0]].is_open:
            [test] = tests.values()
            rows[fields] |= dict.fromkeys((item.min,) for item in test.ranges if item.is_exact)
            spans[test.field] += [item for item in test.ranges if not item.is_exact]
            parts |= {IsNull(test.field): None} if test.or_null else {}
        elif all(map(_is_exact, tests.values())) and _is_small(tests):
            columns = ([item.min for item in test.ranges] for test in tests.values())
            rows[fields] |= dict.fromkeys(product(*columns))
        else:
            searched.append(tests)
    for field, ranges in spans.items():
        # NaN has no place among the ranges, and engines differ in the order of -0.0 and 0.0
        ordered = () if field.type.is_floating else KeyRanges({field.name: ranges})[field.name]
        searched += [{field: Condition(field, (item,))} for item in ordered]
        parts |= {InRanges(field, tuple(ranges)): None} if ranges and not ordered else {}
    sets: list[Filter] = [Among(fields, tuple(found)) for fields, found in rows.items() if found]
    for alike in listed.values():
        sets += [_of_any(schema, some) for some in portions(alike, _count, ROWS_TOGETHER_MAX)]
    return some([*parts, *sets, *([_searched(searched)] if searched else [])])


def _count(deletion: Deletion) -> int:
    return deletion.rows.count if isinstance(deletion.rows, RowSet) else 0


def _of_any(schema: Schema, deletions: Sequence[Deletion]) -> Filter:
    """Returns the filter of rows that any of some deletions lists, whose rows have the same columns."""
    sets = [one.rows for one in deletions if isinstance(one.rows, RowSet)]
    if len(sets) == 1:
        return is_of(schema, deletions[0])
    first = schema.row_keys[0].name
    bounds = KeyRanges({first: [one.ranges.enclosing(first) for one in deletions]}).enclosing(first)
    near = KeyRanges() if bounds == Range() else KeyRanges({first: [bounds]})
    return every([in_slices(schema, [near]), OneOf(joined_sets(sets), near)])


def _near(first: Field, ranges: KeyRanges, few: FewRows) -> list[tuple[Any, ...]]:
    """Returns those of a few rows whose first key lies in the ranges."""
    at, items = few.fields.index(first), ranges.get(first.name, [Range()])
    return [row for row in few.rows if any(item.contains(row[at]) for item in items)]


def _is_exact(test: Condition) -> bool:
    """Returns whether a test is for values that are found by equality in every engine."""
    return not (test.or_null or test.field.type.is_floating) and all(one.is_exact for one in test.ranges)


def _is_small(tests: Tests) -> bool:
    """Returns whether the combinations of the values of all columns are about as many as the values."""
    counts = [len(test.ranges) for test in tests.values()]
    return prod(counts) <= max(4 * sum(counts), TESTS_MAX)


def _searched(alternatives: Sequence[Tests]) -> Filter:
    """Returns the filter of rows that meet all tests of an alternative; there is at least one alternative.

    Many alternatives are divided at a value of a column: those for smaller values, and those for others.
    """
    if len(alternatives) > TESTS_MAX:
        fields = dict.fromkeys(field for one in alternatives for field in one if field.type.is_key_type)
        divided = [found for field in fields if (found := _divided(field, alternatives)) is not None]
        if divided:
            field, point, below, rest = min(divided, key=lambda found: len(found[2]) + len(found[3]))
            return Searched(field, point, _searched(below), _searched(rest))
    return some([every(map(_test, one.values())) for one in alternatives])


def _divided(
    field: Field, alternatives: Sequence[Tests]
) -> tuple[Field, Any, list[Tests], list[Tests]] | None:
    """Returns a value of a column, and the alternatives below it and from it on; None if too many are both.

    An alternative that nulls may meet has no place.
    """
    hulls = [
        Range()
        if field not in one or one[field].or_null
        else KeyRanges({field.name: one[field].ranges}).enclosing(field.name)
        for one in alternatives
    ]
    starts = sorted({hull.min for hull in hulls if hull.min is not None})
    if not starts:
        return None
    point: Any = starts[len(starts) // 2]
    before, after = Range(max=point), Range(min=point)
    below = [one for one, hull in zip(alternatives, hulls, strict=True) if hull.intersect(before)]
    rest = [one for one, hull in zip(alternatives, hulls, strict=True) if hull.intersect(after)]
    count = len(alternatives)
    divides = max(len(below), len(rest)) < count and len(below) + len(rest) <= count + count // 4
    return (field, point, below, rest) if divides else None


def _test(test: Condition) -> Filter:
    exact = [item for item in test.ranges if item.is_exact]
    if len(exact) <= TESTS_MAX or test.is_open:
        return meets(test)
    parts: list[Filter] = [Among((test.field,), tuple((item.min,) for item in exact))]
    ranges = tuple(item for item in test.ranges if not item.is_exact)
    parts += [InRanges(test.field, ranges)] if ranges else []
    return some([*parts, *([IsNull(test.field)] if test.or_null else [])])


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

    def among_rows(self, fields: Sequence[Field], rows: Sequence[Sequence[Any]]) -> T:
        """Returns a test that columns together have the values of one of `rows`, which are not empty."""
        if len(fields) == 1:
            return self.among(fields[0], [value for (value,) in rows])
        tests = (
            self.all_of([self.among(field, [value]) for field, value in zip(fields, row, strict=True)])
            for row in rows
        )
        return self.any_of(list(tests))

    def one_of(self, rows: RowSet, ranges: KeyRanges) -> T:
        """Returns a test that columns together have the values of one of `rows`; never unknown.

        It need not be right for rows with keys outside `ranges`.
        """
        names = [field.name for field in rows.fields]
        found = [self._equal(rows.fields, [row[name] for name in names]) for row in rows.read().to_pylist()]
        return self.any_of(found)

    def _equal(self, fields: Sequence[Field], row: Sequence[Any]) -> T:
        pairs = zip(fields, row, strict=True)
        return self.all_of(
            [self.is_null(field) if value is None else self._is(field, value) for field, value in pairs]
        )

    def _is(self, field: Field, value: Any) -> T:
        return self.all_of([self.is_not_null(field), self.among(field, [value])])

    def searched(self, field: Field, point: Any, below: T, rest: T) -> T:
        """Returns `below` for rows in which a column is less than `point`, and `rest` for all others."""
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
        case Among(fields, rows):
            return engine.among_rows(fields, rows)
        case OneOf(rows, ranges):
            return engine.one_of(rows, ranges)
        case Searched(field, point, below, rest):
            return engine.searched(field, point, rendered(below, engine), rendered(rest, engine))
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

    def searched(self, field: Field, point: Any, below: Judged, rest: Judged) -> Judged:
        is_below = self.compared(field, "<", point)
        return lambda row: below(row) if is_below(row) else rest(row)

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
