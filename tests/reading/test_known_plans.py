"""Plans that know the references of earlier ones are those that read all references, whatever changes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.reading import known_plans
from dormouse.state.files.facts import Planned, PlannedRows
from dormouse.state.files.inlined import InlinedContent
from tests.support.api import Instance, Table
from tests.support.reading import KeyRanges, plan_query, question
from tests.support.state import LAYOUTS, FileReferenceStore
from tests.tiers import by_tier

KEYS = 24
STEPS = by_tier(20, 40)
SCHEMA = dm.Schema(
    [dm.Field("key", dm.LONG), dm.Field("name", dm.STRING)], values=[dm.Field("value", dm.LONG)]
)
Row = tuple[int, str, int]


@pytest.fixture(autouse=True)
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remembers every plan, and sorts its references early."""
    monkeypatch.setattr(known_plans, "REFERENCES_MIN", 0)
    monkeypatch.setattr(known_plans, "RECENT_MAX", 3)
    monkeypatch.setattr(known_plans, "_RUN", 2)
    forget(monkeypatch)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_plans, "_plans", known_plans._Plans())


@pytest.fixture
def came(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of references that came from the database, for each plan."""
    counts: list[int] = []
    read = FileReferenceStore.planned_from

    def counted(store: FileReferenceStore, rows: Sequence[Sequence[Any]]) -> Planned | None:
        found = read(store, rows)
        counts.append(-1 if found is None else len(found.rows.references))
        return found

    monkeypatch.setattr(FileReferenceStore, "planned_from", counted)
    yield counts


def new_table(instance: Instance, layout: str = "file_table", name: str = "t", **properties: Any) -> Table:
    given = {"history_retention_seconds": 3_600, "gc_delay_seconds": 0} | properties
    return instance.create_table(name, SCHEMA, layout=layout, properties=dm.TableProperties(**given))


def ingest(table: Table, *rows: Row) -> None:
    columns = zip(*rows, strict=True)
    table.ingest(pa.table(dict(zip(("key", "name", "value"), map(list, columns), strict=True))))


def look_up(table: Table, where: dict[str, Any]) -> Counter[Row]:
    return Counter(tuple(row.values()) for row in table.query(where).read_all().to_pylist())


def planned(table: Table, where: dict[str, Any]) -> list[str]:
    ranges = question(table.context.schema, where, None, None).ranges
    return sorted(scan.filename for group in plan_query(table.context, ranges) for scan in group)


@pytest.mark.parametrize(
    ("inline_bytes_max", "references_min"),
    [(0, 0), (65_536, 0), (65_536, 4)],
    ids=["objects", "inlined", "few_as_a_whole"],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_look_ups_and_ranges_see_every_change(
    instance: Instance,
    layout: str,
    inline_bytes_max: int,
    references_min: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ingests, deletions, compactions, splits, restores, collection and other layouts, in random order."""
    monkeypatch.setattr(known_plans, "REFERENCES_MIN", references_min)
    table = new_table(
        instance, layout, inline_bytes_max=inline_bytes_max, split_threshold_rows=20, compaction_batch_files=4
    )
    chance = random.Random(f"{layout} {inline_bytes_max}")
    rows: Counter[Row] = Counter()
    cuts: list[tuple[dm.Cut, Counter[Row]]] = []
    for step in range(STEPS):
        kind = chance.choice(
            ["ingest"] * 6 + ["delete", "compact", "split", "collect", "cut", "restore", "layout"]
        )
        if kind == "ingest":
            some = [
                (chance.randrange(KEYS), chance.choice("ab"), step) for _ in range(chance.choice([1, 1, 9]))
            ]
            ingest(table, *some)
            rows += Counter(some)
        elif kind == "delete":
            key = chance.randrange(KEYS)
            table.delete({"key": key})
            rows = Counter({row: count for row, count in rows.items() if row[0] != key})
        elif kind == "compact":
            table.compact(engine="local")
        elif kind == "split":
            table.split()
        elif kind == "collect":
            table.collect_garbage()
        elif kind == "cut":
            cuts.append((table.history.record_cut(), rows.copy()))
        elif kind == "restore" and cuts:
            cut, rows = chance.choice(cuts)
            rows = rows.copy()
            table.restore(cut)
        elif kind == "layout":
            table.convert_layout(chance.choice(LAYOUTS))
        key = chance.randrange(KEYS)
        wanted: list[tuple[dict[str, Any], range, str]] = [
            ({"key": key}, range(key, key + 1), "ab"),
            ({"key": key, "name": "a"}, range(key, key + 1), "a"),
            ({"key": dm.Range(key, key + 5)}, range(key, key + 5), "ab"),
            ({}, range(KEYS), "ab"),
        ]
        for where, keys, names in wanted:
            expected = {row: count for row, count in rows.items() if row[0] in keys and row[1] in names}
            assert look_up(table, where) == expected, (step, kind, where)
            known = planned(table, where)
            with monkeypatch.context() as patch:
                forget(patch)
                assert known == planned(table, where), (step, kind, where)


@pytest.mark.parametrize("inline_bytes_max", [0, 65_536], ids=["objects", "inlined"])
def test_only_new_references_come(instance: Instance, came: list[int], inline_bytes_max: int) -> None:
    table = new_table(instance, inline_bytes_max=inline_bytes_max)
    for key in range(10):
        ingest(table, (key, "a", key))
    for _ in range(2):  # the first plan of objects has no state
        look_up(table, {"key": 3})
    came.clear()
    look_up(table, {"key": 4})
    ingest(table, (4, "a", 1), (9, "a", 1))
    ingest(table, (5, "a", 1))
    assert look_up(table, {"key": 4}) == Counter([(4, "a", 4), (4, "a", 1)])
    assert look_up(table, {"key": 9}) == Counter([(9, "a", 9), (9, "a", 1)])
    assert came == [0, 2, 0]
    table.delete({"key": 4})
    assert look_up(table, {"key": 4}) == Counter()
    assert look_up(table, {"key": 5}) == Counter([(5, "a", 5), (5, "a", 1)])
    assert came[3:] == [2, 0]  # the files that may have the deleted key, and nothing new
    for key in range(20, 23):
        ingest(table, (key, "a", 1))
    came.clear()
    for _ in range(2):
        assert look_up(table, {"key": 4}) == Counter()
    assert look_up(table, {"key": 21}) == Counter([(21, "a", 1)])
    assert came == [5, 2, 0]  # new references come once, also beside a deletion
    table.compact(engine="local")
    came.clear()
    assert [look_up(table, {"key": 9}) for _ in range(2)] == [Counter([(9, "a", 9), (9, "a", 1)])] * 2
    assert came[0] > 0
    assert came[1] == 0


@pytest.mark.parametrize("recent_max", [0, 64])
def test_a_look_up_beside_many_files_looks_at_few(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, recent_max: int
) -> None:
    table = new_table(instance, inline_bytes_max=65_536)
    monkeypatch.setattr(known_plans, "RECENT_MAX", recent_max)
    look_up(table, {"key": 3})
    for key in range(40):
        ingest(table, (key, "a", key))
    look_up(table, {"key": 3})
    known = known_plans.known_plan(
        table.context, ["root"], question(table.context.schema, {"key": 7}, None, None).ranges
    )
    assert len(known.candidates) == 1
    assert known.request is not None
    assert len(known.request.wanted) == 1
    monkeypatch.delattr(InlinedContent, "read")  # the content comes with the plan
    assert look_up(table, {"key": 7}) == Counter([(7, "a", 7)])


def test_a_plan_of_a_few_objects_comes_as_a_whole_until_a_file_is_inlined(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_plans, "REFERENCES_MIN", 32)
    asked: list[bool] = []
    call = FileReferenceStore.plan_call

    def noted(store: FileReferenceStore, ids: Any, bounds: Any, known: Any = None) -> Any:
        asked.append(known is not None)
        return call(store, ids, bounds, known)

    monkeypatch.setattr(FileReferenceStore, "plan_call", noted)
    table = new_table(instance, inline_bytes_max=0)
    ingest(table, (1, "a", 1))
    table.set_properties(inline_bytes_max=65_536)
    for _ in range(3):
        assert look_up(table, {"key": 1}) == Counter([(1, "a", 1)])
    assert asked[-3:] == [True, False, False]  # the first asks for content that may be new
    asked.clear()
    ingest(table, (1, "b", 2))
    for _ in range(3):
        assert look_up(table, {"key": 1}) == Counter([(1, "a", 1), (1, "b", 2)])
    assert asked[-3:] == [False, True, True]


def test_the_memory_is_bounded(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_plans, "REFERENCES_MAX", 7)  # with the two partitions
    monkeypatch.setattr(known_plans, "PLAN_REFERENCES_MAX", 3)
    monkeypatch.setattr(known_plans, "PLANS_MAX", 2)
    plans = known_plans._plans
    for number in range(1, 5):
        table = new_table(instance, inline_bytes_max=65_536, name=f"t{number}")
        for step in range(number):
            ingest(table, (step, "a", step))
            for _ in range(2):
                assert sum(look_up(table, {}).values()) == step + 1
        assert 1 <= len(plans._plans) <= 2
        assert sum(made.count for made in plans._plans.values()) == [1, 3, 5, 0][number - 1]
        assert plans._count == [1, 3, 5, 0][number - 1] + len(plans._plans)


def test_partitions_without_references_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_plans, "REFERENCES_MAX", 5)
    plans = known_plans._Plans()
    for key in (("a", ("1", "2")), ("b", ("1", "2", "3")), ("a", ("1", "2")), ("c", ("1",))):
        plans.put(key, known_plans._UNKNOWN)
    assert [name for name, _ in plans._plans] == ["a", "c"]


def test_few_plans_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_plans, "PLANS_MAX", 2)
    plans = known_plans._Plans()
    for name in ("a", "b", "a", "c"):
        plans.put((name, ()), known_plans._UNKNOWN)
    assert list(plans._plans) == [("a", ()), ("c", ())]


@pytest.mark.parametrize(("partitions_max", "count"), [(1, 0), (2, 1)])
def test_a_plan_of_many_partitions_is_not_remembered(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, partitions_max: int, count: int
) -> None:
    monkeypatch.setattr(known_plans, "PARTITIONS_MAX", partitions_max)
    table = new_table(instance, inline_bytes_max=0)
    known = known_plans.known_plan(table.context, ["left", "right"], KeyRanges())
    known.completed("", PlannedRows([], ()))
    assert len(known_plans._plans._plans) == count


def test_recent_references_are_sorted_when_there_are_many() -> None:
    made = known_plans._Remembered("", "", known_plans._Sorted(()))
    for number in range(10):
        made = made.later("", "", [("p", str(number), True, 1, b"a", b"b")])
        assert made.count == number + 1
        assert len(made.recent) <= known_plans.RECENT_MAX


def test_the_inlined_files_are_those_of_sorted_and_of_recent_references() -> None:
    made, right = known_plans._Remembered("", "", known_plans._Sorted(())), list[tuple[str, str]]()
    assert not made.inlined
    for number in range(10):
        right.append((f"p{number % 2}", f"data/t/inlined/{number:032x}/0-root.parquet"))
        made = made.later("", "", [(*right[-1], True, 1, b"a", b"b"), ("p", "o", True, 1, b"a", b"b")])
        assert made.inlined
        others = {("p", "o"), ("p1", right[0][1])}
        assert made.inlined.lack(frozenset({*right, *others})) == others


def test_keys_of_any_order_are_found_among_sorted_references() -> None:
    """Compares the search with a look at each, for random bounds that are prefixes or keys."""
    chance = random.Random(5)

    def key() -> bytes:
        return bytes(chance.choice(b"\x00\x01a\xfe\xff") for _ in range(chance.randrange(1, 5)))

    for _ in range(300):
        pairs = [sorted((key(), key())) for _ in range(chance.randrange(20))]
        references: list[tuple[Any, ...]] = [("p", str(n), True, 1, *pair) for n, pair in enumerate(pairs)]
        references.append(("p", "unknown", True, 1, None, None))
        lowest, highest = sorted((key(), key()))
        recent = references[: chance.randrange(len(references) + 1)]
        remembered = known_plans._Remembered(
            "", None, known_plans._Sorted(references[len(recent) :]), tuple(recent)
        )
        found = remembered.within((lowest, highest))
        wanted = [
            row[1]
            for row in references
            if row[4] is None
            or not (row[5] < lowest or (row[4] > highest and not row[4].startswith(highest)))
        ]
        assert sorted(row[1] for row in found) == sorted(wanted)
