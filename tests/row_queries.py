"""Queries of a row table as text: those of the language, made up by hypothesis, and those of a forger."""

from __future__ import annotations

import re

from hypothesis import strategies as st

from dormouse.rows.columns import Column

COLUMNS = (
    Column("name", "STRING", column_id=4),
    Column("n", "INTEGER", column_id=5),
    Column("x", "DOUBLE", column_id=6),
    Column("d", "DATE", column_id=7),
    Column("b", "BOOLEAN", column_id=8),
    Column("j", "JSON", column_id=9),
    Column("Odd_name", "INTEGER", column_id=10),
)

_TEXTS = ["a", "ab", "abc", "%", "_", "b\\c", "it''s", "", "Ä", "z9", "-- x", "/* x */", "; drop table t"]
_text = st.sampled_from(_TEXTS).map(lambda one: f"'{one}'")
_integer = st.integers(-5, 12).map(str)
_double = st.sampled_from(["0.5", "2.25", "-1.0", "1e2", ".125", "3."])
_comparison = st.sampled_from(["=", "<>", "!=", "<", "<=", ">", ">="])
_kinds = {"name": _text, "n": _integer, "x": _double, "d": st.sampled_from(["0", "86400000", "5"])}


def _condition_of(column: str) -> st.SearchStrategy[str]:
    value = _kinds[column]
    found = [
        st.builds(lambda o, v: f"{column} {o} {v}", _comparison, value),
        st.builds(lambda no, a, b: f"{column} {no}between {a} and {b}", _maybe("not "), value, value),
        st.builds(
            lambda no, vs: f"{column} {no}in ({', '.join(vs)})",
            _maybe("not "),
            st.lists(value, min_size=1, max_size=4),
        ),
        st.builds(lambda no: f"{column} is {no}null", _maybe("not ")),
    ]
    if column == "name":
        found.append(st.builds(lambda no, v: f"name {no}like {v}", _maybe("not "), _text))
    return st.one_of(found)


def _maybe(word: str) -> st.SearchStrategy[str]:
    return st.sampled_from(["", word])


_simple = st.one_of(
    *map(_condition_of, _kinds),
    st.builds(
        lambda c, no, v: f"{c} is {no}distinct from {v}",
        st.sampled_from(["n", "x"]),
        _maybe("not "),
        st.sampled_from(["null", "1", "n", "x", "2"]),
    ),
    st.sampled_from(["length(name) > 1", "trim(name) = 'a'", "coalesce(b, false)", "nullif(n, 1) > 0"]),
    st.just("b"),
    st.just("b = false"),
    st.just("b is null"),
)
conditions = st.recursive(
    _simple,
    lambda inner: st.one_of(
        st.builds(lambda a, o, b: f"({a}) {o} ({b})", inner, st.sampled_from(["and", "or"]), inner),
        inner.map(lambda one: f"not ({one})"),
    ),
    max_leaves=6,
)
_number = st.recursive(
    st.sampled_from(["n", "d", "x", "1", "2.5e0"]).filter(lambda one: one != "d"),
    lambda inner: st.builds(lambda a, o, b: f"({a} {o} {b})", inner, st.sampled_from(["+", "-", "*"]), inner),
    max_leaves=3,
)
_expression = st.one_of(
    st.sampled_from(["name", "n", "x", "d", "b"]),
    _number,
    _number.map(lambda one: f"{one} / 4"),
    st.just("n % 3"),
    st.sampled_from(
        [
            "case when b then name else 'none' end",
            "case n when 1 then x when 2 then 0.5 end",
            "coalesce(n, 0)",
            "coalesce(x, n, -1)",
            "nullif(name, 'a')",
            "nullif(x, n)",
            "name || '-' || n::text",
            "cast(b as varchar)",
            "n::double",
            "length(name || 'Äé')",
            "trim('  ' || name || ' ')",
            "abs(n - 3)",
            "abs(x)",
        ]
    ),
)
_aggregate = st.one_of(
    st.sampled_from(
        ["count(*)", "count(j)", "min(name)", "max(d)", "min(b)", "max(b)", "count(distinct name)"]
    ),
    st.builds(
        lambda f, d, e: f"{f}({d}{e})",
        st.sampled_from(["sum", "avg", "min", "max", "count"]),
        _maybe("distinct "),
        st.sampled_from(["n", "n + 1", "d"]),
    ).filter(lambda one: not re.match(r"(sum|avg)\((distinct )?d", one)),
)
_where = st.one_of(st.just(""), conditions.map(lambda one: f" where {one}"))
_limit = st.one_of(
    st.just(""),
    st.builds(lambda n, o: f" limit {n}{o}", st.integers(0, 30), st.sampled_from(["", " offset 3"])),
)
_direction = st.sampled_from(["", " desc", " asc nulls first", " desc nulls last", " desc nulls first"])


@st.composite
def plain(draw: st.DrawFn) -> str:
    """A query of rows, in an order that is whole."""
    items = draw(st.one_of(st.just("*"), st.lists(_expression, min_size=1, max_size=3).map(", ".join)))
    orders = draw(st.lists(st.sampled_from(["name", "n", "x", "d", "b", "n + 1"]), max_size=2, unique=True))
    listed = ", ".join([*(one + draw(_direction) for one in orders), "row_id"])
    return f"select {items} from t{draw(_where)} order by {listed}{draw(_limit)}"


@st.composite
def grouped(draw: st.DrawFn) -> str:
    """A query of groups, in an order that is whole; or of distinct rows."""
    if draw(st.booleans()):
        items = draw(
            st.lists(st.sampled_from(["name", "n", "b", "n % 3"]), min_size=1, max_size=2, unique=True)
        )
        numbers = ", ".join(str(n) for n in range(1, len(items) + 1))
        return f"select distinct {', '.join(items)} from t{draw(_where)} order by {numbers}{draw(_limit)}"
    keys = draw(st.lists(st.sampled_from(["name", "n", "b", "n % 3"]), max_size=2, unique=True))
    items = [*keys, *draw(st.lists(_aggregate, min_size=1, max_size=3))]
    group = f" group by {', '.join(keys)}" if keys else ""
    order = f" order by {', '.join(str(n) for n in range(1, len(keys) + 1))}" if keys else ""
    having = draw(_maybe(f" having {draw(_aggregate)} is not null and count(*) > {draw(st.integers(0, 2))}"))
    return f"select {', '.join(items)} from t{draw(_where)}{group}{having}{order}{draw(_limit)}"


_LITERAL = re.compile(r"'(?:[^']|'')*'|(?<![\w.])-?(?:\d+\.?\d*|\.\d+)(?:e\d+)?(?![\w.])")


def with_parameters(text: str) -> tuple[str, dict[str, object]]:
    """A query whose condition and LIMIT have parameters in place of literals, and the values of these."""
    values: dict[str, object] = {}

    def named(found: re.Match[str]) -> str:
        literal, name = found[0], f"P{len(values)}"
        if literal.startswith("'"):
            values[name] = literal[1:-1].replace("''", "'")
        else:
            values[name] = int(literal) if literal.lstrip("-").isdigit() else float(literal)
        return f"${name}"

    def part(found: re.Match[str]) -> str:
        return found[1] + _LITERAL.sub(named, found[2])

    text = re.sub(r"( where )(.*?)(?= group by | order by |$)", part, text, flags=re.DOTALL)
    return re.sub(r"( limit )(.*)$", part, text), values


HOSTILE = """
select * from t; drop table t
select * from t;;select 1
select * from t -- where n = 1
select * from t /* ; drop table t */
select /*+ SeqScan(t) */ * from t
select * from t union select * from t
select * from t union all select 1
select * from t except select * from t
select * from t intersect select * from t
with a as (select 1) select * from t
with recursive a as (select 1) select * from t
select * from t where n in (select 1)
select * from t where exists (select 1)
select (select 1) from t
select * from (select * from t) s
select * from (t)
select * from t, t u
select * from t join t u on true
select * from t natural join t u
select * from t cross join pg_class
select * from t, lateral (select 1) s
select * from pg_class
select * from pg_catalog.pg_class
select * from public.t
select * from dormouse.t
select * from x.y.t
select * from information_schema.tables
select * from generate_series(1, 10)
select * from unnest(array[1])
select * from read_csv('/etc/passwd')
select * from '/etc/passwd'
select * from only t
select * from t tablesample system (1)
select * from t for update
select * from t for share
select * from t for update skip locked
select * into u from t
create table u as select * from t
insert into t values (1)
update t set n = 1
delete from t
truncate t
drop table t
alter table t add column q int
copy t to '/tmp/x'
copy (select 1) to program 'sh'
explain select * from t
explain analyze select * from t
set role postgres
show all
begin
commit
call f()
do $$ begin end $$
vacuum
grant all on t to public
prepare p as select 1
execute p
values (1)
table t
from t
(select * from t)
select pg_sleep(10) from t
select pg_read_file('/etc/passwd') from t
select pg_catalog.pg_sleep(1) from t
select lo_import('/etc/passwd') from t
select current_setting('data_directory') from t
select set_config('a', 'b', false) from t
select current_user from t
select session_user from t
select user from t
select current_date from t
select current_timestamp from t
select now() from t
select version() from t
select random() from t
select txid_current() from t
select upper(name) from t
select trim(name, 'x') from t
select trim(leading from name) from t
select n || 'x' from t
select abs(name) from t
select x::int from t
select name::int from t
select cast(n as varchar(2)) from t
select case when n then 1 end from t
select case when b then j end from t
select n from t having count(*) > 1
select name from t where case when count(*) > 1 then b end
select greatest(n, 1) from t
select "count"(*) from t where lower(name) = 'x'
select count(*) filter (where n > 1) from t
select string_agg(name, ',') from t
select stddev(n) from t
select percentile_cont(0.5) within group (order by n) from t
select row_number() over () from t
select sum(n) over (partition by b) from t
select n::regclass from t
select try_cast(name as int) from t
select timestamp '2024-01-01' from t
select interval '1 day' from t
select * from t where name ~ 'x'
select * from t where name similar to 'x'
select * from t where name ilike 'x'
select * from t where name like any (array['x'])
select * from t where n = any (array[1])
select * from t where n = all (select 1)
select * from t where (n, d) = (1, 2)
select * from t where row(n) = row(1)
select * from t where n is true
select * from t where b is true
select * from t where n = $1
select * from t where n = ?
select * from t where n = :n
select * from t where n = @n
select * from t where n = %(n)s
select * from t where n = %s
select * from t where name = $$x$$
select * from t where name = $a$x$a$
select * from t where name = e'\\x'
select * from t where name = E'\\047'
select * from t where name = U&'\\0061'
select * from t where name = N'x'
select * from t where name = B'01'
select * from t where name = X'ff'
select U&"\\006E" from t
select `n` from t
select [n] from t
select n[1] from t
select array[n] from t
select {n} from t
select {{ n }} from t
select {% n %} from t
select j -> 'a' from t
select j ->> 'a' from t
select j #> '{a}' from t
select * from t where j @> '{}'
select * from t where j = '{}'
select * exclude (n) from t
select * replace (1 as n) from t
select columns('.*') from t
select n from t group by rollup (n)
select n from t group by cube (n)
select n from t group by grouping sets ((n))
select n from t group by all
select n from t group by 0000000012
select n from t order by 0000000012
select * from t qualify true
select * from t window w as ()
select distinct on (n) n from t
select * from t limit all
select * from t limit (select 1)
select * from t limit n
select * from t limit -1
select * from t limit 1.5
select * from t limit '1'
select * from t offset n
select * from t limit 10 percent
select * from t fetch first 5 rows only
select * from t fetch first 5 rows with ties
select * from t order by n using <
select * from t order by name collate "C"
select name collate "C" from t
select n at time zone 'UTC' from t
select t from t
select t.* from t u
select u.n from t
select pg_class.n from t
select oid from t
select ctid from t
select xmin from t
select tableoid from t
select c_5 from t
select until_version from t
select * from current_1
select * from t as t(a, b)
select * from t pivot (count(*) for n in (1))
select * from t match_recognize (pattern (a) define a as true)
select 1_000 from t
select 0x1f from t
select 0b11 from t
select 1e999 from t
select * from t where n = 'abc'
select * from t where name = 1
select * from t where n
select sum(name) from t
select sum(sum(n)) from t
select * from t where count(*) > 1
select n, count(*) from t
select * from t group by n
select count(n, d) from t
select count() from t
select n from t where name = 'a' 'b'
select n from t where name = 'open
select n from t where "n = 1
select n from t where n = 1)
select n from t where (n = 1
select
select from t
select *
select , from t
selec * from t
""".strip().splitlines()
"""Each is refused."""

WORDS = frozenset({
    "select", "distinct", "from", "where", "group", "by", "order", "limit", "offset", "and", "or",
    "not", "is",
    "null", "in", "like", "cast", "as", "bigint", "float8", "text", "boolean", "collate", "nullif", "count",
    "sum", "avg", "min", "max", "bool_and", "bool_or", "desc", "nulls", "first", "last", "row_id",
    "row_version", "source", "counted", "coalesce", "octet_length", "size", "over", "rows", "unbounded",
    "preceding", "total", "sized", "summed", "case", "when", "then", "else", "end", "having",
    "abs", "length", "btrim",
})  # fmt: skip

_TOKEN = re.compile(
    r'%\(p\d+\)s|"C"|%%|\|\||<>|<=|>=|[=<>+\-*/(),]|\bc_(4|5|6|7|8|9|10)\b|\bi\d+\b|\b\d+\b|[a-z_][a-z_0-9]*|\s+'
)


def is_ours(text: str) -> bool:
    """Whether a statement consists of words, names and numbers of ours alone, and of parameters."""
    place = 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None or (found[0][0].isalpha() and not _is_known(found[0])):
            return False
        place = found.end()
    return True


def _is_known(word: str) -> bool:
    return word in WORDS or re.fullmatch(r"[ci]_?\d+", word) is not None
