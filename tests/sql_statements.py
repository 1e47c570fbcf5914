"""Random statements over tables, in the dialect that PostgreSQL and DuckDB share.

A statement that uses a feature of DuckDB alone is marked, so that PostgreSQL does not judge it. No answer
depends on the order of rows, except the order of equal rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from tests.sql_values import INTS, KEYS, MAPS, NUMBERS, ORDERED, POOLS, Columns, Statement, literal, quoted
from tests.support.model import BOOLEAN, BYTES, DOUBLE, INT, LONG, STRING, TIMESTAMP, DataType

Frame = Mapping[str, Columns]
"""The columns of each alias of a FROM clause."""
Scope = tuple[Frame, ...]
"""The frames of nested queries, the innermost last."""
_COMPARISONS = ("=", "=", "<>", "<", "<=", ">", ">=", "is distinct from", "is not distinct from")
_PATTERNS = ("a%", "%b", "%", "", "a_", "_", "ab%", "%b%", "AB%", "é%", "ab\\%")


class Writer:
    """A writer of random statements over tables."""

    def __init__(self, random: Random, tables: Mapping[str, Columns]) -> None:
        self._random = random
        self._tables = tables
        self._begin()

    def _begin(self) -> None:
        self._aliases = 0
        self._in_postgres = True
        self._is_rounded = False
        self._parameters: list[Any] = []

    def statement(self) -> Statement:
        """Returns a statement of any kind."""
        self._begin()
        if self._chance(0.08):
            text, parameters = self._given(self._first_rows())
            return Statement(text, parameters, True, self._in_postgres)
        kinds = (
            self._plain,
            self._plain,
            self._grouped,
            self._grouped,
            self._ends,
            self._ends,
            self._few,
            self._windowed,
            self._together,
            self._with,
        )
        text, width = self._pick(kinds)(())
        ordered = self._chance(0.4)
        if ordered:
            text = f"select * from ({text}) as result {self._order(width)}{self._limit()}"
        elif self._chance(0.05):
            # the rows that a limit selects are undefined, but not their number
            few = f"select * from ({text}) as result limit {self._random.randrange(9)}"
            text = f"select count(*) from ({few}) as few"
        text, parameters = self._given(text)
        # PostgreSQL orders values by digits that DuckDB rounds off
        return Statement(text, parameters, ordered, self._in_postgres and not (ordered and self._is_rounded))

    def _given(self, text: str) -> tuple[str, list[Any] | dict[str, Any] | None]:
        """Returns the text and the parameters that the text uses, by name or by number; None without
        parameters.
        """
        used = {int(n): self._parameters[int(n)] for n in re.findall(r"\$p(\d+)", text)}
        if not used:
            return text, None
        if self._chance(0.3):
            return text, {f"p{n}": value for n, value in used.items()}
        places = [*used]
        numbered = re.sub(r"\$p(\d+)", lambda found: f"${places.index(int(found[1])) + 1}", text)
        return numbered, [*used.values()]

    # parts of statements: each method returns a text and the number of its columns

    def _plain(self, scope: Scope, types: Sequence[DataType] = ()) -> tuple[str, int]:
        source, scope = self._from(scope)
        wanted = types or [self._pick(ORDERED) for _ in range(self._random.randrange(1, 5))]
        items = [self._value(scope, one) for one in wanted]
        if not types and self._chance(0.2):
            items.append(self._scalar(scope))
        if not types and self._chance(0.1):
            items.append(items[0])
        return self._select(items, source, scope), len(items)

    def _first_rows(self) -> str:
        """Returns a query of a table's first or last rows, ordered by its columns. The columns begin with the
        row keys.
        """
        table, alias = self._table(), self._alias()
        names = [f"{alias}.{quoted(name)}" for name in self._columns(self._tables[table], ORDERED)]
        where = self._pick((self._of_key(alias, table), self._where(({alias: self._tables[table]},))))
        listed, direction = ", ".join(names), self._pick(("", "", " desc nulls last"))
        by = ", ".join(name + direction for name in names)
        return f"select {listed} from {table} as {alias}{where} order by {by}{self._limit()}"

    def _of_key(self, alias: str, table: str) -> str:
        """Returns no condition, or plain ones, which facts about files may decide if all are on the key."""
        columns = [(one, kind) for one, kind in self._tables[table].items() if kind in ORDERED]
        name, kind = columns[0]
        name, kind = self._pick(columns) if self._chance(0.3) else (name, kind)
        if self._chance(0.2):
            return ""
        plain = [self._plainly(alias, name, kind)]
        while self._chance(0.3):
            plain.append(self._plainly(alias, *self._pick(columns)))
        return f" where {self._pick((' and ', ' and ', ' or ')).join(plain)}"

    def _plainly(self, alias: str, name: str, kind: DataType) -> str:
        """Returns a comparison of a column with constants."""
        key = f"{alias}.{quoted(name)}"
        one, other = self._literal(kind), self._literal(kind)
        sign = self._pick(("<", "<=", ">", ">=", "=", "="))
        texts = ("{0} {3} {1}", "{0} {3} {1}", "{0} >= {1} and {0} < {2}", "{0} between {1} and {2}",
                 "{0} in ({1}, {2})", "not ({0} {3} {1})")  # fmt: skip
        if kind in (INT, LONG):
            texts += ("{0} {3} 1.5", "{0} {3} 2.0::float8")
        return f"({self._pick(texts).format(key, one, other, sign)})"

    def _ends(self, scope: Scope) -> tuple[str, int]:
        """Returns a query of the number of rows, and of the smallest and the largest first row key."""
        table, alias = self._table(), self._alias()
        name, kind = next(iter(self._tables[table].items()))
        inner, key = (*scope, {alias: self._tables[table]}), f"{alias}.{quoted(name)}"
        items = [f"min({key})", f"max({key})", "count(*)", f"count({key})"]
        if self._chance(0.3):
            items += [f"coalesce(max({key}), {self._literal(kind)})", f"min({key}) = {self._literal(kind)}"]
            items += [f"max({key}) filter (where {self._condition(inner, 1)})", "count(*) > 3"]
        some = [self._pick(items) for _ in range(self._random.choice((1, 1, 2, 3)))]
        where = self._of_key(alias, table) if self._chance(0.7) else self._where(inner)
        listed = ", ".join(f"{item} as c{n}" for n, item in enumerate(some, 1))
        return f"select {listed} from {quoted(table)} as {alias}{where}", len(some)

    def _few(self, scope: Scope) -> tuple[str, int]:
        """Returns a query of the rows whose first row key is among the values of another column."""
        table, alias = self._table(), self._alias()
        name, kind = next(iter(self._tables[table].items()))
        both = [(one, c) for one, columns in self._tables.items() for c, k in columns.items() if k == kind]
        (other, column), them = self._pick(both), self._alias()
        inner = (*scope, {them: self._tables[other]})
        key, where = f"{alias}.{quoted(name)}", self._condition(inner, 1)
        value = f"{them}.{quoted(column)}"
        of = f"{quoted(other)} as {them}"
        text = self._pick(
            (
                "from {table} where {key} in (select {value} from {of} where {where})",
                "from {table} where {key} = any (select {value} from {of} where {where})",
                "from {table} where exists (select 1 from {of} where {value} = {key} and {where})",
                "from {table} join {of} on {value} = {key} where {where}",
                "from {table} left join {of} on {value} = {key} where {where}",
                "from {of} left join {table} on {value} = {key} where {where}",
                "from {of} left join {table} on {value} = {key} and {where}",
                "from {table} join (select distinct {value} d from {of} where {where}) as q on q.d = {key}",
                "from {table} where {key} = (select max({value}) from {of} where {where})",
                "from {table} where {key} >= (select min({value}) from {of} where {where})",
                "from {table} where not exists (select 1 from {of} where {value} = {key} and {where})",
                "from {of}, lateral (select * from {table} where {key} = {value}) as {alias} where {where}",
            )
        ).format(table=f"{quoted(table)} as {alias}", key=key, value=value, of=of, where=where, alias=alias)
        names = [f"{alias}.{quoted(name)}" for name in self._columns(self._tables[table], ORDERED)]
        return f"select {', '.join(names)} {text}", len(names)

    def _select(self, items: Sequence[str], source: str, scope: Scope) -> str:
        distinct = "distinct " if self._chance(0.15) else ""
        listed = ", ".join(f"{item} as c{n}" for n, item in enumerate(items, 1))
        return f"select {distinct}{listed} from {source}{self._where(scope)}"

    def _grouped(self, scope: Scope) -> tuple[str, int]:
        source, scope = self._from(scope)
        kinds = [self._pick(ORDERED) for _ in range(self._random.randrange(3))]
        shape = self._pick(("{}", "{}", "{}", "rollup ({})", "cube ({})"))
        # with GROUP BY a constant and HAVING, DuckDB omits the grand total
        value = self._value if shape == "{}" else lambda scope, kind: self._column(scope, (kind,))
        keys = [key for kind in kinds if (key := value(scope, kind)) is not None]
        found = [self._aggregate(scope) for _ in range(self._random.randrange(1, 4))]
        listed = ", ".join(f"{item} as c{n}" for n, item in enumerate([*keys, *found], 1))
        by = ", ".join(str(n) for n in range(1, len(keys) + 1))
        group = f" group by {shape.format(by)}" if keys else ""
        having = f" having count(*) > {self._random.randrange(4)}" if self._chance(0.2) else ""
        return f"select {listed} from {source}{self._where(scope)}{group}{having}", len(keys) + len(found)

    def _windowed(self, scope: Scope) -> tuple[str, int]:
        table, alias = self._table(), self._alias()
        scope = (*scope, {alias: self._tables[table]})
        every = [f"{alias}.{quoted(name)}" for name in self._columns(self._tables[table], ORDERED)]
        self._random.shuffle(every)
        by = f"partition by {self._value(scope, self._pick(ORDERED))} " if self._chance(0.6) else ""
        order = "order by " + ", ".join(one + self._direction() for one in every)
        one = self._value(scope, self._pick((*NUMBERS, STRING, TIMESTAMP)))
        number = self._value(scope, self._pick((INT, DOUBLE)))
        found = self._pick(
            (
                f"row_number() over ({by}{order})",
                f"rank() over ({by}order by {one})",
                f"dense_rank() over ({by}order by {one} desc nulls first)",
                f"lag({one}) over ({by}{order})",
                f"lead({one}, 2) over ({by}{order})",
                f"first_value({one}) over ({by}{order})",
                f"ntile(3) over ({by}{order})",
                f"count({one}) over ({by})",
                f"sum({number}) over ({by}{order} rows between 2 preceding and current row)",
                f"max({number}) over ({by}{order} rows between unbounded preceding and 1 following)",
            )
        )
        text = f"select {', '.join(every)}, {found} as w from {quoted(table)} as {alias}{self._where(scope)}"
        if self._chance(0.15):
            self._in_postgres = False
            text += f" qualify row_number() over ({by}{order}) <= {self._random.randrange(1, 4)}"
        return text, len(every) + 1

    def _together(self, scope: Scope) -> tuple[str, int]:
        types = [self._pick(ORDERED) for _ in range(self._random.randrange(1, 4))]
        sides = [f"({self._plain(scope, types)[0]})" for _ in range(self._random.choice((2, 2, 3)))]
        operator = self._pick(("union", "intersect", "except")) + self._pick((" ", " all "))
        return f"select * from ({operator.join(sides)}) as together", len(types)

    def _with(self, scope: Scope) -> tuple[str, int]:
        types = [self._pick(ORDERED) for _ in range(self._random.randrange(1, 4))]
        inner, _ = self._plain(scope, types)
        before = self._tables
        self._tables = {**before, "w": {f"c{n}": one for n, one in enumerate(types, 1)}}
        text, width = self._pick((self._plain, self._grouped))(scope)
        self._tables = before
        kept = self._pick(("", "materialized ", "not materialized "))
        return f"with w as {kept}({inner}) {text}", width

    def _from(self, scope: Scope) -> tuple[str, Scope]:
        table, alias = self._table(), self._alias()
        frame: dict[str, Columns] = {alias: self._tables[table]}
        source = f"{quoted(table)} as {alias}"
        if self._chance(0.1):
            source, frame = self._derived(scope, alias)
        while self._chance(0.35) and len(frame) < 3:
            source = self._joined(scope, source, frame)
        return source, (*scope, frame)

    def _derived(self, scope: Scope, alias: str) -> tuple[str, dict[str, Columns]]:
        types = [self._pick(ORDERED) for _ in range(self._random.randrange(1, 4))]
        inner, _ = self._plain(scope, types)
        return f"({inner}) as {alias}", {alias: {f"c{n}": one for n, one in enumerate(types, 1)}}

    def _joined(self, scope: Scope, source: str, frame: dict[str, Columns]) -> str:
        """Returns the text that joins another table, on a column that both have or on columns of one type."""
        table, alias = self._table(), self._alias()
        theirs = self._tables[table]
        pairs = [
            (f"{other}.{quoted(a)}", f"{alias}.{quoted(b)}")
            for other, columns in frame.items()
            for a, one in columns.items()
            for b, two in theirs.items()
            if one == two and one in ORDERED and (one != BOOLEAN)
        ]
        kind = self._pick(("join", "join", "left join", "right join", "full join", "semi join", "anti join"))
        if not pairs:
            return source
        ours, mine = self._pick(pairs)
        condition = f"{ours} = {mine}"
        both: Scope = (*scope, {**frame, alias: theirs})
        if kind == "join" and self._chance(0.5):
            condition += f" and {self._condition(both, 1)}"
        if kind in ("semi join", "anti join"):
            self._in_postgres = False
        else:
            frame[alias] = theirs
        return f"{source} {kind} {quoted(table)} as {alias} on {condition}"

    def _aggregate(self, scope: Scope) -> str:
        kind = self._pick((*ORDERED, INTS))
        one = self._value(scope, kind) if kind in ORDERED else "*"
        names = ["count({})", "count(distinct {})"] if one != "*" else ["count({})"]
        if kind in (*NUMBERS, STRING, BYTES, TIMESTAMP):
            names += 2 * ["min({})", "max({})"]
        if kind in NUMBERS:
            names += ["sum({})", "avg({})"]
        if kind == BOOLEAN:
            names += ["bool_and({})", "bool_or({})"]
        if kind == STRING:
            names += ["string_agg(substring({0} from 1 for 2), '|' order by {0})"]
        chosen = self._pick(names).format(one)
        # DuckDB's avg is a double; PostgreSQL's is exact
        self._is_rounded = self._is_rounded or (kind == LONG and chosen.startswith("avg"))
        return f"{chosen} filter (where {self._condition(scope, 1)})" if self._chance(0.15) else chosen

    def _scalar(self, scope: Scope) -> str:
        """Returns a scalar subquery, which is mostly correlated."""
        table, alias = self._table(), self._alias()
        inner = (*scope, {alias: self._tables[table]})
        return f"(select {self._aggregate(inner)} from {quoted(table)} as {alias}{self._where(inner, 0.9)})"

    def _where(self, scope: Scope, chance: float = 0.75) -> str:
        return f" where {self._condition(scope, 2)}" if self._chance(chance) else ""

    def _condition(self, scope: Scope, depth: int) -> str:
        if depth and self._chance(0.45):
            joiner = self._pick((" and ", " and ", " or "))
            parts = [self._condition(scope, depth - 1) for _ in range(2)]
            return self._pick(("({})", "({})", "not ({})")).format(joiner.join(parts))
        kinds: list[Callable[[Scope], str]] = [self._compared] * 4 + [self._listed] * 2
        kinds += [self._between, self._like, self._null, self._truth, self._of_lists]
        if depth:
            kinds += [self._any, self._any, self._exists]
        return self._pick(kinds)(scope)

    def _compared(self, scope: Scope) -> str:
        sides = self._comparable(scope, 2)
        if self._chance(0.2):
            sides.reverse()
        return f" {self._pick(_COMPARISONS)} ".join(sides)

    def _listed(self, scope: Scope) -> str:
        one, *others = self._comparable(scope, self._random.randrange(2, 7))
        listed = ", ".join([*others, *(["null"] if self._chance(0.2) else [])])
        return f"{one} {self._pick(('in', 'in', 'not in'))} ({listed})"

    def _between(self, scope: Scope) -> str:
        one, low, high = self._comparable(scope, 3)
        return f"{one} {self._pick(('', 'not '))}between {low} and {high}"

    def _like(self, scope: Scope) -> str:
        pattern = self._pick(_PATTERNS)
        escape = " escape '\\'" if "\\" in pattern else ""
        return f"{self._value(scope, STRING)} {self._pick(('', 'not '))}like '{pattern}'{escape}"

    def _null(self, scope: Scope) -> str:
        return f"{self._value(scope, self._pick(ORDERED))} is {self._pick(('', 'not '))}null"

    def _truth(self, scope: Scope) -> str:
        return f"{self._value(scope, BOOLEAN)} is {self._pick(('', 'not '))}{self._pick(('true', 'false'))}"

    def _of_lists(self, scope: Scope) -> str:
        kind = self._pick((INTS, MAPS))
        one = self._column(scope, (kind,))
        if one is None:
            return self._compared(scope)
        self._in_postgres = False
        of_kind = ("{0}[1] > 0", "len({0}) = 2") if kind == INTS else ("{0}['a'] = 1", "cardinality({0}) > 1")
        return self._pick((*of_kind, "{0} is null", "{0} = {0}")).format(one)

    def _any(self, scope: Scope) -> str:
        """Returns a comparison with the rows of a subquery. Columns of the subquery may have names of outer
        columns.
        """
        kind, table = self._pick(ORDERED), self._table()
        alias = table if self._chance(0.5) else self._alias()
        inner = (*scope, {alias: self._tables[table]})
        one = self._value(scope, kind)
        rows = f"(select {self._value(inner, kind)} from {quoted(table)} as {alias}{self._where(inner, 0.4)})"
        operator = self._pick(("in", "not in", "= any", "<> all", "> any", "<= any", "< all", ">= all", "="))
        if operator == "=":
            return f"{one} = {self._scalar_of(scope, kind)}"
        return f"{one} {operator} {rows}"

    def _scalar_of(self, scope: Scope, kind: DataType) -> str:
        table, alias = self._table(), self._alias()
        inner = (*scope, {alias: self._tables[table]})
        of_all = self._pick(("bool_or", "bool_and") if kind == BOOLEAN else ("min", "max"))
        value = self._value(inner, kind)
        return f"(select {of_all}({value}) from {quoted(table)} as {alias}{self._where(inner, 0.7)})"

    def _exists(self, scope: Scope) -> str:
        table, alias = self._table(), self._alias()
        inner = (*scope, {alias: self._tables[table]})
        rows = f"(select 1 from {quoted(table)} as {alias} where {self._condition(inner, 1)})"
        return f"{self._pick(('', 'not '))}exists {rows}"

    # values

    def _comparable(self, scope: Scope, count: int) -> list[str]:
        """Returns values that can be compared. Usually the first is a column, and the others are literals."""
        kind = self._pick(ORDERED)
        first = self._column(scope, (kind,)) or self._value(scope, kind)
        # all of one kind, since DuckDB compares all as doubles if one is a double, unlike PostgreSQL
        other = self._pick(NUMBERS) if kind in NUMBERS and self._chance(0.2) else kind
        others = [
            self._literal(other) if self._chance(0.7) else self._value(scope, other) for _ in range(count - 1)
        ]
        return [first, *others]

    def _value(self, scope: Scope, kind: DataType) -> str:
        found = self._column(scope, (kind,))
        if found is None or self._chance(0.15):
            return self._literal(kind)
        return self._computed(scope, kind, found) if self._chance(0.2) else found

    def _computed(self, scope: Scope, kind: DataType, operand: str) -> str:
        found = [f"coalesce({operand}, {self._literal(kind)})", f"nullif({operand}, {self._literal(kind)})"]
        found.append(f"case when {self._condition(scope, 0)} then {operand} else {self._literal(kind)} end")
        if kind != BOOLEAN:
            found.append(f"{self._pick(('greatest', 'least'))}({operand}, {self._literal(kind)})")
        more = {
            INT: ["{0} % 7", "{0}::int8 + 1"],
            LONG: ["{0} % 7", "{0} / 4.0::float8"],
            DOUBLE: ["-{0}", "{0} + 1", "abs({0})", "{0} * 2"],
            STRING: ["{0} || 'x'", "substring({0} from 1 for 2)", "substring({0} from 2)"],
            TIMESTAMP: ["date_trunc('year', {0})", "date_trunc('month', {0})"],
            BOOLEAN: ["not {0}"],
        }
        return f"({self._pick([*found, *(text.format(operand) for text in more.get(kind, []))])})"

    def _column(self, scope: Scope, kinds: Sequence[DataType]) -> str | None:
        """Returns a visible column of one of these types, or None. It is usually one of the innermost tables.

        Sometimes the column has no qualifier, if its name is unambiguous.
        """
        for frame in [*scope[::-1]] if self._chance(0.7) else [*scope]:
            found = [(a, name) for a, columns in frame.items() for name in self._columns(columns, kinds)]
            if not found:
                continue
            # prefer keys, because conditions on keys decide which files are read
            alias, name = self._pick(found + 2 * [one for one in found if one[1] in KEYS])
            alone = sum(name in columns for columns in frame.values()) == 1
            if frame is scope[-1] and alone and self._chance(0.5):
                return quoted(name)
            return f"{alias}.{quoted(name)}"
        return None

    def _literal(self, kind: DataType) -> str:
        value = self._pick(POOLS[kind])
        if not self._chance(0.12):
            return "null" if self._chance(0.02) else literal(value)
        self._parameters.append(value)
        return f"$p{len(self._parameters) - 1}"

    # order

    def _order(self, width: int) -> str:
        numbers = [*range(1, width + 1)]
        self._random.shuffle(numbers)
        return "order by " + ", ".join(f"{number}{self._direction()}" for number in numbers)

    def _direction(self) -> str:
        """Returns a sort direction. A descending one always says where nulls come, because PostgreSQL's
        default differs.
        """
        return self._pick(("", " asc nulls first", " desc nulls last", " desc nulls first", " nulls last"))

    def _limit(self) -> str:
        offset = f" offset {self._random.randrange(5)}" if self._chance(0.3) else ""
        return f" limit {self._random.randrange(12)}{offset}" if self._chance(0.6) else offset

    def _table(self) -> str:
        return self._pick([*self._tables])

    def _alias(self) -> str:
        self._aliases += 1
        return f"t{self._aliases}"

    @staticmethod
    def _columns(columns: Columns, kinds: Sequence[DataType]) -> list[str]:
        return [name for name, kind in columns.items() if kind in kinds]

    def _pick(self, items: Sequence[Any]) -> Any:
        return self._random.choice(items)

    def _chance(self, share: float) -> bool:
        return self._random.random() < share
