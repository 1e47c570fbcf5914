"""Parameters, refusals, limits and EXPLAIN of statements, by DuckDB's plans."""

from __future__ import annotations

import math
import multiprocessing
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from decimal import Decimal
from typing import Any

import duckdb
import pytest

from dormouse.errors import DormouseError, InvalidQuery
from dormouse.reading.sql import wanted as wanted_module
from dormouse.reading.sql.firsts import Ends, Enough
from dormouse.reading.sql.parsed import parsed
from dormouse.reading.sql.wanted import TOGETHER, Wanted, placed
from tests.support.model import STRING, Field, Range, Schema
from tests.support.reading import Interruption
from tests.wanted_ranges import SCHEMAS, of, shown, wanted


@pytest.mark.parametrize(
    ("statement", "parameters", "expected"),
    [
        ("from t where k = ?", [5], "t k=5"),
        ("from t where k = $1 and s = $2", [5, "a"], "t k=5 s='a'"),
        ("from t where s = $2 and k = $1", [5, "a"], "t k=5 s='a'"),
        ("from t where k = ?2 and s = ?1", ["a", 5], "t k=5 s='a'"),
        ("from t where k = $a and s like $B || '%'", {"A": 5, "b": "x"}, "t k=5 s['x','y')"),
        ('from t where k = $"a b"', {"a b": 5}, "t k=5"),
        ("from t where k = $é and s = 'é'", {"é": 5}, "t k=5 s='é'"),
        ("from t where k in (?, ?)", [5, 9], "t k=5+=9"),
        ("from t where k = any(?)", [[1, 5]], "t k=1+=5"),
        ("from t where k in ?", [[1, 5]], "t k=1+=5"),
        ("from t where k in?and s = ?", [[1], "a"], "t k=1 s='a'"),
        ("from t where s in $1", ["ab"], "t"),  # the texts that contain s
        ("from t where k > ? + 1", [5], "t k(6,)"),
        ("from t where k = ?", ["5"], "t k=5"),
        ("from t where k = ?", ["abc"], "t"),
        ("from t where k = ?", [None], ""),
        ("from t where k < ?", [5.5], "t k(,5]"),
        ("from t where b = ?", [b"\x00'\\x41\xff"], 't b=b"\\x00\'\\\\x41\\xff"'),
        ("from t where s = '?' and \"k\" = ?/*?*/ -- ?", [4], "t k=4 s='?'"),
        ("from t where s = $$ ? $$ and k = ?", [4], "t k=4 s=' ? '"),
        ("select [? + i for i in [?] if ? = 9] from t where k = ?", [9, 1, 2, 4], "t k=4"),
        ("select $1 from t where k = $1::int", [4], "t k=4"),
        ("summarize (from t where k = ?)", [3], "t k=3"),
        ("explain analyze from t where k = ?", [3], "t k=3"),
    ],
)
def test_parameters_bound_the_ranges(statement: str, parameters: Any, expected: str) -> None:
    assert of(statement, parameters) == expected


def test_parameters_are_numbered_as_duckdb_numbers_them() -> None:
    """DuckDB numbers the `?` in the condition of a list comprehension first, although it is written last."""
    statement = "from t where k = [? for i in [?] if ? = 7][1]"
    assert of(statement, [1, 7, 5]) == "t k=5"


def test_a_statement_cannot_read_the_parameters_of_another() -> None:
    of("from t where k = ?", [5])
    with pytest.raises(InvalidQuery, match=r"not getvariable\(…\): it tells of the process's settings"):
        of("select * from t where k = 4 and getvariable('x') is null")


def test_parameters_are_set_in_groups() -> None:
    """Parameters are passed in variables of DuckDB, several in each.

    One variable for each would need many statements; one for all would be copied whole at each use.
    """
    numbers = range(1, 1_001)
    with duckdb.connect() as parser:
        found = parsed(parser, f"from t where k in ({', '.join(f'${n}' for n in numbers)})")
    made = placed(found, list(numbers), lambda _: None)
    assert len(made.variables) == -(-len(numbers) // TOGETHER)
    assert [value for parts in made.variables.values() for value in parts.values()] == list(numbers)
    assert max(map(len, made.variables.values())) == TOGETHER


@pytest.mark.parametrize(
    ("condition", "value", "expected"),
    [
        ("k::double < {}", math.nan, "t"),
        ("k::double = {}", 5.0, "t k=5"),
        ("k = {}", 5, "t k=5"),
        ("k = {}", 1 << 40, f"t k={1 << 40}"),
        ("k = {}", Decimal("5.0"), "t k=5"),
        ("k = {}", None, ""),
        ("list_contains({}, k)", [1, 5], "t k=1+=5"),
        ("s = {}", "5", "t s='5'"),
    ],
)
def test_a_parameter_among_many_has_the_value_that_it_has_alone(
    condition: str, value: object, expected: str
) -> None:
    """DuckDB turns NaN in a dict into NULL, so parameters of one group must not be passed as a dict."""
    assert of(f"from t where {condition.format('$1')}", [value]) == expected
    others = " and ".join(f"v <> ${n}" for n in range(2, 40))
    assert of(f"from t where {condition.format('$1')} and {others}", [value, *range(2, 40)]) == expected


def test_variables_of_a_statement_are_removed_before_the_next() -> None:
    """Covers also a statement that fails because one of its parameters has an unusable type."""
    parameters = [5] * 40
    with pytest.raises(InvalidQuery, match="a parameter cannot be used"):
        of(f"from t where k in ({', '.join('?' * 41)})", [*parameters, object()])
    of(f"from t where k in ({', '.join('?' * 40)})", parameters)
    with wanted_module.idle_planner() as planner:
        assert planner._connection.execute("select count(*) from duckdb_variables()").fetchone() == (0,)


@pytest.mark.parametrize(
    ("statement", "parameters", "message"),
    [
        ("from t where k = ?", [], "the statement has 1 parameter, but 0 values were given"),
        ("from t where k = ? and s = ?", [1], "the statement has 2 parameters, but 1 values were given"),
        ("from t", [1], "the statement has 0 parameters, but 1 values were given"),
        ("from t where k = $2", [1, 5], "the statement has no parameter $1"),
        ("from t where k = $a", {}, "parameter $a has no value"),
        ("from t where k = $a", {"a": 1, "b": 2}, "the statement has no parameter $b"),
        ("from t where k = $a", [1], "parameter $a has no value"),
        ("from t where k = ?", [1 << 130], "a parameter cannot be used: .*too large.*"),
        ("from t where k = ?", [object()], "a parameter cannot be used: .*Unable to transform.*"),
        ("from t where nope = ?", [1], 'Referenced column "nope" not found .*'),
        ("from t where nope = 1", [], r'.*"nope" not found .*!; Candidate bindings: "\w+"'),
        ("select x.k from t", [], 'Referenced table "x" not found!; Candidate tables: "t"'),
        ("from tt", [], 'Table with name tt does not exist!; Did you mean "t"[?]'),
        ("select summ(v) from t", [], "unknown function 'summ'; did you mean 'sum'[?]"),
        ("selec", [], r'syntax error at or near "selec" \(line 1, column 1\)'),
        ("explain selec", [], r'syntax error at or near "selec" \(line 1, column 9\)'),
        ("select 1,\n  2 frm\tx y", [], r'syntax error at or near "x" \(line 2, column 8\)'),
        ("select 1,\r\n  2 frm\tx y", [], r'syntax error at or near "x" \(line 2, column 8\)'),
        ("\r\rselec", [], r'syntax error at or near "selec" \(line 3, column 1\)'),
        (f"select {'1, ' * 50} 1 frm x y", [], r'syntax error at or near "x" \(line 1, column 165\)'),
        ("select 'é' frm x y", [], r'syntax error at or near "x" \(line 1\)'),
        ("select (", [], "syntax error at end of input"),
        ("select '\ud800'", [], ".* half a surrogate pair"),
        ("", [], "the statement is empty; SQL can only read: .*"),
        ("-- nothing", [], "the statement is empty; SQL can only read: .*"),
        ("from t; from u", [], "only one statement can be run at a time, not 2; send each by itself"),
    ],
)
def test_errors_of_duckdb_have_one_clear_line(statement: str, parameters: Any, message: str) -> None:
    with pytest.raises(InvalidQuery, match=f"^{message.replace('$', '[$]')}$") as raised:
        wanted(SCHEMAS, statement, parameters)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("statement", "rows"),
    [
        ("from t limit 5", 5),
        ("select k * 2, upper(s) from t where v > 3 limit 5 offset 3", 5),
        ("from (from t limit 5) where v > 3", None),
        ("select k + 1 from (from t limit 5)", 5),
        ("from t offset 3", None),
        ("from range(9) limit 5", None),
        ("from t limit 10%", None),
        ("from t limit (select 3)", None),
        ("select distinct k from t limit 5", None),
        ("select count(*) from t limit 5", None),
        ("select k from t union all select k from u limit 5", None),
        ("select row_number() over () from t limit 5", None),
        ("from t using sample 10% limit 5", None),
        ("from t join u using (k) limit 5", None),
        ("with a as materialized (from t) from a limit 5", None),
        ("explain analyze from t limit 5", 5),
    ],
)
def test_rows_of_any_files_are_enough_for_a_limit_without_an_order(statement: str, rows: int | None) -> None:
    found = wanted(SCHEMAS, statement).enough
    assert (found and (found.rows, found.in_key_order)) == (rows and (rows, False))


@pytest.mark.parametrize(
    ("statement", "rows"),
    [
        ("from t order by k limit 5", 5),
        ("from t order by k nulls first limit 5 offset 7", 5),
        ("select v, s as a, k + 1 from t where v > 1 order by k, a limit 5", 5),
        ("select v * 2 as w from t order by k, s, b, v desc, w limit 5", 5),
        ("select v from (from t order by k) limit 5", 5),
        ("select upper(s) from (from t order by k, s limit 5)", 5),
        ("explain analyze from t order by k limit 5", 5),
        ("from t order by k, s desc limit 5", None),
        ("from t order by s limit 5", None),
        ("from t order by k, v limit 5", None),
        ("from t order by k + 1 limit 5", None),
        ("from t order by k::integer limit 5", None),
        ("from t order by k, s collate nocase limit 5", None),
        ("select v as k from t order by 1 limit 5", None),
        ("from (from t order by v limit 9) order by k limit 5", None),
        ("from (from t limit 9) order by k limit 5", None),
        ("from (from t order by k limit 5) order by v", None),
        ("select count(*) from t group by k order by k limit 5", None),
        ("select k, row_number() over (order by v) from t order by k limit 5", None),
        ("select t.k from t join u using (k) order by t.k limit 5", None),
        ("select k from t union all select k from u order by k limit 5", None),
        ("select distinct k from t order by k limit 5", None),
        ("from t where k in (select k from t) order by k limit 5", None),
    ],
)
def test_the_first_rows_in_key_order_are_enough_for_a_limit_in_that_order(
    statement: str, rows: int | None
) -> None:
    found = wanted(SCHEMAS, statement).enough
    assert (found and (found.rows, found.in_key_order, found.descending)) == (rows and (rows, True, False))


@pytest.mark.parametrize(
    ("statement", "enough"),
    [
        ("from t limit 5", Enough(5, in_key_order=False, rows_read=5)),
        ("from t limit 5 offset 3", Enough(5, in_key_order=False, rows_read=8)),
        ("from (from t limit 2) limit 5", Enough(5, in_key_order=False)),
        ("from t order by k limit 5 offset 3", Enough(5, in_key_order=True, rows_read=8)),
        ("from t order by k desc limit 5", Enough(5, True, descending=True, rows_read=5)),
        ("from t order by k desc nulls last, s desc limit 5", Enough(5, True, descending=True, rows_read=5)),
        ("from t order by k desc, s desc, b desc, v limit 5", Enough(5, True, descending=True, rows_read=5)),
        ("from t order by k desc, s limit 5", None),
        ("from t order by k, s desc limit 5", None),
        ("from t where k > 3 order by k limit 5", Enough(5, True, rows_read=5)),
        ("from t where k > 3 and s = 'a' limit 5", Enough(5, False, rows_read=5)),
        ("from t where k > 3.5 order by k limit 5", Enough(5, True)),
        ("from t where k <> 3 order by k limit 5", Enough(5, True)),
        ("from t where k * 2 > 3 order by k limit 5", Enough(5, True)),
        ("from t where v > 3 order by k desc limit 5", Enough(5, True, descending=True)),
        ("from t where k in (3, 5) order by k desc limit 5", Enough(5, True, descending=True)),
        ("select min(k) from t", Enough(1, True, is_value=True)),
        ("select max(k) m, max(k) from t where v > 1", Enough(1, True, descending=True, is_value=True)),
        ("select min(k) filter (where v > 1) from t", Enough(1, True, is_value=True)),
        ("select min(distinct k) from t", Enough(1, True, is_value=True)),
        ("select * from (select max(k) from t) limit 2", Enough(1, True, descending=True, is_value=True)),
        ("select min(k), max(k) from t", None),
        ("select min(k), count(*) from t", None),
        ("select coalesce(min(k), 0) from t", None),
        ("select min(k + 1) from t", None),
        ("select min(s) from t", None),
        ("select min(k) from t group by s", None),
        ("select min(k) from t having min(k) > 3", None),
        ("select min(k) from t group by all", Enough(1, True, is_value=True)),
        ("select min(k) over () from t", None),
        ("select min(k, 3) from t", None),
        ("select min(t.k) from t join u using (k)", None),
    ],
)
def test_the_first_or_last_rows_are_enough(statement: str, enough: Enough | None) -> None:
    assert wanted(SCHEMAS, statement).enough == enough


@pytest.mark.parametrize(
    ("statement", "ends"),
    [
        ("select count(*) from t", Ends(False, False, (0,))),
        ("select count() from t", Ends(False, False, (0,))),
        ("select count(1) from t", Ends(False, False, (0,))),
        ("select count(null) from t", None),
        ("select max(k) - min(k), count(k) n from t", Ends(True, True, (1,))),
        ("select n, m from (select max(k) m, count(*) n from t)", Ends(False, True, (0,))),
        ("select coalesce(min(k), 0) from t where k < 9", Ends(True, False, ())),
        ("select count(*) from t where k >= 3 and s < 'x'", Ends(False, False, (0,))),
        ("select count(*) + 1 from t", None),
        ("select count(*), count(*) > 3 from t", None),
        ("select count(v) from t", None),
        ("select count(distinct k) from t", None),
        ("select count(*) filter (where v > 1) from t", None),
        ("select count(*) from t where v > 1", None),
        ("select count(*) from t where k <> 1", None),
        ("select count(*) from t where k % 2 = 1", None),
        ("select count(*) from t having count(*) > 1", None),
        ("select count(*) from t group by k", None),
        ("select count(*) from t group by rollup (k)", None),
        ("select count(*) from t using sample 10%", None),
        ("select count(*) from (from t limit 3)", None),
        ("select count(*) from (select distinct k from t)", None),
        ("select count(*) from t, u", None),
        ("select min(s) from t", None),
        ("select max(v) from t", None),
        ("select sum(k) from t", None),
        ("select max(k), any_value(v) from t", None),
        ("select string_agg(k) from t", None),
        ("summarize t", None),
    ],
)
def test_facts_about_files_are_the_answer(statement: str, ends: Ends | None) -> None:
    assert wanted(SCHEMAS, statement).ends == ends


@pytest.mark.parametrize(
    ("statement", "explains", "runs"),
    [
        ("from t where k = 5", False, True),
        ("explain from t where k = 5", True, False),
        ("/* */ EXPLAIN -- x\n (from t where k = 5)", True, False),
        ("explain analyze from t where k = 5", True, True),
        ("explain (format json) from t where k = 5", True, False),
        ("explain (analyse) from t where k = 5", True, True),
        ("explain (analyze, format json) (from t where k = 5)", True, True),
        ("select * from t where s <> 'explain' and k = 5", False, True),
    ],
)
def test_explain_is_separated_from_the_statement_that_it_explains(
    statement: str, explains: bool, runs: bool
) -> None:
    found = wanted(SCHEMAS, statement)
    assert (shown(found.ranges), found.explains, found.runs) == ("t k=5", explains, runs)


def test_each_call_uses_the_given_tables() -> None:
    changed = {"t": Schema([Field("v", STRING)]), "w": SCHEMAS["u"]}
    assert of("from t where v = 3") == "t"
    assert shown(wanted(changed, "from t, w where t.v = 'a' and w.k = 4").ranges) == "t v='a' | w k=4"
    with pytest.raises(InvalidQuery, match="Table with name u does not exist"):
        wanted(changed, "from u")
    assert of("from u where k = 3") == "u k=3"
    with pytest.raises(InvalidQuery, match="upper and lower case only"):
        wanted({"t": SCHEMAS["t"], "T": SCHEMAS["u"]}, "from t")


@pytest.mark.slow
def test_constants_that_fill_the_memory_or_the_plan_bound_nothing() -> None:
    assert of("select repeat('a', 30_000_000) from t where k = 5") == "t"
    assert of("select repeat('a', 70_000_000) from t where k = 5") == "t"


def test_thousands_of_values_become_ranges() -> None:
    found = wanted(SCHEMAS, f"from t where k in ({', '.join(str(7 * n) for n in range(5_000))})")
    assert found.ranges["t"]["k"] == tuple(Range.exactly(7 * n) for n in range(5_000))


def test_conditions_too_deep_for_python_bound_nothing() -> None:
    deep = "k = 1"
    for n in range(200):
        deep = f"({deep} or k = {n} and v = {n}) and (v = {n} or s = 'a')"
    assert of(f"from t where {deep}") == "t"


class Watching(Interruption):
    """An interruption that records the functions with which it would end the planning."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[Callable[[], object]] = []

    def ending(self, end: Callable[[], object]) -> AbstractContextManager[None]:
        self.ends.append(end)
        return super().ending(end)


def test_an_interruption_gets_the_function_that_ends_the_planning() -> None:
    watching = Watching()
    wanted(SCHEMAS, "from t", interruption=watching)
    [end] = watching.ends
    end()
    assert of("from t where k = 5") == "t k=5"
    watching.set()
    with pytest.raises(DormouseError, match="interrupted"):
        wanted(SCHEMAS, "from t", interruption=watching)


@pytest.mark.slow
def test_threads_plan_concurrently() -> None:
    found: list[Wanted] = []

    def plan(key: int) -> None:
        found.extend(wanted(SCHEMAS, "from t where k = ?", [key]) for _ in range(20))

    threads = [threading.Thread(target=plan, args=[key]) for key in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(shown(one.ranges) for one in found) == [f"t k={key}" for key in range(6) for _ in range(20)]


def test_a_forked_child_plans_by_itself() -> None:
    of("from t")
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(of, ["from t where k = 5"]).get(30) == "t k=5"
