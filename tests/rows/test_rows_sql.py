"""Queries of row tables: allowed SQL is parsed and written anew, and all other SQL is refused."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.errors import InvalidPage, InvalidQuery
from dormouse.rows import pages, statements
from dormouse.rows.emit import DUCKDB, POSTGRES
from dormouse.rows.expressions import Statement
from dormouse.rows.statements import PageToken, statement_of
from tests.row_queries import COLUMNS, HOSTILE, grouped, is_ours, plain, with_parameters


def bound(text: str) -> Statement:
    return statement_of(text, "t", COLUMNS)


def written(statement: Statement) -> list[tuple[str, dict[str, Any]]]:
    """Returns all statements that a query becomes: for its first and its later pages, and for counts."""
    found = [pages.count_statement(statement, "source", POSTGRES)]
    if not statement.is_plain:
        return [*found, pages.grouped(statement, "source", POSTGRES, 11, statement.offset)]
    samples: dict[str, Any] = {"STRING": "'; drop table t", "DOUBLE": float("nan"), "BOOLEAN": True}
    place = [samples.get(order.expression.kind, 7) for order in pages.total_order(statement)]
    has_nulls = len(pages.parts(statement, None)) == 2
    nulls = [None if has_nulls else place[0], *[None] * (len(place) - 2), place[-1]]
    for one in (None, place, nulls if len(place) > 1 else None):
        for part in pages.parts(statement, one):
            found.append(pages.plain(statement, part, "source", POSTGRES, 11, statement.offset, 1_000))
    return found


@pytest.mark.parametrize("text", HOSTILE)
def test_sql_that_is_not_allowed_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(InvalidQuery) as refused:
        bound(text)
    assert str(refused.value) and "\n" not in str(refused.value)


@given(st.one_of(plain(), grouped()))
def test_statements_have_only_fixed_words_and_parameters(text: str) -> None:
    for sent, values in written(bound(text)):
        assert is_ours(sent), sent
        assert sent.count("%(") == sum(sent.count(f"%({name})s") for name in values)


@given(st.one_of(plain(), grouped()))
def test_a_parameter_is_bound_like_its_value_as_a_literal(text: str) -> None:
    asked, values = with_parameters(text)
    found = statement_of(asked, "t", COLUMNS, statements.given(values))
    assert found == bound(text)
    # the tree of the text is cached, and other values are bound in it
    others = {name: "other" if isinstance(value, str) else value for name, value in values.items()}
    assert "other" not in others.values() or found != statement_of(
        asked, "t", COLUMNS, statements.given(others)
    )
    assert statement_of(asked, "t", COLUMNS, statements.given(values)) == found
    others = {name: "other" if isinstance(value, str) else 3 - value for name, value in values.items()}
    assert outcome(statement_of, asked, others) == outcome(statements._bound, asked, others)


def outcome(binding: Callable[..., Statement], text: str, values: Any) -> Statement | str:
    """Returns a statement, or the text of the error if it is refused."""
    try:
        return binding(text, "t", tuple(COLUMNS), statements.given(values))
    except InvalidQuery as refused:
        return str(refused)


@pytest.mark.parametrize(
    ("text", "each", "is_remembered"),
    [
        ("select * from t where n >= $1 and name <> $2", [(1, "a"), (-7, "it's"), (2**62, "")], True),
        ("select n from t where b = $1 or (n + $2) * 2 in (3, $2)", [(True, 5), (False, 6)], True),
        ("select sum(n), name from t where n = $1 group by name", [(1,), (2,)], True),
        ("select n + $1 as m from t where n > $2 order by m", [(1, 2), (3, 4)], False),
        ("select n + $1 from t where n > 0 group by n + 5", [(5,), (6,), (5,)], False),
        ("select distinct n + $1 from t where n > 0 order by n + 5", [(5,), (6,)], False),
        ("select n from t where n > 0 group by n, n + $1 order by n + 5", [(5,), (6,)], False),
        ("select n from t where n > $1 limit $2", [(1, 2), (1, -2), (1, 0)], False),
        ("select n from t where x > $1", [(1,), (10**30,), (1,), (0.5,)], None),
        ("select n from t where n > $1", [(1.0,), (1.5,), (1,), (1e300,), ("7",), ("a",), (None,)], None),
        ("select n from t where d = $1", [(5,), ("2024-01-31",), ("never",), (None,)], None),
        ("select n from t where name like $1 escape $2", [("a!%", "!"), ("a!b", "!"), ("a", "")], False),
        ("select n from t where name like $1", [("a%",), ("a\\_%",), ("",)], True),
        ("select n from t where $1", [(True,), (False,), (None,), (1,)], None),
    ],
)
def test_a_text_is_bound_once_if_its_meaning_does_not_depend_on_values(
    text: str, each: list[tuple[Any, ...]], is_remembered: bool | None
) -> None:
    for values in each * 2:
        assert outcome(statement_of, text, list(values)) == outcome(statements._bound, text, list(values))
    kinds = tuple((name, one.kind) for name, one in statements.given(list(each[0])))
    found = statements._template(text, "t", tuple(COLUMNS), kinds)
    assert is_remembered is None or (found is not None) == is_remembered


@pytest.mark.parametrize(
    ("text", "values", "said"),
    [
        ("select n from t where n = $1", [1, 2], "the query has no parameter $2"),
        ("select n from t where n = $1", None, "the query's parameter $1 has no value"),
        ("select n from t where n = $One", {"one": 1}, None),
        ("select n from t where n = $one", {"two": 1}, "the query's parameter $one has no value"),
        ('select n from t where n = "$one"', {"one": 1}, "there is no column '$one'"),
        ("select n from t where n = $1", [float("nan")], "parameter $1 is nan"),
        ("select n from t where n = $1", [b"x"], "parameter $1 is b'x'"),
        ("select n from t where n = $1", [[1, 2]], "parameter $1 is"),
        ("select n from t where n = $1", ["\ud800"], "parameter $1 must have no NUL"),
        ("select n from t where n = $1", ["1 or true"], "'1 or true' is no INTEGER"),
        ("select n from t where n = $1", "1", "parameters must be a list"),
        ("select n from t where $1", [1], "a condition is true or false"),
        ("select n from t limit $1", ["3"], "LIMIT takes a whole number of rows"),
        ("select n from t limit $1", [-1], "LIMIT takes a whole number of rows"),
        ("select n from t limit $1 offset $2", [3, 2**70], "OFFSET takes a whole number of rows"),
        ("select n from t where n = ?", [1], "a placeholder"),
        ("select n from $1", ["t"], "the query reads '$1'"),
        ("select n from t where d = $1", ["no day"], "is no DATE"),
    ],
)
def test_parameters_that_do_not_fit_give_an_error_of_one_line(
    text: str, values: Any, said: str | None
) -> None:
    def bind() -> Statement:
        return statement_of(text, "t", COLUMNS, statements.given(values))

    if said is None:
        assert bind() == bound("select n from t where n = 1")
        return
    with pytest.raises(InvalidQuery) as refused:
        bind()
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_dates_times_and_none_are_values() -> None:
    day = date(1970, 1, 2)
    for given_as in (day, datetime(1970, 1, 2, tzinfo=UTC), 86_400_000, "1970-01-02"):
        found = statement_of("select n from t where d = $1", "t", COLUMNS, statements.given([given_as]))
        assert found == bound("select n from t where d = 86400000"), given_as
    empty = statement_of("select n from t where n = $1", "t", COLUMNS, statements.given([None]))
    assert empty == bound("select n from t where n = null")


_FRAGMENTS = [
    "select", "from", "t", "where", "n", "name", "*", ",", "(", ")", "'", "''", '"', "--", "/*", "*/",
    ";", "$$",
    "\\", "::", "regclass", "union", "and", "or", "not", "=", "1", "count(*)", "group by", "order by",
    "limit",
    "pg_sleep(1)", "U&'", "e'", "\n", "`", "[", "]", "{", "}", "%(p0)s", "%s", "$1", "?", "in", "like", "j",
    "current_user", "for update", "into", "as", "x", "null", "is", "between", "\u2019", "\uff07",
    "\xa0", "c_5",
    "row_id", '"Odd_name"', "'; drop table t --'",
]  # fmt: skip


_several = st.lists(st.sampled_from(_FRAGMENTS), max_size=8)


@given(
    st.one_of(
        st.text(),
        st.lists(st.sampled_from(_FRAGMENTS), max_size=14).map(" ".join),
        st.lists(st.sampled_from(_FRAGMENTS), max_size=14).map("".join),
        st.tuples(plain(), st.sampled_from(_FRAGMENTS), st.integers(0, 200)).map(
            lambda x: x[0][: x[2]] + x[1] + x[0][x[2] :]
        ),
        _several.map(lambda some: f"select {' '.join(some)} from t"),
        _several.map(lambda some: f"select * from t where {' '.join(some)}"),
        st.text(max_size=30).map(lambda x: f'select "{x}" from t where name = \'{x}\' order by "{x}"'),
    )
)
def test_any_text_is_refused_or_written_again(text: str) -> None:
    try:
        statement = bound(text)
    except InvalidQuery as error:
        assert "\n" not in str(error)
        return
    for sent, _ in written(statement):
        assert is_ours(sent), (text, sent)


@pytest.mark.slow
def test_nesting_and_length_of_statements_are_limited() -> None:
    for text in (
        "select * from t where " + "(" * 60 + "b" + ")" * 60,
        "select * from t where " + "not " * 5_000 + "b",
        "select " + "- " * 5_000 + "n from t",
        "select " + "n + " * 10_000 + "n from t",
        "select * from t where name = '" + "x" * 300_000 + "'",
        "select * from t where n in (" + ", ".join(map(str, range(30_000))) + ")",
        "select * from t where name = 'a\0b'",
        "select * from t where name = '\ud800'",
        "",
        None,
        7,
    ):
        with pytest.raises(InvalidQuery):
            bound(text)  # type: ignore[arg-type]
    assert bound("select * from t where " + " and ".join(["n = 1"] * 3_000))
    assert bound("select * from t where n in (" + ", ".join(map(str, range(10_000))) + ")")


def test_columns_may_be_named_by_alias_or_number() -> None:
    found = bound('SELECT N, "Odd_name", Row_Id AS id, t.x FROM T ORDER BY id DESC, 2')
    assert [(item.name, item.type, item.column_id) for item in found.selected] == [
        ("n", "INTEGER", 5), ("Odd_name", "INTEGER", 10), ("id", "INTEGER", None), ("x", "DOUBLE", 6)
    ]  # fmt: skip
    assert [order.descending for order in found.orders] == [True, False]
    assert bound("select u.n from t as u where u.n = 1;").where is not None
    for text in (
        'select "N" from t',
        'select n from "T"',
        "select n from t order by 2",
        "select t.n from t u",
    ):
        with pytest.raises(InvalidQuery):
            bound(text)


def test_values_travel_as_parameters_of_their_columns_types() -> None:
    found = bound("select n from t where d > '1970-01-02' and x = 'NaN' and b = 'true' and n < 1e3 and x < 1")
    (text, values), *_ = written(found)
    assert [repr(value) for value in values.values()] == ["86400000", "nan", "True", "1000", "1.0"]
    assert "c_5 < cast(%(p3)s as bigint)" in text


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        (f"select {' + '.join(['n'] * 152)} from t", True),
        (f"select {' + '.join(['n'] * 300)} from t", False),
        (f"select n from t order by {', '.join(f'n + {i}' for i in range(80))}", True),
        (f"select n from t order by {', '.join(f'n + {i}' for i in range(150))}", False),
        (
            f"select n from t order by {', '.join(f'n + {i}' for i in range(80))}, {' + '.join(['x'] * 80)}",
            False,
        ),
    ],
)
def test_every_accepted_statement_can_be_written_within_pythons_stack(text: str, is_taken: bool) -> None:
    """This includes the statements of later pages, and calls from a deep stack."""
    if not is_taken:
        with pytest.raises(InvalidQuery, match="nested too deeply"):
            bound(text)
        return

    def called(depth: int) -> None:
        called(depth - 1) if depth else written(bound(text))

    called(200)


def test_a_parameter_with_too_many_digits_is_refused() -> None:
    with pytest.raises(InvalidQuery, match=r"parameter \$1 is a number of too many digits"):
        statements.given([10**5_000])


def test_long_texts_are_not_cached() -> None:
    """Cached lists of ids, long and different each time, would fill the memory."""
    listed = ", ".join(map(str, range(5_000)))
    before = statements._cached.cache_info().currsize
    for text, values in (
        (f"select n from t where n in ({listed})", None),
        ("select n from t where name = $1", ["x" * 20_000]),
    ):
        statement_of(text, "t", COLUMNS, statements.given(values))
        assert statements._cached.cache_info().currsize == before
    assert bound("select n + 17 from t") is bound("select n + 17 from t")


def test_the_sql_written_for_duckdb_is_similar() -> None:
    found = bound("select n / 2 from t where name like 'a!%b\\' escape '!' and n % 2 = 1")
    text, values = pages.plain(found, pages.parts(found, None)[0], "source", DUCKDB, 5, 0, 1_000)
    assert values["p2" if "p2" in values else "p1"] is not None
    assert "like cast($p" in text and "escape '\\'" in text and " % " in text
    assert "a\\%b\\\\" in values.values()


KEY, TABLE = b"k" * 32, uuid4()
TOKEN = PageToken(
    "select n from t where n < $1 and x > $x", 3, 10, 5, [1, None, "ä", float("nan"), True], None, None,
    statements.given({"n": 3, "x": 0.1, "s": "ä", "b": True, "no": None}), uuid4(),
)  # fmt: skip


def test_a_page_token_is_read_back_unchanged() -> None:
    found = statements.read_page_token(TOKEN.written(KEY, TABLE), KEY, TABLE)
    assert repr(found) == repr(TOKEN)
    # the form of earlier releases
    for older, length in (
        (replace(TOKEN, values=(), incarnation_id=None), 7),
        (replace(TOKEN, incarnation_id=None), 8),
    ):
        body = zlib.compress(json.dumps(json.loads(zlib.decompress(_body(older)))[:length]).encode())
        token = base64.urlsafe_b64encode(statements._mac(KEY, TABLE, body) + body).rstrip(b"=").decode()
        assert repr(statements.read_page_token(token, KEY, TABLE)) == repr(older)
    # earlier releases can read tokens of an index
    of_index = replace(TOKEN, database="1", build_id=17)
    assert len(json.loads(zlib.decompress(_body(of_index)))) == 8
    read = statements.read_page_token(of_index.written(KEY, TABLE), KEY, TABLE)
    assert repr(read) == repr(replace(of_index, incarnation_id=None))


def _body(token: PageToken) -> bytes:
    text = token.written(KEY, TABLE)
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))[statements.MAC_BYTES :]


@given(st.data())
def test_a_changed_page_token_is_refused(data: st.DataObject) -> None:
    token = TOKEN.written(KEY, TABLE)
    place = data.draw(st.integers(0, len(token) - 1))
    other = data.draw(st.sampled_from("ABCxyz0189-_=+/ é\n").filter(lambda one: one != token[place]))
    for changed in (token[:place] + other + token[place + 1 :], token[:place], token + other, other):
        with pytest.raises(InvalidPage):
            statements.read_page_token(changed, KEY, TABLE)


def test_a_page_token_is_valid_for_one_table_of_one_instance() -> None:
    token = TOKEN.written(KEY, TABLE)
    for key, table, one in (
        (KEY, uuid4(), token),
        (b"x" * 32, TABLE, token),
        (KEY, TABLE, ""),
        (KEY, TABLE, None),
    ):
        with pytest.raises(InvalidPage):
            statements.read_page_token(one, key, table)


@pytest.mark.parametrize(
    "text", ["insert into t values (1)", "update t set n = 1", "DELETE FROM t", "truncate table t"]
)
def test_a_query_that_changes_rows_is_refused_with_the_right_call(text: str) -> None:
    with pytest.raises(
        InvalidQuery, match=r"does not begin with SELECT.*dm\.Insert.*'dormouse rows change'$"
    ):
        bound(text)


@pytest.mark.parametrize(
    ("item", "name"),
    [
        ("isnan(x)", "isnan"),
        ("bool_and(b)", "bool_and"),
        ("UPPER(name)", "upper"),
        ("now()", "now"),
        ("iff(b, 1, 2)", "iff"),
    ],
)
def test_the_error_names_a_refused_function_as_the_text_does(item: str, name: str) -> None:
    with pytest.raises(InvalidQuery, match=rf"^the query has the function '{name}', which is not allowed"):
        statement_of(f"select {item} from t", "t", COLUMNS)
