"""The parser of queries of row tables. It parses the text with sqlglot, and refuses all that is not allowed.

Only the listed kinds of nodes are allowed, with the listed arguments. No text of the query is executed:
`binding.py` turns the tree into values of its own, and `emit.py` turns these into SQL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from sqlglot import exp
from sqlglot.dialects.dialect import Dialect
from sqlglot.errors import ParseError, SqlglotError
from sqlglot.tokenizer_core import Token, TokenType

from dormouse.errors import InvalidQuery

CHARACTERS_MAX = 200_000
TOKENS_MAX = 40_000
DEPTH_MAX = 50
"""The deepest nesting of parentheses. Python's recursion limit bounds other nesting."""

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
    """The SQL dialect of queries, which has only common syntax, and only ' and " as quotes.

    Nulls are sorted last.
    """

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
    """Returns the syntax tree of a text that is one SELECT. Raises `InvalidQuery` for other texts.

    Does not check the parts of the SELECT.
    """
    if not isinstance(text, str) or not text.strip():
        raise InvalidQuery(f"a query is a text of SQL, not {_shortened(repr(text))}")
    if len(text) > CHARACTERS_MAX:
        raise InvalidQuery(f"the query has {len(text):,} characters, and may have {CHARACTERS_MAX:,}")
    if "\0" in text or not _is_unicode(text):
        raise InvalidQuery("the query has an invalid character: NUL, or half a surrogate pair")
    try:
        tokens = _dialect.tokenize(text)
        _check(tokens)
        trees = [tree for tree in _dialect.parser().parse(tokens, text) if tree is not None]
        _keep_names(trees, text)
    except InvalidQuery:
        raise
    except ParseError as error:
        details: dict[str, Any] = error.errors[0] if error.errors else {}
        where = (
            f" near {_shortened(repr(details['highlight']))}, line {details['line']}"
            if details.get("highlight")
            else ""
        )
        raise InvalidQuery(f"the query cannot be read{where}; {SHAPE}") from None
    except SqlglotError:
        raise InvalidQuery(
            "the query cannot be read: a quote is not closed, or a character is not allowed"
        ) from None
    except (RecursionError, ValueError, TypeError, AttributeError, IndexError, KeyError):
        # sqlglot fails with such errors on some invalid texts
        raise InvalidQuery(f"the query cannot be read; {SHAPE}") from None
    if len(trees) != 1:
        raise InvalidQuery("the query is several statements: send one")
    if type(trees[0]) is not exp.Select:
        raise refused(trees[0])
    return trees[0]


def _keep_names(trees: Sequence[exp.Expr], text: str) -> None:
    """Records in the tree the name that each function has in the text, for error messages.

    This is needed because sqlglot may rename functions.
    """
    for tree in trees:
        for node in tree.find_all(exp.Func):
            if "start" in node.meta:
                node.meta["name"] = text[node.meta["start"] : node.meta["end"] + 1]


def only(node: N, *names: str) -> N:
    """Returns the node if it has no arguments but the named ones. Otherwise raises `InvalidQuery`."""
    for name, value in node.args.items():
        if name not in names and value not in (None, False, []):
            raise refused(value[0] if isinstance(value, list) else value, name)
    return node


def refused(node: object, argument: str = "") -> InvalidQuery:
    """Returns the error for a node or argument that is not allowed."""
    what = WORDS.get(argument) or WORDS.get(type(node))
    if what is None and isinstance(node, exp.Anonymous):
        what = f"the function {_shortened(str(node.this))!r}"
    elif what is None and isinstance(node, exp.Func) and not isinstance(node, exp.Connector):
        what = f"the function {_shortened(str(node.meta.get('name') or node.sql_name()).lower())!r}"
    elif what is None and isinstance(node, exp.Expression):
        what = f"{node.key.upper()!r}"
    return InvalidQuery(
        f"the query has {what or argument.upper()}, which is not allowed; {SHAPE}; {ELSEWHERE}"
    )


def name_node(node: object) -> exp.Identifier:
    """Returns the node, which must be a name. Raises `InvalidQuery`."""
    if type(node) is not exp.Identifier:
        raise refused(node)
    return node


def label(node: exp.Expression) -> str:
    """Returns the name of a selected item that has no alias. The name is the SQL of the item."""
    return _shortened(node.sql(dialect=_Dialect, normalize_functions="lower", comments=False))


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
                f"the query cannot be read near {_shortened(following.text)!r}: a space is missing"
            )


def _are_glued(token: Token, following: Token) -> bool:
    """Returns whether two tokens touch, as in 1_000, 0x1f or N'x', which some databases read as one."""
    kinds = {token.token_type, following.token_type}
    return token.end + 1 == following.start and kinds <= _GLUED


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"
