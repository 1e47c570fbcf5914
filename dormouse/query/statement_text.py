"""What a statement's text tells before DataFusion sees it, and what DataFusion's complaints about it mean."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable

from dormouse.errors import InvalidQuery
from dormouse.model.text import is_text
from dormouse.query.scan_session import UNBOUNDED_FUNCTIONS
from dormouse.query.where import unknown

STATEMENT_CHARACTERS_MAX = 1 << 20
CHAIN_MAX = 500
"""Operators that follow each other make a tree as deep: DataFusion's time grows with the square of its depth,
and thousands overflow the stack, which ends the process."""
JOINS_MAX = 100
"""DataFusion's time to plan joins grows with the cube of how many there are: of five hundred, 15 seconds."""

CTE_COPIES_MAX = 4_000
"""DataFusion plans a CTE anew wherever it is named: those of a chain that each name the one before twice are
as many as two to the power of its length."""

_READS = "SQL can only read: SELECT, WITH, VALUES, DESCRIBE and EXPLAIN of them"
_NO_TABLE = re.compile(r"table '(?:datafusion\.public\.)?(.*)' not found")
_REFUSED = re.compile(r"(?:DDL|DML|Statement) not supported: (\w[\w ]*)")
_UNSUPPORTED = re.compile(r"Unsupported SQL statement: (\w+)|Query (INSERT|UPDATE|DELETE|MERGE) ")
_NO_FUNCTION = re.compile(r"Invalid function '(\w+)'")
_NO_SCHEMA = re.compile(r"SHOW .* is not supported unless information_schema is enabled")

# quotes in other words than the plain ones, and comments, in which a quote is none
_UNUSUAL = re.compile(r"--|/\*|[\\$`]")
_TOKEN = re.compile(
    r"""'[^']*' | "[^"]*" | (?P<opens>[(\[{]) | (?P<closes>[)\]}]) | (?P<comma>,)
    | (?P<symbol>[-+*/%|&^<>=!~@\#:.?]+) | (?P<word>[^\W\d]\w*) | \d+(?:\.\d+)?""",
    re.VERBOSE,
)
_QUOTED = re.compile(r"""'[^']*'|"[^"]*"|`[^`]*`|--[^\n]*|/\*.*?\*/""", re.DOTALL)
# what DataFusion's parser reads, and its planner leaves out without a word
_IGNORED = re.compile(
    r"""\b(?: tablesample | sample(?=\s*\() | prewhere | connect\s+by | partition(?=\s*\()
    | with\s+(?:rollup|cube|totals)(?!\s*(?:\(|as\b|,)) )\b""",
    re.VERBOSE | re.IGNORECASE,
)
_CTE = re.compile(
    r"""(?:\bwith(?:\s+recursive)?|,)\s*("(?:[^"]|"")+"|`[^`]+`|\w+)\s*(?:\([^()]*\)\s*)?\bas\s*
    (?:(?:not\s+)?materialized\s*)?\(""",
    re.VERBOSE | re.IGNORECASE,
)
_COMBINING = {"union", "intersect", "except", "join", "minus"}
_LISTING_TABLES = {"from", "with"}
_JOINED = re.compile(r"^ *(?:\w+ )?(?:Join|Subquery):", re.MULTILINE)
_CLASSES = {"or": 1, "xor": 1, "and": 2}
_OTHERS = {
    "is",
    "like",
    "ilike",
    "in",
    "not",
    "between",
    "collate",
    "at",
    "similar",
    "rlike",
    "div",
    "overlaps",
}


def check_statement(text: object) -> str:
    """The statement, when DataFusion can be given it; `InvalidQuery`."""
    if not isinstance(text, str):
        raise InvalidQuery(f"a statement must be a string, not {text!r}")
    if not is_text(text):
        raise InvalidQuery("a statement must have neither NUL nor lone surrogates")
    if len(text) > STATEMENT_CHARACTERS_MAX:
        raise InvalidQuery(
            f"the statement has {len(text):,} characters, and may have {STATEMENT_CHARACTERS_MAX:,}"
        )
    if chain_length(text) > CHAIN_MAX:
        raise InvalidQuery(
            f"the statement chains more than {CHAIN_MAX:,} operators, tables or UNIONs: write many values as "
            "column IN (…), or ask in several statements"
        )
    if cte_copies(text) > CTE_COPIES_MAX:
        raise InvalidQuery(
            f"the statement's CTEs name each other so often that they stand for more than {CTE_COPIES_MAX:,} "
            "queries; ask in several statements"
        )
    if match := _IGNORED.search(_QUOTED.sub(" ", text)):
        raise InvalidQuery(
            f"SQL: {' '.join(match[0].upper().split())} is not supported; a name that is so called stands in "
            "double quotes"
        )
    return text


def check_joins(plan: str) -> None:
    """`InvalidQuery` when a plan that is not optimized yet, as text, takes too long to optimize."""
    if len(_JOINED.findall(plan)) > JOINS_MAX:
        raise InvalidQuery(
            f"the statement has more than {JOINS_MAX} joins, counting tables after FROM and subqueries; "
            "ask in several statements"
        )


def mistake(text: str, known: Callable[[], Iterable[str]]) -> InvalidQuery:
    """What a complaint of DataFusion's means; `known` gives the names of all tables."""
    if match := _NO_TABLE.search(text):
        return unknown("table", match[1], known())
    if match := _REFUSED.search(text) or _UNSUPPORTED.search(text):
        return InvalidQuery(f"{_READS}, not {match[1] or match[2]}")
    if _NO_SCHEMA.search(text):
        return InvalidQuery(f"{_READS}; `dormouse table list` shows tables, DESCRIBE shows columns")
    if "only supports a single SQL statement" in text:
        return InvalidQuery("SQL: give a single SQL statement, not several")
    if (match := _NO_FUNCTION.search(text)) and match[1] in UNBOUNDED_FUNCTIONS:
        return InvalidQuery(f"SQL: the function {match[1]} is not offered, as its answer can be of any size")
    return InvalidQuery(f"SQL: {text}")


def cte_copies(text: str) -> int:
    """At most how many queries the CTE stands for that stands for most of them."""
    plain = _QUOTED.sub(lambda found: found[0] if found[0][0] in '"`' else " ", text)
    found = list(_CTE.finditer(plain))
    copies: dict[str, int] = {}
    for number, match in enumerate(found):
        end = found[number + 1].start() if number + 1 < len(found) else len(plain)
        body = plain[match.end() : end]
        # a name before a dot is a column's table, not a table
        names = Counter(re.findall(r"\w++(?![\"`]?\s*\.)", body))
        made = 1 + sum(count * copies.get(name, 0) for name, count in names.items())
        copies[match[1].strip('"`')] = made
        if made > CTE_COPIES_MAX:
            return made
    return max(copies.values(), default=0)


def chain_length(text: str) -> int:
    """At least how deep the tree of the statement's operators is, apart from what parentheses make of it.

    The parser bounds how deep parentheses nest, but not how many operators, UNIONs or joins follow each
    other, whose tree is as deep as they are many.
    """
    if _UNUSUAL.search(text):
        # what is quoted is not known for sure: all of it counts
        return sum(1 for token in _TOKEN.finditer(text.translate(_UNQUOTED)) if _class_of(token) is not None)
    levels = [_Level()]
    for token in _TOKEN.finditer(text):
        if token["opens"]:
            if token["opens"] == "[":
                levels[-1].count(3)
            levels.append(_Level())
        elif token["closes"] and len(levels) > 1:
            done = levels.pop()
            levels[-1].inner = max(levels[-1].inner, done.depth)
        elif (found := _class_of(token)) is not None:
            levels[-1].count(found, is_comma=bool(token["comma"]))
        elif token["word"] and token["word"].lower() in _LISTING_TABLES:
            levels[-1].lists_tables = True
    return levels[0].depth if len(levels) == 1 else sum(level.depth for level in levels)


_UNQUOTED = str.maketrans("'\"", "  ")


def _class_of(token: re.Match[str]) -> int | None:
    """How loosely an operator binds: 0 most; None for what is none."""
    if token["comma"]:
        return 0
    if token["symbol"]:
        return 3
    word = (token["word"] or "").lower()
    if word in _COMBINING:
        return 0
    return _CLASSES.get(word, 3 if word in _OTHERS else None)


class _Level:
    """What stands between two parentheses."""

    __slots__ = ("inner", "lists_tables", "longest", "run")

    def __init__(self) -> None:
        self.run = [0, 0, 0, 0]
        self.longest = [0, 0, 0, 0]
        self.inner = 0
        self.lists_tables = False

    def count(self, looseness: int, *, is_comma: bool = False) -> None:
        if not is_comma or self.lists_tables:
            self.run[looseness] += 1
            self.longest[looseness] = max(self.longest[looseness], self.run[looseness])
        # what binds closer begins anew
        for closer in range(0 if is_comma and not self.lists_tables else looseness + 1, 4):
            self.run[closer] = 0

    @property
    def depth(self) -> int:
        return sum(self.longest) + self.inner
