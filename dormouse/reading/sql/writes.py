"""Statements that write, as values: INSERT, UPDATE, DELETE and MERGE INTO in DuckDB's dialect.

Parsing executes nothing. DuckDB's parser checks the whole text first, then its tokens give the clauses, and
at last the parser checks each expression by itself. Every token belongs to a clause, or the statement is
refused. Texts of expressions stay as they are, so that DuckDB gives them their meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import duckdb

from dormouse.errors import InvalidQuery
from dormouse.model.types import Parameters
from dormouse.reading.sql.clauses import (
    Comparison,
    Expression,
    Reference,
    Scanner,
    checked,
    tokens_of,
    with_literals,
    with_plain_spaces,
)
from dormouse.reading.sql.parsed import (
    READS_RUN,
    RUNS,
    WRITING,
    checked_words,
    refusal_to_write,
    statement_kind,
)
from dormouse.reading.sql.results import syntax_error

Kind = Literal["insert", "update", "delete", "merge"]


@dataclass(frozen=True, slots=True)
class Target:
    """The table that a statement changes, and the name by which its expressions call it."""

    table: str
    alias: str


@dataclass(frozen=True, slots=True)
class Assignment:
    """A column and its new value; None stands for DEFAULT."""

    column: str
    value: Expression | None


@dataclass(frozen=True, slots=True)
class Conflict:
    """The treatment of rows whose key the table has: OR REPLACE, or ON CONFLICT."""

    action: Literal["replace", "nothing", "update"]
    columns: tuple[str, ...] = ()
    sets: tuple[Assignment, ...] = ()
    condition: Expression | None = None


class Cell(NamedTuple):
    """The place of a value in the text of VALUES, in bytes of UTF-8, and the number of its column."""

    begin: int
    end: int
    column: int
    is_default: bool


@dataclass(frozen=True, slots=True)
class Query:
    """A SELECT or VALUES that gives rows, and the WITH before the statement, or ""."""

    prefix: str
    text: str
    cells: tuple[Cell, ...] = ()
    """The values in VALUES."""


@dataclass(frozen=True, slots=True)
class Insert:
    """INSERT: the rows of a query, for the named columns, or for all of them in their order."""

    target: Target
    query: Query
    columns: tuple[str, ...] | None = None
    by_name: bool = False
    conflict: Conflict | None = None
    kind: Kind = "insert"


@dataclass(frozen=True, slots=True)
class Update:
    """UPDATE: new values for the rows that meet a condition; None is met by all."""

    target: Target
    sets: tuple[Assignment, ...]
    where: Expression | None = None
    kind: Kind = "update"


@dataclass(frozen=True, slots=True)
class Delete:
    """DELETE, and TRUNCATE: removes the rows that meet a condition; None is met by all."""

    target: Target
    where: Expression | None = None
    kind: Kind = "delete"


Of = Literal["matched", "not matched", "not matched by source"]
Star = Literal["by name", "by position"]


@dataclass(frozen=True, slots=True)
class Clause:
    """WHEN of a MERGE: which rows, a further condition, and what is done with them.

    UPDATE and INSERT have either assignments, or `star`: all columns of the source. An INSERT without names
    has assignments to columns named "", in the order of the table's.
    """

    of: Of
    action: Literal["update", "insert", "delete", "nothing", "error"]
    condition: Expression | None = None
    star: Star | None = None
    sets: tuple[Assignment, ...] = ()
    message: Expression | None = None
    """The text of ERROR, if there is one."""


@dataclass(frozen=True, slots=True)
class Merge:
    """MERGE INTO: the rows of a query, called `source`, and what is done where they match.

    They match by columns of the same name, `using`, or by a condition, `on`.
    """

    target: Target
    query: Query
    source: str
    clauses: tuple[Clause, ...]
    on: Expression | None = None
    using: tuple[str, ...] = ()
    kind: Kind = "merge"


Written: TypeAlias = Insert | Update | Delete | Merge
VALUES = (
    Target, Assignment, Conflict, Query, Insert, Update, Delete, Cell, Clause, Merge, Expression, Reference,
    Comparison,
)  # fmt: skip
"""The classes of a parsed statement."""

_ADVICE = "write MERGE INTO table USING source AS s ON … WHEN MATCHED THEN UPDATE SET … (or DELETE)"
_RETURNING = "RETURNING is not supported: read the rows by a SELECT of their own, or count them with dry_run"


def written(connection: duckdb.DuckDBPyConnection, statement: str, parameters: Parameters = ()) -> Written:
    """Parses one statement that writes, with the values of its parameters as literals.

    Each `?` counts from left to right. Raises `InvalidQuery` for any other statement, for several statements,
    and for clauses that Dormouse lacks.
    """
    checked_words(connection, statement)
    # a quoted name is no word, not even ";"
    kind = statement_kind([(token.start, token.word) for token in tokens_of(statement)], RUNS)
    if kind not in (*WRITING, "with"):
        raise refusal_to_write(kind)
    try:
        # DuckDB acts on some statements when it extracts them; none begins with these words
        extracted = connection.extract_statements(statement)
    except duckdb.Error as error:
        raise syntax_error(error, statement) from None
    if len(extracted) != 1:
        raise InvalidQuery(f"only one statement can be run at a time, not {len(extracted)}")
    names = frozenset(name.lower() for name in extracted[0].named_parameters)
    plain = with_literals(with_plain_spaces(statement), names, parameters)
    return checked(connection, _Parser(plain).statement())


class _Parser(Scanner):
    """A reader of one statement, which DuckDB's parser has accepted."""

    def statement(self) -> Written:
        prefix = self._prefix()
        verb = self.word()
        if prefix and verb not in {"insert", "merge"}:
            raise InvalidQuery(
                f"WITH … {verb.upper()} is not supported: WITH goes before INSERT and MERGE INTO; {_ADVICE}"
                if verb in WRITING
                else f"{RUNS}; not WITH … {verb.upper()}: {READS_RUN}"
            )
        self.at += 1
        statement = self._after(verb, prefix)
        if self.sees("returning"):
            raise InvalidQuery(_RETURNING)
        if not self.is_at_end:
            raise self.unread("this is not supported here")
        return statement

    def _after(self, verb: str, prefix: str) -> Written:
        if verb == "insert":
            return self._insert(prefix)
        if verb == "merge":
            return self._merge(prefix)
        if verb == "update":
            return self._update()
        if verb == "delete":
            return self._delete()
        if verb == "truncate":
            return self._truncate()
        raise refusal_to_write(verb)

    def _prefix(self) -> str:
        """Moves past WITH and its queries, and returns their text; "" without one."""
        first = self.at
        if not self.takes("with"):
            return ""
        while True:
            self.until(lambda: self.keyword() in {"as", "using"})
            while self.word() in {"as", "not", "materialized", "using", "key"}:
                self.at += 1
            self.needs("(")
            self.until(lambda: False)
            self.needs(")")
            if not (self.sees(",") or self.sees("as") or self.sees("using")):
                return self.text(first, self.at)

    def _target(self, *before_alias: str, alias: bool = True) -> Target:
        """Moves past the name of the table to change, and the alias that may follow."""
        if self.sees("only"):
            raise self.unread("leave ONLY out")
        table = self.name("the name of a table")
        if self.takes("."):
            if table.lower() != "main" or self.word(1) == ".":
                raise InvalidQuery(f"there is no schema {table!r}: use the name of the table alone")
            table = self.name("the name of a table")
        if self.takes("as") or (
            alias and not self.is_at_end and self.word() not in (*before_alias, "returning")
        ):
            return Target(table, self.name("an alias"))
        return Target(table, table)

    def _insert(self, prefix: str) -> Insert:
        how: Conflict | None = None
        if self.takes("or", "replace"):
            how = Conflict("replace")
        elif self.takes("or", "ignore"):
            how = Conflict("nothing")
        self.needs("into")
        target = self._target(alias=False)
        by_name = self._by() == "by name"
        columns = self.names("a column") if self.sees("(") and not self._opens_query() else None
        if columns is not None:
            _check_once(columns)
            if by_name:
                raise InvalidQuery(
                    "INSERT BY NAME takes the names of the query's columns: leave the list out"
                )
        if self.sees("default", "values"):
            raise InvalidQuery("DEFAULT VALUES gives no value of the keys, which are never null: name them")
        if self.sees("overriding"):
            raise self.unread("leave OVERRIDING out")
        query = self._query(prefix)
        if self.takes("on", "conflict"):
            how = self._conflict()
        return Insert(target, query, columns, by_name, how)

    def _by(self) -> Star | None:
        if self.takes("by", "name"):
            return "by name"
        return "by position" if self.takes("by", "position") else None

    def _opens_query(self) -> bool:
        """Returns whether the parenthesis that follows encloses a query, and not names of columns."""
        depth = 0
        while self.word(depth) == "(":
            depth += 1
        return self.word(depth) in _BEGINNINGS and self.word(depth + 1) not in {",", ")"}

    def _query(self, prefix: str) -> Query:
        """Moves past the rows of an INSERT."""
        cells = self._cells() if self.sees("values") else ()
        text = self.until(lambda: self.keyword() == "returning" or self._begins_conflict())
        return Query(prefix, text, tuple(cells))

    def _begins_conflict(self) -> bool:
        return self.sees("on", "conflict") and self.word(2) in {"do", "(", "on", "where"}

    def _cells(self) -> list[Cell]:
        """Returns the values in VALUES; moves nothing."""
        first, start, found = self.at, self.place(), []
        self.takes("values")
        while self.takes("("):
            column = 0
            while not self.takes(")"):
                begin, is_default = self.place(), self.word() == "default" and self.word(1) in {",", ")"}
                self.until(lambda: self.sees(","))
                found.append(Cell(begin - start, self.place() - start, column, is_default))
                column += 1
                # a comma may end the list
                self.takes(",")
            if not self.takes(","):
                break
        self.at = first
        return found

    def _conflict(self) -> Conflict:
        if self.sees("on", "constraint"):
            raise self.unread("name the columns of the key")
        columns = self.names("a column") if self.sees("(") else ()
        if self.sees("where"):
            raise self.unread("keys have no condition")
        self.needs("do")
        if self.takes("nothing"):
            return Conflict("nothing", columns)
        self.needs("update", "set")
        sets = self._sets()
        condition = self._condition("where")
        return Conflict("update", columns, sets, condition)

    def _update(self) -> Update:
        target = self._target("set")
        self.needs("set")
        sets = self._sets()
        if self.sees("from"):
            raise InvalidQuery(f"UPDATE … FROM is not supported: {_ADVICE}")
        return Update(target, sets, self._condition("where"))

    def _delete(self) -> Delete:
        self.needs("from")
        target = self._target("where", "using")
        if self.sees("using"):
            raise InvalidQuery(f"DELETE … USING is not supported: {_ADVICE}")
        return Delete(target, self._condition("where"))

    def _truncate(self) -> Delete:
        self.takes("table")
        return Delete(self._target(alias=False))

    def _condition(self, word: str, *ends: str) -> Expression | None:
        """Moves past a word and the condition after it. Returns None if the word does not follow."""
        return (
            Expression(self.until(lambda: self.keyword() in {*ends, "returning"}))
            if self.takes(word)
            else None
        )

    def _sets(self) -> tuple[Assignment, ...]:
        """Moves past the assignments after SET."""
        found: list[Assignment] = []
        while True:
            if not self.sees("("):
                column = self.name("a column")
                self.needs("=")
                found.append(Assignment(column, self._value()))
            else:
                columns = self.names("a column")
                self.needs("=")
                self.takes("row")
                self.needs("(")
                values = self.items(self._value)
                self.needs(")")
                # DuckDB's parser has compared the numbers
                found += map(Assignment, columns, values)
            # a comma may end the list
            if not self.takes(",") or self.is_at_end or self.keyword() in _ENDS_OF_VALUE:
                break
        _check_once([one.column for one in found])
        return tuple(found)

    def _value(self) -> Expression | None:
        """Moves past a value; returns None for DEFAULT."""
        text = self.until(self._ends_value)
        return None if text.strip().lower() == "default" else Expression(text)

    def _ends_value(self) -> bool:
        word = self.keyword()
        # a IS DISTINCT FROM b
        return word in _ENDS_OF_VALUE or (word == "from" and self.word(-1) != "distinct")

    def _merge(self, prefix: str) -> Merge:
        self.needs("into")
        target = self._target("using")
        self.needs("using")
        query, source = self._source(prefix)
        on: Expression | None = None
        using: tuple[str, ...] = ()
        if self.takes("using"):
            using = self.names("a column")
        else:
            self.needs("on")
            on = Expression(self.until(lambda: self.keyword() == "when"))
        if source.lower() == target.alias.lower():
            raise InvalidQuery(f"the table and the source of MERGE INTO are both called {source!r}: use AS")
        clauses = [self._clause()]
        while self.sees("when"):
            clauses.append(self._clause())
        return Merge(target, query, source, tuple(clauses), on, using)

    def _source(self, prefix: str) -> tuple[Query, str]:
        """Moves past the source of a MERGE; returns its query, and the name by which it is called."""
        first = self.at
        if self.takes("("):
            self.until(lambda: False)
            self.needs(")")
            name = ""
        else:
            name = self.name("a table, or a SELECT in parentheses")
            while self.takes("."):
                name = self.name("the name of a table")
        if self.takes("as") or self.word() not in {"on", "using", "("}:
            name = self.name("an alias")
            if self.sees("("):
                self.names("a column")
        end = self.at
        if not name or self.word() not in {"on", "using"}:
            raise self.unread("USING takes a table, or a SELECT with an alias: (SELECT …) AS s")
        return Query(prefix, f"SELECT * FROM {self.text(first, end)}"), name

    def _clause(self) -> Clause:
        self.needs("when")
        of: Of = "matched"
        if self.takes("not"):
            of = "not matched"
        self.needs("matched")
        if self.takes("by", "source"):
            of = "not matched by source"
        else:
            self.takes("by", "target")
        condition = self._condition("and", "then")
        self.needs("then")
        if self.takes("do", "nothing"):
            return Clause(of, "nothing", condition)
        if self.takes("delete"):
            return Clause(of, "delete", condition)
        if self.takes("error"):
            is_bare = self.is_at_end or self.word() in {"when", "returning"}
            message = (
                None if is_bare else Expression(self.until(lambda: self.keyword() in {"when", "returning"}))
            )
            return Clause(of, "error", condition, message=message)
        if self.takes("update"):
            if of == "not matched":
                raise InvalidQuery("a row that is NOT MATCHED is not in the table: INSERT it")
            return self._all_or(Clause(of, "update", condition), "set")
        self.needs("insert")
        if of != "not matched":
            raise InvalidQuery(f"WHEN {of.upper()} THEN INSERT is not supported: use WHEN NOT MATCHED")
        return self._all_or(Clause(of, "insert", condition), "(", "values", "default")

    def _all_or(self, clause: Clause, *parts: str) -> Clause:
        """Moves past the columns of an UPDATE or INSERT: all of the source, or assignments."""
        star = self._by()
        is_set = clause.action == "update" and self.takes("set")
        if self.takes("*") or not (is_set or self.word() in parts):
            if clause.of == "not matched by source":
                raise InvalidQuery("WHEN NOT MATCHED BY SOURCE THEN UPDATE has no source: SET each column")
            return replace(clause, star=star or "by position")
        if star is not None:
            raise self.unread(f"{star.upper()} is for all columns: leave it out")
        return replace(clause, sets=self._sets() if is_set else self._inserted())

    def _inserted(self) -> tuple[Assignment, ...]:
        columns = self.names("a column") if self.sees("(") else None
        if self.sees("default", "values"):
            raise InvalidQuery("DEFAULT VALUES gives no value of the keys, which are never null: name them")
        self.needs("values", "(")
        values = self.items(self._value)
        self.needs(")")
        if columns is None:
            return tuple(Assignment("", value) for value in values)
        if len(columns) != len(values):
            raise InvalidQuery(f"INSERT names {len(columns)} columns and has {len(values)} values")
        _check_once(columns)
        return tuple(map(Assignment, columns, values))


_BEGINNINGS = {"select", "from", "values", "with", "table", "pivot", "unpivot"}
_ENDS_OF_VALUE = {",", "where", "returning", "when"}


def _check_once(columns: Sequence[str]) -> None:
    lower = [column.lower() for column in columns]
    for column in columns:
        if lower.count(column.lower()) > 1:
            raise InvalidQuery(f"column {column!r} is named twice")
