"""What a statement's text tells before it is parsed."""

from __future__ import annotations

import pytest

from dormouse.errors import InvalidQuery
from dormouse.query.statement_text import (
    CHAIN_MAX,
    STATEMENT_CHARACTERS_MAX,
    chain_length,
    check_statement,
)

MANY = 2_000
# each of them would overflow DataFusion's stack, and end the process
DEEP = {
    "sum": "select " + "+".join(["1"] * MANY),
    "or": "select * from t where " + " or ".join(f"a={n}" for n in range(MANY)),
    "and": "select * from t where " + " AND ".join(f"a<>{n}" for n in range(MANY)),
    "union": " union all ".join(["select 1"] * MANY),
    "cast": "select a" + "::bigint" * MANY,
    "subscript": "select a" + "[1]" * MANY,
    "from": "select * from " + ", ".join(["t"] * MANY),
    "with": "with " + ", ".join(f"x{n} as (select 1)" for n in range(MANY)) + " select 1",
    "in parentheses": "select (" + "+".join(["1"] * MANY) + ")",
    "many levels": "select " + ("(1" + "+1" * 300 + "+") * 40 + "1" + ")" * 40,
    "operands that call": "select " + "+".join(["f(1,2)"] * MANY),
    "loose after close": "select " + "+".join(["1"] * 300) + " = 1 or " + " or ".join(["a"] * 300),
    "not closed": "select (" + "+1" * MANY,
    "closed too often": "select 1))" + "+1" * MANY,
    "after a quote in a comment": "select 1 /* ' */" + "+1" * MANY + " -- '",
    "after a quote in a line comment": "select 1 -- '\n" + "+1" * MANY + " -- '",
    "between dollars": "select $$ ' $$ " + "+1" * MANY + " || $$ ' $$",
    "after an escaped quote": r"select E'\'' " + "+1" * MANY + r" || E'\''",
    "after a quote in a name": "select `'` " + "+1" * MANY + " + `'`",
    "after a quote in a quoted name": 'select "\'" ' + "+1" * MANY + ' + "\'"',
}
# of which only lists are long
FLAT = {
    "in": "select * from t where a in (" + ", ".join(f"-{n}" for n in range(MANY)) + ")",
    "hyphens in values": "select * from t where a in (" + ", ".join(f"'a-b-{n}'" for n in range(MANY)) + ")",
    "values": "values " + ", ".join(f"(-{n}, 'it''s')" for n in range(MANY)),
    "columns": "select " + ", ".join(f"a{n} + 1" for n in range(MANY)) + " from t",
    "ranges": "select * from t where " + " or ".join(f"(a > {n} and a < -{n})" for n in range(400)),
    "alternatives": "select * from t where " + " or ".join(f"t.a = -{n}" for n in range(400)),
}


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_statements_that_would_overflow_the_stack_are_refused(text: str) -> None:
    assert chain_length(text) > CHAIN_MAX
    with pytest.raises(InvalidQuery, match=r"chains more than 500 operators.* IN \(…\)"):
        check_statement(text)


@pytest.mark.parametrize("text", FLAT.values(), ids=FLAT)
def test_long_lists_are_no_chains(text: str) -> None:
    assert chain_length(text) < CHAIN_MAX
    assert check_statement(text) == text


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (3, "a statement must be a string, not 3"),
        (None, "a statement must be a string"),
        ("select '\x00'", "neither NUL"),
        ("select '\ud800'", "neither NUL nor lone surrogates"),
        (" " * (STATEMENT_CHARACTERS_MAX + 1), "characters, and may have 1,048,576"),
    ],
)
def test_what_is_no_statement_is_refused(statement: object, message: str) -> None:
    with pytest.raises(InvalidQuery, match=message) as error:
        check_statement(statement)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ("tablesample (1 percent)", "TABLESAMPLE"),
        ("TableSample bernoulli (1)", "TABLESAMPLE"),
        ("sample (1)", "SAMPLE"),
        ("prewhere a = 1", "PREWHERE"),
        ("start with a = 1 connect /* ' */ by a = 2", "CONNECT BY"),
        ("partition (p0)", "PARTITION"),
        ("group by a with\nrollup", "WITH ROLLUP"),
        ("group by a with cube", "WITH CUBE"),
        ("group by a with totals", "WITH TOTALS"),
    ],
)
def test_what_datafusion_would_leave_out_is_refused(rest: str, said: str) -> None:
    with pytest.raises(InvalidQuery, match=f"SQL: {said} is not supported"):
        check_statement(f"select * from t {rest}")


@pytest.mark.parametrize(
    "text",
    [
        "with totals as (select 1 as a) select * from totals",
        "with rollup (a) as (select 1) select * from rollup",
        "select a, count(*) from t group by rollup (a)",
        "select row_number() over (partition by (a) order by b) from t",
        "select 'tablesample (1)', \"prewhere\" from t -- with rollup",
        "select sample, tablesampled from t",
    ],
)
def test_names_that_look_like_what_is_left_out_are_taken(text: str) -> None:
    assert check_statement(text) == text


@pytest.mark.parametrize(
    "link",
    [
        "t{n} as (select s from t{m} union all select s from t{m})",
        '"t{n}" (s) /* as */ AS (select a.s from t{m} a, "t{m}" b)',
        "t{n} as -- (\n(select s from t{m} where s in (select 's' from t{m}))",
    ],
)
def test_ctes_that_name_each_other_twice_are_refused_in_long_chains(link: str) -> None:
    links = [link.format(n=n, m=n - 1) for n in range(1, 41)]
    with pytest.raises(InvalidQuery, match="CTEs name each other so often"):
        check_statement(f"with t0 as (select 1 s), {', '.join(links)} select * from t40")
    assert check_statement(f"with t0 as (select 1 s), {', '.join(links[:8])} select * from t8")


def test_long_chains_of_ctes_that_name_each_other_once_are_taken() -> None:
    links = [f"t{n} as (select t{n - 1}.a, t{n - 1}.b, t{n - 1} . c from t{n - 1})" for n in range(1, 100)]
    text = f"with t0 as (select 1 a, 2 b, 3 c), {', '.join(links)} select * from t99"
    assert check_statement(text) == text
