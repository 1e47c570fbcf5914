"""The clauses of a statement: where they are among its tokens, and the expressions that they have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar, cast

import duckdb

from dormouse.errors import InvalidQuery
from dormouse.model.types import Parameters
from dormouse.reading.sql.conditions import literal_of, text
from dormouse.reading.sql.constants import Node, value_of
from dormouse.reading.sql.parsed import check_reads_no_table
from dormouse.reading.sql.wanted import PARAMETER, parameter_values

T = TypeVar("T")
_NAME = re.compile(rb'"((?:[^"]|"")*)"|([A-Za-z_\x80-\xff][\w$\x80-\xff]*)')
OPENING = {"(": ")", "[": "]", "{": "}"}
_SPACES = re.compile("[\u00a0\u2000-\u200d\u202f\u205f\u2060\u3000\ufeff]")
"""Characters that DuckDB's parser reads as a space, but its tokenizer as a letter."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a statement."""

    start: int
    """The place where it begins, in UTF-8."""
    word: str
    """The text, in lower case, of an unquoted word or a sign; "" for other tokens."""
    name: str = ""
    """The name that the token is, without quotes; "" for no name."""


def tokens_of(statement: str) -> list[Token]:
    """Returns the tokens of a statement."""
    raw, found = statement.encode(), []
    for start, kind in duckdb.tokenize(statement):
        # a number may begin with a point, which is not the point of a name
        is_value = kind in (duckdb.token_type.string_const, duckdb.token_type.numeric_const)
        named = None if is_value else _NAME.match(raw, start)
        if named is None:
            sign = raw[start : start + 1].decode(errors="replace")
            found.append(Token(start, "" if is_value else sign))
        elif named[1] is not None:
            found.append(Token(start, "", named[1].decode().replace('""', '"')))
        else:
            name = named[2].decode()
            found.append(Token(start, name.lower(), name))
    return found


class Scanner:
    """A position among the tokens of a statement, which moves from clause to clause."""

    def __init__(self, statement: str) -> None:
        self._raw = statement.encode()
        self._tokens = [*tokens_of(statement)]
        while self._tokens and self._tokens[-1].word == ";":
            self._raw = self._raw[: self._tokens.pop().start]
        self.at = next((n for n, token in enumerate(self._tokens) if token.word != ";"), 0)
        """The number of the next token."""

    @property
    def is_at_end(self) -> bool:
        return not self.has(0)

    def has(self, ahead: int) -> bool:
        """Returns whether this many more tokens follow the next one."""
        return self.at + ahead < len(self._tokens)

    def word(self, ahead: int = 0) -> str:
        """Returns the word or sign of a token that follows; "" for others, and after the end."""
        return self._tokens[self.at + ahead].word if self.has(ahead) else ""

    def sees(self, *words: str) -> bool:
        """Returns whether these words follow."""
        return all(self.word(n) == word for n, word in enumerate(words))

    def takes(self, *words: str) -> bool:
        """Moves past these words if they follow; returns whether they did."""
        if is_there := self.sees(*words):
            self.at += len(words)
        return is_there

    def needs(self, *words: str) -> None:
        """Moves past these words. Raises `InvalidQuery` if they do not follow."""
        if not self.takes(*words):
            raise self.unread(f"expected {' '.join(words).upper()}")

    def name(self, what: str) -> str:
        """Moves past a name and returns it. Raises `InvalidQuery` if none follows."""
        found = "" if self.is_at_end else self._tokens[self.at].name
        if not found:
            raise self.unread(f"expected {what}")
        self.at += 1
        return found

    def names(self, what: str) -> tuple[str, ...]:
        """Moves past a list of names in parentheses and returns them."""
        self.needs("(")
        found = self.items(lambda: self.name(what))
        self.needs(")")
        return found

    def items(self, read: Callable[[], T]) -> tuple[T, ...]:
        """Returns what `read` returns for each item of a list in parentheses; a comma may end the list."""
        found = [read()]
        while self.takes(",") and not self.sees(")"):
            found.append(read())
        return tuple(found)

    def until(self, ends: Callable[[], bool]) -> str:
        """Moves to the first token outside of brackets and CASE at which `ends` is true.

        Returns the text before it. Raises `InvalidQuery` if it is empty, or brackets do not match.
        """
        closing: list[str] = []
        first = self.at
        while not self.is_at_end:
            word = self.keyword()
            if not closing and (ends() or word in OPENING.values()):
                break
            if word in OPENING:
                closing.append(OPENING[word])
            elif word == "case":
                closing.append("end")
            elif closing and word == closing[-1]:
                closing.pop()
            elif word in OPENING.values():
                raise self.unread("the brackets do not match")
            self.at += 1
        if closing or first == self.at:
            raise self.unread("expected an expression")
        return self.text(first, self.at)

    def keyword(self) -> str:
        """Returns the next word if it is not a part of a name: nothing for `order` in t.order."""
        return "" if self.at and self._tokens[self.at - 1].word == "." else self.word()

    def text(self, first: int, end: int) -> str:
        """Returns the text of the tokens from `first` until before `end`."""
        start, stop = self._place(first), self._place(end)
        # a comment at the end would hide what follows the expression
        has_comment = b"--" in self._raw[self._place(end - 1) : stop]
        return self._raw[start:stop].decode().strip() + "\n" * has_comment

    def place(self, ahead: int = 0) -> int:
        """Returns the place of a token that follows, in bytes."""
        return self._place(self.at + ahead)

    def _place(self, number: int) -> int:
        return self._tokens[number].start if number < len(self._tokens) else len(self._raw)

    def unread(self, why: str) -> InvalidQuery:
        """Returns the error for a token that the statement cannot have at the present position."""
        rest = self._raw[self._place(self.at) :].decode()
        near = f" near {rest.split(maxsplit=1)[0]!r:.60}" if rest.strip() else " at the end"
        return InvalidQuery(f"cannot read the statement{near}: {why}")


@dataclass(frozen=True, slots=True)
class Reference:
    """A column that an expression names: the place of the name in UTF-8, and the name's parts."""

    start: int
    names: tuple[str, ...]


Column = tuple[str, ...]
Constant = tuple[str, Any]
"""DuckDB's name of a type, and a value: an int, a text, or None for null."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of a column with constants, or with another column.

    The signs are "=", "<", "<=", ">", ">=", "in" and "is null".
    """

    column: Column
    sign: str
    constants: tuple[Constant, ...] = ()
    other: Column = ()


@dataclass(frozen=True, slots=True)
class Expression:
    """The text of an expression, the columns that it names, and its comparisons."""

    text: str
    references: tuple[Reference, ...] = ()
    comparisons: tuple[Comparison, ...] | None = None
    """The comparisons whose conjunction the expression is; None if it is something else."""

    def called(self, names: Mapping[str, str], bare: Mapping[str, str] | None = None) -> str:
        """Returns the text with other names of tables.

        `names` has each new name by the old one in lower case, and `bare` the table of columns that are named
        alone. Raises `InvalidQuery` for a column of a table that is not among them, but has one of the new
        names.
        """
        raw, end, parts = self.text.encode(), 0, []
        for one in sorted(self.references, key=lambda one: one.start):
            first = one.names[0].lower()
            if len(one.names) == 1:
                new = None if bare is None else bare.get(first)
            elif first in names:
                new = names[first]
            elif first in names.values():
                known = " and ".join(names)
                raise InvalidQuery(
                    f"unknown table {one.names[0]!r} of column {'.'.join(one.names)}: use {known}"
                )
            else:
                new = None
            if new is None or (new.lower() == first and len(one.names) > 1):
                continue
            there = _NAME.match(raw, one.start)
            if there is None or _unquoted(there).lower() != first:
                raise InvalidQuery(f"cannot read {'.'.join(one.names)}: write the column without a table")
            if len(one.names) == 1:
                new = f"{new}.{there[0].decode()}"
            parts += [raw[end : one.start].decode(), new]
            end = there.end()
        return "".join(parts) + raw[end:].decode()


def _unquoted(name: re.Match[bytes]) -> str:
    return (name[2] or name[1].replace(b'""', b'"')).decode()


def checked(connection: duckdb.DuckDBPyConnection, statement: T) -> T:
    """Returns a parsed statement with what DuckDB's parser finds in its expressions.

    Raises `InvalidQuery` for an expression with a subquery, or with a function that is not allowed.
    """
    listed = list(_expressions(statement))
    if not listed:
        return statement
    select = b"SELECT "
    starts: list[int] = []
    for one in listed:
        select += b"," * bool(starts) + b"(\n"
        starts.append(len(select))
        select += one.text.encode() + b"\n)"
    check_reads_no_table(connection, select.decode())
    try:
        [[tree]] = connection.execute(
            f"SELECT json_serialize_sql({text(select.decode())}, skip_null := true, skip_empty := true)"
        ).fetchall()
        nodes = json.loads(tree)["statements"][0]["node"]["select_list"]
        if len(nodes) != len(listed):
            raise InvalidQuery("cannot read the statement: write it differently")
        found = [
            Expression(one.text, tuple(_references(node, start)), _comparisons(node))
            for one, node, start in zip(listed, nodes, starts, strict=True)
        ]
        return cast(T, _replaced(statement, iter(found)))
    except RecursionError:
        raise InvalidQuery("the statement is nested too deeply") from None


def _expressions(value: Any) -> Iterator[Expression]:
    if isinstance(value, Expression):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _expressions(item)
    elif is_dataclass(value):
        for one in fields(value):
            yield from _expressions(getattr(value, one.name))


def _replaced(value: Any, others: Iterator[Expression]) -> Any:
    """Returns a value with other expressions, which are in the order of `_expressions`."""
    if isinstance(value, Expression):
        return next(others)
    if isinstance(value, tuple):
        return tuple(_replaced(item, others) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {one.name: _replaced(getattr(value, one.name), others) for one in fields(value)}
        return replace(value, **changed)
    return value


def _references(tree: Any, start: int, hidden: frozenset[str] = frozenset()) -> Iterator[Reference]:
    """Yields the columns in a tree. `hidden` has the parameters of the lambdas around it."""
    match tree:
        case {"class": "COLUMN_REF", "column_names": [str(first), *_] as names}:
            if first.lower() not in hidden:
                yield Reference(tree.get("query_location", -1) - start, tuple(names))
        case {"class": "SUBQUERY"}:
            raise InvalidQuery(
                "an expression has no subquery: write MERGE INTO table USING (SELECT …) AS s ON …"
            )
        case {"class": "LAMBDA", "lhs": left, "expr": inner}:
            # a -> b also takes b out of the JSON in a, which then may be t.a
            listed = left.get("children", [left])
            names = [one.get("column_names", []) for one in listed]
            own = {one[0].lower() for one in names if len(one) == 1}
            for one in listed:
                yield from _references(one, start, hidden | own)
            yield from _references(inner, start, hidden | own)
        case dict():
            for inner in tree.values():
                yield from _references(inner, start, hidden)
        case list():
            for inner in tree:
                yield from _references(inner, start, hidden)


_SIGNS = {
    "COMPARE_EQUAL": "=",
    "COMPARE_LESSTHAN": "<",
    "COMPARE_LESSTHANOREQUALTO": "<=",
    "COMPARE_GREATERTHAN": ">",
    "COMPARE_GREATERTHANOREQUALTO": ">=",
}
_FLIPPED = {"=": "=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


def _comparisons(node: Node) -> tuple[Comparison, ...] | None:  # noqa: PLR0911 one a kind
    """Returns the comparisons whose conjunction a node is; None if it is something else."""
    match node:
        case {"type": "CONJUNCTION_AND", "children": parts}:
            found = [_comparisons(part) for part in parts]
            return None if None in found else tuple(one for part in found for one in part or ())
        case {"type": "COMPARE_BETWEEN", "input": one, "lower": low, "upper": high}:
            lower, upper = _compared(one, ">=", [low]), _compared(one, "<=", [high])
            return lower and upper and (*lower, *upper)
        case {"type": "COMPARE_IN", "children": [one, *items]}:
            return _compared(one, "in", items)
        case {"type": "OPERATOR_IS_NULL", "children": [one]}:
            return _compared(one, "is null", [])
        case {"class": "COMPARISON", "type": kind, "left": left, "right": right} if kind in _SIGNS:
            sign = _SIGNS[kind]
            if (column := _column(left)) and (other := _column(right)):
                return (Comparison(column, sign, other=other),)
            return _compared(left, sign, [right]) or _compared(right, _FLIPPED[sign], [left])
    return None


def _compared(side: Node, sign: str, items: Sequence[Node]) -> tuple[Comparison, ...] | None:
    column, constants = _column(side), [_constant(item) for item in items]
    if column is None or None in constants:
        return None
    return (Comparison(column, sign, tuple(filter(None, constants))),)


def _column(node: Node) -> Column | None:
    match node:
        case {"class": "COLUMN_REF", "column_names": names}:
            return tuple(names)
    return None


def _constant(node: Node) -> Constant | None:
    match node:
        case {"class": "CAST", "cast_type": {"id": kind}, "child": child, **how} if not how.get("try_cast"):
            found = _constant(child)
            return (kind, found[1]) if found is not None and found[0] == "VARCHAR" else None
        case {"class": "CONSTANT", "value": {"type": {"id": kind}} as constant}:
            value = value_of(constant)
            return (kind, value) if isinstance(value, int | str) else None
    return None


def with_plain_spaces(statement: str) -> str:
    """Returns the statement with a plain space for each character that only DuckDB's parser reads as one."""
    if not _SPACES.search(statement):
        return statement
    raw, found = statement.encode(), []
    tokens = [*duckdb.tokenize(statement), (len(raw), None)]
    found.append(raw[: tokens[0][0]].decode())
    for (start, kind), (end, _) in pairwise(tokens):
        part = raw[start:end].decode()
        is_quoted = kind == duckdb.token_type.string_const or part.startswith('"')
        found.append(part if is_quoted else _SPACES.sub(" ", part))
    return "".join(found)


def with_literals(statement: str, names: frozenset[str], parameters: Parameters) -> str:
    """Returns the statement with literals in place of its parameters, whose names in lower case are `names`.

    Each `?` counts from left to right. Raises `InvalidQuery` for values that do not fit the names.
    """
    values = parameter_values(names, parameters)
    raw, parts, end, count, numbered = statement.encode(), [], 0, 0, False
    for start, kind in duckdb.tokenize(statement):
        found = PARAMETER.match(raw, start) if kind == duckdb.token_type.operator else None
        if found is None:
            continue
        name = (found[1] or found[2] or b"").decode()
        numbered, count = numbered or bool(name), count + (not name)
        if numbered and count:
            raise InvalidQuery("use either ? or $1 and $name for the parameters of a statement, not both")
        key = name[1:-1].replace('""', '"') if name.startswith('"') else name or str(count)
        parts += [raw[end:start].decode(), f" {literal_of(values[key.lower()])} "]
        end = found.end()
    return "".join(parts) + raw[end:].decode()
