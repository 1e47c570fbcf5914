"""What a query of a row table consists of, once its names and types are known: pure values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar

from sqlglot import exp
from sqlglot.dialects.dialect import Dialect
from sqlglot.errors import ParseError, SqlglotError
from sqlglot.tokenizer_core import Token, TokenType

from dormouse.errors import InvalidQuery

# The text of a query as a tree: read by sqlglot, and refused where it holds what is not on the list.

CHARACTERS_MAX = 200_000
TOKENS_MAX = 40_000
DEPTH_MAX = 50
"""Of parentheses within each other. (The tree's other depths end as Python's recursion does.)"""

SHAPE = "a query is SELECT … FROM the table, and may have WHERE, GROUP BY, HAVING, ORDER BY, LIMIT and OFFSET"

ELSEWHERE = "instance.sql(…), 'dormouse sql' and /v1/sql read the same rows with the SQL of DuckDB"

_OPENING = {TokenType.L_PAREN, TokenType.L_BRACKET, TokenType.L_BRACE}
_CLOSING = {TokenType.R_PAREN, TokenType.R_BRACKET, TokenType.R_BRACE}
_GLUED = {TokenType.NUMBER, TokenType.VAR, TokenType.STRING, TokenType.IDENTIFIER}
_SHOWN_MAX = 60
_CHANGES = {"INSERT", "UPDATE", "MERGE", "DELETE", "TRUNCATE"}
_INSTEAD = "rows are changed by change(…) of dm.Insert, dm.Update and dm.Remove, or by 'dormouse rows change'"
N = TypeVar("N", bound=exp.Expression)


class _Dialect(Dialect):
    """The SQL that all databases have, with no quotes but ' and "; nulls come last, as DuckDB has them."""

    NULL_ORDERING = "nulls_are_last"


_dialect = _Dialect()

WORDS = {
    "joins": "a join", "with_": "WITH", "into": "INTO", "locks": "a row lock",
    "laterals": "LATERAL", "windows": "WINDOW", "qualify": "QUALIFY", "query": "a sub-query",
    "hint": "a hint", "db": "a schema", "catalog": "a database", "except_": "EXCEPT", "replace": "REPLACE",
    "sample": "a sample", "pivots": "PIVOT", "grouping_sets": "GROUPING SETS", "rollup": "ROLLUP",
    "cube": "CUBE", "all": "ALL", "unnest": "UNNEST", "on": "ON", "only": "ONLY",
    "columns": "a list of columns", "symmetric": "SYMMETRIC",
    exp.Subquery: "a sub-query", exp.Select: "a sub-query", exp.Exists: "a sub-query",
    exp.Window: "a window", exp.Placeholder: "a placeholder", exp.Parameter: "a placeholder",
    exp.Any: "ANY", exp.Tuple: "a list of values", exp.ILike: "ILIKE",
    exp.Fetch: "FETCH", exp.Filter: "FILTER", exp.Values: "VALUES",
}  # fmt: skip


def parse(text: object) -> exp.Select:
    """The tree of one SELECT, of which only the root has been looked at; `InvalidQuery`."""
    if not isinstance(text, str) or not text.strip():
        raise InvalidQuery(f"a query is a text of SQL, not {_shown(repr(text))}")
    if len(text) > CHARACTERS_MAX:
        raise InvalidQuery(f"the query has {len(text):,} characters, and may have {CHARACTERS_MAX:,}")
    if "\0" in text or not _is_unicode(text):
        raise InvalidQuery("the query has a character that no text has: NUL, or half a surrogate pair")
    try:
        tokens = _dialect.tokenize(text)
        _check(tokens)
        trees = [tree for tree in _dialect.parser().parse(tokens, text) if tree is not None]
        _keep_names(trees, text)
    except InvalidQuery:
        raise
    except ParseError as error:
        found: dict[str, Any] = error.errors[0] if error.errors else {}
        where = (
            f" near {_shown(repr(found['highlight']))}, line {found['line']}"
            if found.get("highlight")
            else ""
        )
        raise InvalidQuery(f"the query cannot be read{where}; {SHAPE}") from None
    except SqlglotError:
        raise InvalidQuery(
            "the query cannot be read: a quote is not closed, or a character has no meaning"
        ) from None
    except (RecursionError, ValueError, TypeError, AttributeError, IndexError, KeyError):
        # what sqlglot does not expect, of what no query has
        raise InvalidQuery(f"the query cannot be read; {SHAPE}") from None
    if len(trees) != 1:
        raise InvalidQuery("the query is several statements: send one")
    if type(trees[0]) is not exp.Select:
        raise refused(trees[0])
    return trees[0]


def _keep_names(trees: Sequence[exp.Expr], text: str) -> None:
    """Notes what the text calls each function, which the parser may call by another name."""
    for tree in trees:
        for node in tree.find_all(exp.Func):
            if "start" in node.meta:
                node.meta["name"] = text[node.meta["start"] : node.meta["end"] + 1]


def only(node: N, *names: str) -> N:
    """The node, if all that it says is in these arguments; `InvalidQuery` names the first other."""
    for name, value in node.args.items():
        if name not in names and value not in (None, False, []):
            raise refused(value[0] if isinstance(value, list) else value, name)
    return node


def refused(node: object, argument: str = "") -> InvalidQuery:
    """The error of what is not on the list."""
    what = WORDS.get(argument) or WORDS.get(type(node))
    if what is None and isinstance(node, exp.Anonymous):
        what = f"the function {_shown(str(node.this))!r}"
    elif what is None and isinstance(node, exp.Func) and not isinstance(node, exp.Connector):
        what = f"the function {_shown(str(node.meta.get('name') or node.sql_name()).lower())!r}"
    elif what is None and isinstance(node, exp.Expression):
        what = f"{node.key.upper()!r}"
    return InvalidQuery(
        f"the query has {what or argument.upper()}, which is not allowed; {SHAPE}; {ELSEWHERE}"
    )


def name_node(node: object) -> exp.Identifier:
    """Returns the node, which must be a name; `InvalidQuery`."""
    if type(node) is not exp.Identifier:
        raise refused(node)
    return node


def label(node: exp.Expression) -> str:
    """What an item is called that has no name."""
    return _shown(node.sql(dialect=_Dialect, normalize_functions="lower", comments=False))


def _check(tokens: list[Token]) -> None:
    if not tokens or tokens[0].token_type is not TokenType.SELECT:
        changes = tokens and tokens[0].text.upper() in _CHANGES
        instead = f"; {_INSTEAD if changes else ELSEWHERE}"
        raise InvalidQuery(f"the query does not begin with SELECT; {SHAPE}{instead}")
    if len(tokens) > TOKENS_MAX:
        raise InvalidQuery(f"the query has {len(tokens):,} words, and may have {TOKENS_MAX:,}")
    depth = 0
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        kind = token.token_type
        depth += (kind in _OPENING) - (kind in _CLOSING)
        if depth > DEPTH_MAX:
            raise InvalidQuery(f"the query has more than {DEPTH_MAX} parentheses within each other")
        if token.comments or kind is TokenType.HINT:
            raise InvalidQuery("the query has a comment: send it without")
        if kind is TokenType.SEMICOLON and following is not None:
            raise InvalidQuery("the query is several statements: send one")
        if following is not None and _are_glued(token, following):
            raise InvalidQuery(
                f"the query cannot be read near {_shown(following.text)!r}: a space is missing"
            )


def _are_glued(token: Token, following: Token) -> bool:
    """As in 1_000, 0x1f and N'x', which other databases read otherwise."""
    kinds = {token.token_type, following.token_type}
    return token.end + 1 == following.start and kinds <= _GLUED


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"


Kind: TypeAlias = Literal["INTEGER", "DOUBLE", "STRING", "BOOLEAN", "DATE", "JSON", "NULL"]
"""What counts for comparisons: an ENTITY, LINK or FILE is a STRING, a bare null is NULL."""

Operator: TypeAlias = Literal[
    "+", "-", "*", "/", "%", "negate", "=", "<>", "<", "<=", ">", ">=", "and", "or", "not", "is null", "in",
    "like", "as double", "as text", "case", "coalesce", "nullif", "||", "length", "trim", "abs",
    "is distinct from", "is not distinct from",
]  # fmt: skip
Function: TypeAlias = Literal["count", "sum", "avg", "min", "max"]

ROW_ID_COLUMN, ROW_VERSION_COLUMN = -1, -2
"""What stands for a column's id."""


@dataclass(frozen=True, slots=True)
class Value:
    """What stood in the statement as itself; it travels as a parameter."""

    kind: Kind
    value: int | float | str | bool | None


class ValueNeeded(Exception):
    """What a statement means depends on the value of a parameter."""


class Parameter(Value):
    """A parameter whose value is not known; who wants to know it, or compares it, gets `ValueNeeded`."""

    __slots__ = ("name",)
    name: str

    def __init__(self, kind: Kind, name: str) -> None:
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "name", name)

    @property
    def value(self) -> NoReturn:
        raise ValueNeeded

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Value):
            raise ValueNeeded
        return NotImplemented

    __hash__ = Value.__hash__


@dataclass(frozen=True, slots=True)
class Cell:
    """A column of the row."""

    kind: Kind
    column_id: int


@dataclass(frozen=True, slots=True)
class Apply:
    """An operator on its operands: of "and", "or", "in" and "coalesce" any number.

    "like" has a third that escapes.
    "case" has pairs of a condition and a value, and then the value of none.
    """

    kind: Kind
    operator: Operator
    operands: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Of the rows of a group; `operand` is None for `count(*)`."""

    kind: Kind
    function: Function
    operand: Expression | None
    distinct: bool = False


Expression: TypeAlias = Value | Cell | Apply | Aggregate

ROW_ID_CELL, ROW_VERSION_CELL = Cell("INTEGER", ROW_ID_COLUMN), Cell("INTEGER", ROW_VERSION_COLUMN)


@dataclass(frozen=True, slots=True)
class Selected:
    """An item of the select list; `column_id` when it is a column as it is."""

    name: str
    type: str
    expression: Expression

    @property
    def column_id(self) -> int | None:
        """Of a column of the table as it is; ROW_ID and ROW_VERSION are none."""
        found = self.expression.column_id if isinstance(self.expression, Cell) else 0
        return found if found > 0 else None


@dataclass(frozen=True, slots=True)
class Order:
    """A part of the order of the rows."""

    expression: Expression
    descending: bool = False
    nulls_first: bool = False


@dataclass(frozen=True, slots=True)
class Statement:
    """A query. It `is_plain` when each of its rows is one of the table's."""

    selected: tuple[Selected, ...]
    distinct: bool = False
    where: Expression | None = None
    groups: tuple[Expression, ...] = ()
    is_grouped: bool = False
    orders: tuple[Order, ...] = ()
    limit: int | None = None
    offset: int = 0
    having: Expression | None = None

    @property
    def is_plain(self) -> bool:
        return not (self.distinct or self.is_grouped)


def conditions(where: Expression | None) -> Iterator[Expression]:
    """What must all be true."""
    if isinstance(where, Apply) and where.operator == "and":
        for operand in where.operands:
            yield from conditions(operand)
    elif where is not None:
        yield where


def compared(condition: Expression) -> Expression | None:
    """What a condition compares with values, and so is never null where it is true."""
    if isinstance(condition, Apply) and condition.operator in {"=", "<", "<=", ">", ">=", "<>", "in", "like"}:
        return condition.operands[0]
    if isinstance(condition, Apply) and condition.operator == "not":
        (inner,) = condition.operands
        if isinstance(inner, Apply) and inner.operator in {"is null", "in", "like"}:
            return inner.operands[0]
    return None


def depth(statement: Statement) -> int:
    """How deep its expressions are, and the condition of being after a place in its order."""
    level = [item.expression for item in statement.selected]
    level += [
        *statement.groups,
        *conditions(statement.where),
        *conditions(statement.having),
        *(one.expression for one in statement.orders),
    ]
    found = 2 * len(statement.orders)
    while level:
        found += 1
        level = [operand for one in level for operand in _operands(one)]
    return found


def _operands(expression: Expression) -> Sequence[Expression]:
    if isinstance(expression, Apply):
        return expression.operands
    operand = expression.operand if isinstance(expression, Aggregate) else None
    return () if operand is None else (operand,)


def filled(expression: Expression, values: Mapping[str, Value]) -> Expression:
    """With the values of its parameters."""
    if isinstance(expression, Parameter):
        return values[expression.name]
    if isinstance(expression, Apply):
        operands = tuple(filled(one, values) for one in expression.operands)
        return Apply(expression.kind, expression.operator, operands)
    return expression


def has_parameter(expression: Expression) -> bool:
    """Whether it has one whose value is not known."""
    return isinstance(expression, Parameter) or any(map(has_parameter, _operands(expression)))


def has_aggregate(expression: Expression) -> bool:
    """Whether it is of a group, somewhere within."""
    if isinstance(expression, Apply):
        return any(map(has_aggregate, expression.operands))
    return isinstance(expression, Aggregate)
