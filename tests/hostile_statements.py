"""Statements that need more time, memory, disk or stack than there is.

Each must be answered or refused in time, without harm to other statements.
"""

from __future__ import annotations

MANY = 20_000


def _chain(expression: str, links: int, first: str) -> str:
    """Returns a statement of CTEs, each of which computes a value from the previous one."""
    named = [f"t0 as (select {first} s)"]
    named += [f"t{n} as (select {expression} s from t{n - 1})" for n in range(1, links + 1)]
    return f"with {', '.join(named)} select length(s) from t{links}"


def _doubled(link: str, links: int = 40) -> str:
    named = ["t0 as (select 1 s)", *(link.format(n=n, m=n - 1) for n in range(1, links + 1))]
    return f"with {', '.join(named)} select count(*) from t{links}"


TIME = {
    "levenshtein": "select levenshtein(repeat('ab', 60000), repeat('ba', 60000))",
    "damerau": "select damerau_levenshtein(repeat('ab', 60000), repeat('ba', 60000))",
    "jaccard of rows": "select sum(jaccard(a.range::varchar, b.range::varchar)) from range(1000000) a, range(1000000) b",
    "cross product": "select sum(a.range * b.range) from range(100000000) a, range(1000000) b",
    "cross product that finds nothing": "select * from range(1000000) a, range(1000000) b where a.range + b.range < 0",
    "cross product of a table": f"select count(*) from {', '.join(f't t{n}' for n in range(12))} where t0.k > t1.k + t2.k",
    "recursion": "with recursive r(n) as (select 1 union all select n + 1 from r) select max(n) from r",
    "recursion of nothing new": "with recursive r(n) as (select 1 union all select n from r) select count(*) from r",
    "huge series": "select count(*) from generate_series(1, 9000000000000000000) where generate_series % 7 = 3",
    "huge series of times": "select max(g) from generate_series(timestamp '0001-01-01', timestamp '9999-12-31', interval 1 microsecond) g(g)",
    "backtracking": "select regexp_matches(repeat('a', 100000), '(a*)*(a*)*(a*)*(a|b)*c$')",
    "counted repetition": "select regexp_matches(repeat('a', 1000000), '((a{0,100}){0,100}){0,100}b')",
    "regular expressions of rows": "select count(*) from range(100000000) r where regexp_matches(repeat('ab', 5000), r.range::varchar || '.*[ab]{5}c')",
    "like with many wildcards": f"select repeat('a', 100000) like '{'%a' * 5000}%b'",
    "doubled CTEs": _doubled("t{n} as (select s from t{m} union all select s from t{m})"),
    "doubled CTEs, joined": _doubled("t{n} as (select a.s from t{m} a, t{m} b)"),
    "doubled CTEs, kept": _doubled("t{n} as materialized (select s from t{m} union all select s from t{m})"),
    "nested subqueries": "select " + "(select max(k) from t where k < " * 60 + "5" + ")" * 60,
    "correlated": "select sum((select sum(b.range) from range(10000) b where b.range < a.range)) from range(1000000) a",
    "hash of hashes": _chain("sha256(s)", 400, "'x'"),
    "list of hashes": "select list_reduce(range(1000000), lambda a, b: (md5((a + b)::varchar)[:8]).hash()::bigint % 1000)",
    "like of rows": "select count(*) from range(100000) a, range(100000) b where a.range::varchar like '%' || b.range::varchar || '%'",
}
MEMORY = {
    "repeat": "select length(repeat('x', 2000000000))",
    "repeated rows": "select length(repeat('x', 1000000) || range::varchar) as n from range(100000) order by n",
    "a row of gigabytes": "select repeat('x', 300000000), repeat('y', 300000000)",
    "rows of megabytes": "select repeat('x', 1000000) from range(100000)",
    "a large row": "select repeat('x', 100000000)",
    "pad": "select length(lpad('x', 2000000000, 'y'))",
    "bar": "select bar(1, 0, 1, 2000000000)",
    "list": "select length(list(i)) from range(1000000000) t(i)",
    "range as a list": "select length(range(10000000000))",
    "nested lists": "select length(list(l)) from (select list(i) l from range(100000000) t(i) group by i % 1000)",
    "list_resize": "select length(list_resize([1], 4000000000, 0))",
    "array": "select [1]::INTEGER[2147483647]",
    "flattened lists": "select length(flatten(list_transform(range(100000), x -> range(100000))))",
    "string_agg": "select length(string_agg(repeat('x', 10000), ',')) from range(10000000)",
    "string_agg with a huge separator": "select length(string_agg('x', repeat('y', 10000000))) from range(10000)",
    "array_to_string": "select length(array_to_string(range(1000000), repeat('y', 100000)))",
    "replace": f"select length(replace('{'x' * 50_000}', 'x', '{'y' * 50_000}'))",
    "doubled text": _chain("s || s", 40, "'x'"),
    "doubled text that is no constant": _chain("concat(s, s)", 40, "now()::varchar"),
    "doubled text in cases": _chain("case when s = 'a' then s || s else upper(s || s) end", 40, "'x'"),
    "doubled text, aggregated": _chain("max(s || s)", 40, "'x'"),
    "doubled text, windowed": _chain("first_value(s || s) over ()", 40, "'x'"),
    "text replaced in itself": _chain("replace(s, 'x', s)", 6, "'xxxxxxxxxx'"),
    "recursion that doubles text": "with recursive r(s) as (select 'x' union all select s || s from r) select max(length(s)) from r",
    "recursion that doubles rows": "with recursive r(n) as (select 1 union all select n + 1 from r, range(2)) select count(*) from r",
    "distinct": "select count(*) from (select distinct md5(range::varchar) from range(100000000))",
    "group by": "select count(*) from (select range % 50000000 g, string_agg(range::varchar) from range(100000000) group by g)",
    "sort": "select * from (select range, md5(range::varchar) m from range(100000000)) order by m",
    "window": "select max(n) from (select row_number() over (order by md5(range::varchar)) n from range(100000000))",
    "window of lists": "select max(length(l)) from (select list(range) over (order by range) l from range(200000))",
    "join": "select count(*) from range(50000000) a join range(50000000) b on md5(a.range::varchar) = md5(b.range::varchar)",
    "pivot": "select * from (pivot range(1000) on range in (1, 2, 3) using list(range)), range(100000000)",
    "median": "select median(hash(range)), mode(md5(range::varchar)) from range(100000000)",
    "histogram": "select cardinality(histogram(md5(range::varchar))) from range(50000000)",
    "map": "select cardinality(map_from_entries(list((range, md5(range::varchar))))) from range(20000000)",
    "json": "select length(json_group_array(md5(range::varchar))::varchar) from range(50000000)",
}
STACK = {
    "parentheses": "select " + "(" * 100_000 + "1" + ")" * 100_000,
    "brackets": "select " + "[" * 100_000 + "1" + "]" * 100_000,
    "sum": "select " + "+".join(["1"] * MANY),
    "negations": "select " + "- " * 100_000 + "1",
    "nots": "select " + "not " * 100_000 + "true",
    "or": "select * from t where " + " or ".join(f"k={n}" for n in range(MANY)),
    "and": "select * from t where " + " AND ".join(f"k<>{n}" for n in range(MANY)),
    "nested conditions": "select " + "case when 1 = 1 then " * 400 + "1" + " end" * 400,
    "nested choices": "select " + "if(k > 0, " * 3_000 + "1" + ", 0)" * 3_000 + " from t",
    "union": " union all ".join(["select 1"] * 5_000),
    "cast": "select 1" + "::bigint" * MANY,
    "subscript": "select [1]" + "[1]" * MANY,
    "tables": "select count(*) from " + ", ".join(f"t t{n}" for n in range(2_000)),
    "joins": "select count(*) from t t0"
    + "".join(f" join t t{n} on t{n}.k = t{n - 1}.k" for n in range(1, 300)),
    "CTEs": "with " + ", ".join(f"x{n} as (select 1)" for n in range(MANY)) + " select 1",
    "subqueries": "select * from " + "(select * from " * 3_000 + "t" + ")" * 3_000,
    "calls": "select " + "abs(" * 20_000 + "1" + ")" * 20_000,
    "long IN": f"select count(*) from t where k in ({', '.join(map(str, range(130_000)))})",
    "long IN of text": f"select count(*) from t where k::varchar in ({', '.join(repr(str(n)) for n in range(80_000))})",
    "long VALUES": "select count(*) from (values " + ", ".join(f"({n})" for n in range(100_000)) + ")",
    "columns": "select " + ", ".join(f"k + {n} as c{n}" for n in range(30_000)) + " from t",
    "nested JSON": f"select json_extract('{'[' * 100_000}{']' * 100_000}', '$[0]')",
    "nested type": "select null::" + "struct(a " * 5_000 + "int" + ")" * 5_000,
    "lambdas": "select " + "list_transform([1], x -> " * 200 + "[1]" + ")" * 200,
    "windows": "select " + ", ".join(f"sum(k) over (order by k + {n})" for n in range(2_000)) + " from t",
    "interval": "select sum(k) over (order by k rows between 9223372036854775807 preceding and 9223372036854775807 following) from t",
    "huge numbers": f"select {'9' * 100_000}, 1e{'9' * 1000}, '{'9' * 100_000}'::hugeint",
}
HOSTILE = TIME | MEMORY | STACK
