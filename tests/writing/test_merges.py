"""Merges and partial upserts, compared with DuckDB's MERGE INTO on the same rows."""

from __future__ import annotations

from math import nan
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dormouse as dm
from dormouse.errors import AmbiguousRows, DormouseError, InvalidData
from dormouse.writing import merging
from tests.edited import COLUMNS, SCHEMA, Judged, row, table_of
from tests.support.api import Instance
from tests.support.model import WhenMatched as Matched
from tests.support.model import WhenNotMatched as NotMatched
from tests.support.model import WhenNotMatchedBySource as NotMatchedBySource
from tests.support.model import sql
from tests.support.state import LAYOUTS
from tests.support.writing import Edit, Merge, PartialUpsert
from tests.tiers import by_tier, sampled

TARGET = [row(k) for k in range(0, 100, 3)] + [row(k, "b") for k in range(0, 100, 7)]
SOURCE = [row(k, i=k * 2, s="new") for k in range(0, 100, 5)]
SOURCE += [row(k, "b", f=None) for k in range(50, 150, 9)]
ALL = f"({COLUMNS}) VALUES ({', '.join(f's.{name}' for name in SCHEMA.names)})"
SET = ", ".join(f"{name} = s.{name}" for name in SCHEMA.names)
INSERT, UPDATE = f"WHEN NOT MATCHED THEN INSERT {ALL}", f"WHEN MATCHED THEN UPDATE SET {SET}"
UPDATE_I = "WHEN MATCHED THEN UPDATE SET i = s.i"
KEYS = ["k", "c"]
ON = "t.k = s.k AND t.c = s.c"
NEAR = f"{ON} AND t.k BETWEEN 10 AND 60"
CASES: list[tuple[Any, list[Any], str, str]] = [
    (KEYS, [Matched(update="*"), NotMatched(insert="*")], ON, f"{UPDATE} {INSERT}"),
    (KEYS, [Matched(update=["i", "s"])], ON, "WHEN MATCHED THEN UPDATE SET i = s.i, s = s.s"),
    (KEYS, [Matched(delete=True)], ON, "WHEN MATCHED THEN DELETE"),
    (
        KEYS,
        [NotMatched(insert=["k", "c", "d"])],
        ON,
        "WHEN NOT MATCHED THEN INSERT (k, c, d) VALUES (s.k, s.c, s.d)",
    ),
    (
        KEYS,
        [
            Matched("s.i > t.i", update={"i": sql("t.i + s.i"), "s": "more"}),
            Matched("t.f", delete=True),
            Matched("t.k < 60"),
            Matched(update={"d": nan, "l": sql("list_append(t.l, s.i)")}),
            NotMatched("i % 2 = 0", insert={"k": sql("k"), "c": sql("c"), "i": sql("i + 1"), "m": 5}),
            NotMatched("k > 140"),
            NotMatched(insert="*"),
        ],
        ON,
        f"""WHEN MATCHED AND s.i > t.i THEN UPDATE SET i = t.i + s.i, s = 'more'
        WHEN MATCHED AND t.f THEN DELETE WHEN MATCHED AND t.k < 60 THEN DO NOTHING
        WHEN MATCHED THEN UPDATE SET d = 'nan', l = list_append(t.l, s.i)
        WHEN NOT MATCHED AND s.i % 2 = 0 THEN INSERT (k, c, i, m) VALUES (s.k, s.c, s.i + 1, 5)
        WHEN NOT MATCHED AND s.k > 140 THEN DO NOTHING WHEN NOT MATCHED THEN INSERT {ALL}""",
    ),
    (
        KEYS,
        [
            NotMatchedBySource("t.k % 2 = 0", update={"i": sql("coalesce(i, 0) + 1"), "s": None}),
            NotMatchedBySource("f is null"),
            NotMatchedBySource(delete=True),
            Matched(update="*"),
            NotMatched(insert="*"),
        ],
        ON,
        f"""WHEN NOT MATCHED BY SOURCE AND t.k % 2 = 0 THEN UPDATE SET i = coalesce(i, 0) + 1, s = NULL
        WHEN NOT MATCHED BY SOURCE AND t.f IS NULL THEN DO NOTHING WHEN NOT MATCHED BY SOURCE THEN DELETE
        {UPDATE} {INSERT}""",
    ),
    (
        KEYS,
        [NotMatchedBySource("k > 50", delete=True)],
        ON,
        "WHEN NOT MATCHED BY SOURCE AND t.k > 50 THEN DELETE",
    ),
    (sql(NEAR), [Matched(update={"s": "near"})], NEAR, "WHEN MATCHED THEN UPDATE SET s = 'near'"),
    (sql(f"t.d = s.d and {ON}"), [Matched(update=["i"])], f"t.d = s.d AND {ON}", UPDATE_I),
]  # fmt: skip
MOVING: list[tuple[Any, list[Any], str, str]] = [
    (
        KEYS,
        [Matched(update={"k": sql("s.k + 200"), "c": "z"})],
        ON,
        "WHEN MATCHED THEN UPDATE SET k = s.k + 200, c = 'z'",
    ),
    (["ts"], [Matched(update=["i"]), NotMatched(insert="*")], "t.ts = s.ts", f"{UPDATE_I} {INSERT}"),
    (["s"], [Matched(delete=True)], "t.s = s.s", "WHEN MATCHED THEN DELETE"),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("keep", ["every_row", "newest_row"])
def test_merges_are_those_of_duckdb(instance: Instance, layout: str, keep: str) -> None:
    source = table_of(SOURCE)
    for n, (on, when, joins, clauses) in enumerate(
        sampled(CASES + (MOVING if keep == "every_row" else []), 3)
    ):
        judged = Judged(instance, TARGET, layout, keep, name=f"t{n}")
        merge = Merge(judged.sessions, unique_of(on, source), on, when)
        used = unique_of(on, source)
        counts = judged.edit(merge, f"MERGE INTO t USING s ON ({joins}) {clauses}", s=used)
        assert sum(counts.values()), clauses
        judged.table.compact()
        judged.check(clauses)
        merge.close()


def unique_of(on: Any, source: pa.Table) -> pa.Table:
    """Returns rows of the source of which no two match one row."""
    if on == ["ts"]:
        return table_of([one for one in source.to_pylist() if one["c"] == "a"])
    return table_of([row(1, s="row 7"), row(500, s=None)]) if on == ["s"] else source


@pytest.mark.few(1)
@pytest.mark.parametrize("keep", ["every_row", "newest_row"])
def test_sources_of_all_kinds_are_merged(instance: Instance, keep: str, tmp_path: Path) -> None:
    rows = table_of(SOURCE)
    pq.write_table(rows, tmp_path / "rows.parquet")
    sources = instance.create_table("sources", SCHEMA)
    sources.ingest(rows)
    from tests.support.reading import arrow_schema

    for n, (source, tables) in enumerate(
        [
            (rows.to_pylist(), None),
            (rows.to_batches(max_chunksize=7), None),
            (rows.to_reader(7), None),
            (str(tmp_path / "rows.parquet"), None),
            (sql(f"select {COLUMNS} from sources"), instance._tables.named()),
            (pa.Table.from_batches([], arrow_schema(SCHEMA)), None),
            ([], None),
        ]
    ):
        judged = Judged(instance, TARGET, keep=keep, name=f"t{n}")
        gone = NotMatchedBySource("k = 0", delete=True)
        when = [Matched(update=["i", "l", "st"]), NotMatched(insert="*"), gone]
        merge = Merge(judged.sessions, source, KEYS, when, tables=tables)
        given = rows if n < 5 else rows.slice(0, 0)
        judged.edit(
            merge,
            f"""MERGE INTO t USING s ON ({ON}) WHEN MATCHED THEN UPDATE SET i = s.i, l = s.l, st = s.st
            WHEN NOT MATCHED THEN INSERT {ALL} WHEN NOT MATCHED BY SOURCE AND t.k = 0 THEN DELETE""",
            s=given,
        )


def test_a_merge_of_many_rows_streams(instance: Instance) -> None:
    count = by_tier(2_000, 10_000)
    judged = Judged(instance, [row(k) for k in range(2 * count)])
    source = table_of([row(k, i=1) for k in range(count, 3 * count)])
    merge = Merge(judged.sessions, source, KEYS, [Matched(update=["i"]), NotMatched(insert="*")])
    counts = judged.edit(
        merge,
        f"MERGE INTO t USING s ON ({ON}) {UPDATE_I} {INSERT}",
        s=source,
    )
    assert counts == {"inserted": count, "updated": count, "deleted": 0}


@pytest.mark.few(1)
@pytest.mark.parametrize("keep", ["every_row", "newest_row"])
def test_other_values_keep_their_bits(instance: Instance, keep: str) -> None:
    judged = Judged(instance, [row(k, d=(-0.0, 0.0, nan)[k % 3]) for k in range(30)], keep=keep)
    source = table_of([*(row(k, i=None) for k in range(20)), *(row(k, i=1) for k in range(40))])
    on = f"{ON} AND (t.d = 0 OR t.d = 'nan')"
    when = [Matched("s.i = 1", update=["i"]), NotMatched("i = 1", insert="*")]
    merge = Merge(judged.sessions, source, sql(on), when)
    clauses = (
        f"WHEN MATCHED AND s.i = 1 THEN UPDATE SET i = s.i WHEN NOT MATCHED AND s.i = 1 THEN INSERT {ALL}"
    )
    judged.edit(merge, f"MERGE INTO t USING s ON ({on}) {clauses}", s=source)


def test_a_table_that_merges_rows_is_merged_by_its_keys(instance: Instance) -> None:
    schema = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("n", dm.LONG)])
    table = instance.create_table("sums", schema, properties=dm.TableProperties(aggregate="sum(n)"))
    for _ in range(3):
        table.ingest([{"k": k, "n": k} for k in range(6)])
    source = [{"k": k, "n": 100} for k in range(4, 8)]
    when = [
        Matched("t.n > 12", update={"n": sql("t.n + s.n")}),
        Matched(delete=True),
        NotMatched(insert="*"),
        NotMatchedBySource("n = 0", update={"n": -1}),
    ]
    with Edit(table.context.supplier, None) as edit:
        edit.add(table.context, Merge(instance._tables.sessions(), source, ["k"], when))
        edit.commit()
    assert edit.counts == {"inserted": 2, "updated": 2, "deleted": 1}
    expected = {0: -1, 1: 3, 2: 6, 3: 9, 5: 115, 6: 100, 7: 100}
    for _ in range(2):
        assert {one["k"]: one["n"] for one in table.query().read_all().to_pylist()} == expected
        table.compact()


@pytest.mark.parametrize("keep", ["every_row", "newest_row"])
def test_rows_with_keys_far_apart_are_looked_up(instance: Instance, keep: str) -> None:
    judged = Judged(instance, [row(k * 5_000) for k in range(200)], keep=keep)
    source = table_of([row(k * 5_000, i=k) for k in range(0, 400, 7)])
    merge = Merge(judged.sessions, source, KEYS, [Matched("t.f", delete=True), Matched(update=["i"])])
    judged.edit(
        merge, f"MERGE INTO t USING s ON ({ON}) WHEN MATCHED AND t.f THEN DELETE {UPDATE_I}", s=source
    )
    merge = Merge(judged.sessions, source, KEYS, [Matched(update="*"), NotMatched(insert="*")])
    counts = judged.edit(merge, f"MERGE INTO t USING s ON ({ON}) {UPDATE} {INSERT}", s=source)
    assert counts["inserted"] and counts["updated"]


@pytest.mark.few(1)
@pytest.mark.parametrize("keep", ["every_row", "newest_row"])
def test_a_row_that_two_rows_would_change_is_refused(instance: Instance, keep: str) -> None:
    judged = Judged(instance, TARGET, keep=keep)
    context = judged.table.context
    twice = table_of([row(3), row(6, i=1), row(6, i=2), row(7_000)])

    def merged(when: list[Any], on: Any = KEYS) -> dict[str, int]:
        return dict(Merge(judged.sessions, twice, on, when).dry_run(context))

    with pytest.raises(AmbiguousRows, match=r"row with 'k' 6|row with k 6, c 'a'"):
        merged([Matched(update=["i"])])
    with pytest.raises(AmbiguousRows):
        merged([Matched("s.i > 0", delete=True)])
    assert merged([Matched("s.i = 2", update=["i"])])["updated"] == 1
    assert merged([Matched("s.k = 6"), Matched(update=["i"])])["updated"] == 1
    assert merged([NotMatched(insert="*")])["inserted"] == 1
    if keep == "every_row":
        with pytest.raises(AmbiguousRows):
            merged([Matched(update=["i"])], sql("t.k < s.k"))


def test_inserted_keys_of_a_keyed_table_are_new_and_differ(instance: Instance) -> None:
    judged = Judged(instance, TARGET, keep="newest_row")
    context = judged.table.context

    def merged(rows: list[dict[str, Any]], on: Any = KEYS) -> dict[str, int]:
        return dict(Merge(judged.sessions, table_of(rows), on, [NotMatched(insert="*")]).dry_run(context))

    assert merged([row(1), row(2)])["inserted"] == 2
    with pytest.raises(AmbiguousRows, match="insert the row with k 1, c 'a'"):
        merged([row(1), row(1, i=5)])
    with pytest.raises(DormouseError, match="row with k 3, c 'a', which is there already"):
        merged([row(1), row(3, i=1_000)], ["k", "c", "i"])
    assert merged([row(1), row(2)], ["k", "c", "i"])["inserted"] == 2


def test_partial_upserts_keep_what_the_data_lacks(instance: Instance) -> None:
    judged = Judged(instance, TARGET, keep="newest_row")
    data = table_of(SOURCE).select(["k", "c", "i"])
    counts = judged.edit(
        PartialUpsert(judged.sessions, data),
        f"MERGE INTO t USING s ON ({ON}) WHEN MATCHED THEN UPDATE SET i = s.i "
        "WHEN NOT MATCHED THEN INSERT (k, c, i) VALUES (s.k, s.c, s.i)",
        s=data,
    )
    assert counts["updated"] and counts["inserted"]
    gone = data.append_column("gone", pa.array([k % 2 == 0 for k in data["k"].to_pylist()]))
    counts = judged.edit(
        PartialUpsert(judged.sessions, gone, deletes="gone"),
        f"MERGE INTO t USING s ON ({ON}) WHEN MATCHED AND gone THEN DELETE {UPDATE_I} "
        "WHEN NOT MATCHED AND NOT gone THEN INSERT (k, c, i) VALUES (s.k, s.c, s.i)",
        s=gone,
    )
    assert counts["deleted"]


def test_partial_upserts_ignore_older_data(instance: Instance) -> None:
    schema = dm.Schema(
        [dm.Field("k", dm.LONG)],
        values=[
            dm.Field("v", dm.LONG),
            dm.Field("s", dm.STRING, nullable=True),
            dm.Field("n", dm.INT, nullable=True),
        ],
    )
    properties = dm.TableProperties(keep="newest_row", newest_by="v")
    table = instance.create_table("dated", schema, properties=properties)
    table.upsert([{"k": k, "v": 10, "s": "old", "n": k} for k in range(4)])
    sessions = instance._tables.sessions()

    def upserted(data: list[dict[str, Any]], deletes: str | None = None) -> dict[str, int]:
        with Edit(table.context.supplier, None) as edit:
            edit.add(table.context, PartialUpsert(sessions, data, deletes=deletes))
            edit.commit()
        return edit.counts

    def seen() -> list[tuple[Any, ...]]:
        return [tuple(one.values()) for one in table.query().read_all().to_pylist()]

    data = [{"k": k, "v": v, "s": "new"} for k, v in ((0, 9), (1, 10), (2, 11), (7, 1))]
    assert upserted(data) == {"inserted": 1, "updated": 2, "deleted": 0}
    assert seen() == [
        (0, 10, "old", 0),
        (1, 10, "new", 1),
        (2, 11, "new", 2),
        (3, 10, "old", 3),
        (7, 1, "new", None),
    ]
    assert upserted([{"k": 3, "n": 33}]) == {"inserted": 0, "updated": 1, "deleted": 0}
    marks = [{"k": 0, "v": 9, "gone": True}, {"k": 1, "v": 12, "gone": True}, {"k": 9, "v": 5, "gone": True}]
    assert upserted(marks, "gone") == {"inserted": 0, "updated": 0, "deleted": 1}
    assert [one[0] for one in seen()] == [0, 2, 3, 7]
    # the mark of key 9 is newer than this row
    table.upsert([{"k": 9, "v": 4}])
    assert [one[0] for one in seen()] == [0, 2, 3, 7]


WRONG: list[tuple[Any, Any, str]] = [
    ([], [Matched(delete=True)], "on is empty"),
    (["nope"], [Matched(delete=True)], "unknown column 'nope'"),
    (["x"], [Matched(delete=True)], "unknown column 'x'"),
    (["l"], [Matched(update=["nope"])], "unknown column 'nope'"),
    (sql("k = k"), [Matched(delete=True)], "column 'k' is in both"),
    (sql("t.k = s.k and random() > 1"), [Matched(delete=True)], "another value each time"),
    (KEYS, [], "give clauses"),
    (KEYS, "delete", "give clauses"),
    (KEYS, ["delete"], "is no clause"),
    (KEYS, [Matched()], "no clause updates"),
    (KEYS, [Matched(update="*", delete=True)], "not both"),
    (KEYS, [Matched(update={"i": sql("i")})], "column 'i' is in both"),
    (KEYS, [Matched("t.i >", delete=True)], "is no expression"),
    (KEYS, [NotMatched("t.i > 1", insert="*")], "'t.i' is no column"),
    (KEYS, [NotMatchedBySource("s.i > 1", delete=True)], "'s.i' is no column"),
    (KEYS, [NotMatched(insert={"i": 1})], "'k' must not be null"),
    (KEYS, [Matched(update={"i": sql("3000000000")})], "out of range"),
    (KEYS, [Matched(update="i")], "neither"),
    (KEYS, [NotMatchedBySource(update="*")], "dict by column"),
]


def test_bad_merges_are_one_clear_line(instance: Instance) -> None:
    judged = Judged(instance, TARGET)
    context = judged.table.context
    for on, when, complaint in WRONG:
        with pytest.raises(DormouseError, match=complaint) as raised, Edit(context.supplier, None) as edit:
            edit.add(context, Merge(judged.sessions, table_of(SOURCE), on, when))
        assert "\n" not in str(raised.value)
    judged.check()


def test_keyed_tables_refuse_new_keys_in_merges(instance: Instance) -> None:
    judged = Judged(instance, TARGET, keep="newest_row")
    merge = Merge(judged.sessions, table_of(SOURCE), KEYS, [Matched(update={"k": 1})])
    with pytest.raises(DormouseError, match="row key"):
        merge.dry_run(judged.table.context)
    with pytest.raises(DormouseError, match=r"upsert into table 't': .* missing from the data"):
        PartialUpsert(judged.sessions, [{"k": 1, "i": 2}]).dry_run(judged.table.context)
    with pytest.raises(DormouseError, match="not in the schema"):
        PartialUpsert(judged.sessions, [{"k": 1, "c": "a", "z": 2}]).dry_run(judged.table.context)
    unfit = Merge(judged.sessions, [{"k": "x", "c": "a", "i": 2}], KEYS, [Matched(update=["i"])])
    with pytest.raises(InvalidData, match="merge into table 't': column 'k'"):
        unfit.dry_run(judged.table.context)


def test_a_new_row_whose_age_is_nan_is_refused_by_its_key(instance: Instance) -> None:
    schema = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("v", dm.DOUBLE)])
    properties = dm.TableProperties(keep="newest_row", newest_by="v")
    table = instance.create_table("aged", schema, properties=properties)
    table.ingest([{"k": k, "v": 1.0} for k in range(3)])
    complaint = "table 'aged': 'v' determines which row is the newest, and is NaN in the row with k 2"
    with pytest.raises(InvalidData, match=complaint):
        table.update({"k": 2}, {"v": nan})
    with pytest.raises(InvalidData, match=complaint):
        table.merge_into([{"k": 2, "v": nan}], ["k"], [dm.WhenMatched(update="*")])


@pytest.mark.parametrize("keep", ["every_row", "newest_row"])
def test_only_rows_that_concern_a_merge_make_it_run_again(instance: Instance, keep: str) -> None:
    judged = Judged(instance, TARGET, keep=keep)
    when = [Matched(update=["i"]), NotMatched(insert="*")]

    def attempts(when: list[Any], meanwhile: dict[str, Any]) -> int:
        merge = Merge(judged.sessions, table_of([row(3, i=1), row(50, "q", i=1)]), KEYS, when)
        compute, left = merge.compute, [meanwhile]

        def once(*given: Any) -> Any:
            found = compute(*given)
            if left:
                judged.table.ingest(table_of([left.pop(0)]))
            return found

        merge.compute = once  # type: ignore[method-assign]
        with Edit(judged.table.context.supplier, None) as edit:
            edit.add(judged.table.context, merge)
            edit.commit()
        return edit.attempts

    assert attempts(when, row(20, "b")) == 1
    assert attempts(when, row(3, "x")) == 1
    assert attempts(when, row(50, "q")) == 2
    assert attempts([*when, NotMatchedBySource("i > 100", delete=True)], row(77, i=5)) == 1
    assert attempts([*when, NotMatchedBySource("i > 100", delete=True)], row(78, i=500)) == 2
    assert not judged.table.query({"k": 78, "i": 500}).read_all().num_rows


@pytest.mark.parametrize("keep", ["every_row", "newest_row"])
def test_only_columns_that_clauses_need_are_looked_up(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    read: list[set[str]] = []

    def spied(context: Any, question: Any, *args: Any) -> Any:
        read.append({*question.columns} - {"k", "c", "__sequence"})
        return rows_of(context, question, *args)

    rows_of = merging.rows_of
    monkeypatch.setattr(merging, "rows_of", spied)
    judged = Judged(instance, [row(k * 5_000) for k in range(200)], keep=keep)
    source = table_of([row(k * 5_000, i=k) for k in range(0, 400, 7)])
    few = [name for name in source.column_names if name not in ("k", "c", "s", "l")]
    whens: list[list[Any]] = [
        [Matched(update="*"), NotMatched(insert="*")],
        [Matched(delete=True)],
        [Matched("t.f", delete=True), Matched(update="*")],
        [Matched(update=few)],
        [Matched(update={**dict.fromkeys(few, None), "i": sql("t.i + 1")})],
    ]
    for when in whens:
        assert sum(Merge(judged.sessions, source, KEYS, when).dry_run(judged.table.context).values())
    assert read == [set(), set(), {"f"}, {"s", "l"}, {"s", "l", "i"}]
