"""The leaves of a table at any epoch or time, and their successors and predecessors: the cases of PDP-32."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from histories import BEGAN, Story, region, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dormouse as dm
from dormouse.errors import (
    EpochNotFound,
    InvalidCut,
    InvalidInput,
    MetadataDamaged,
    PartitionNotFound,
)
from dormouse.state.history import epochs as module
from dormouse.state.history.epochs import Epochs
from tests.stored import query
from tests.support.state import TableContext
from tests.work_of import measured

NewTable = Callable[..., TableContext]
SECOND = timedelta(seconds=1)
WORK_MAX = 1_500
"""The limit on the rows and pages of a read of ten leaves, however long the history is."""
TRUNCATE = "insert into truncation (table_id, cut_id, epoch, recorded_at) values (%s, 1, %s, now())"


@pytest.fixture
def table(new_table: NewTable) -> TableContext:
    return new_table()


@pytest.fixture
def history(table: TableContext) -> Epochs:
    return Epochs(table.supplier, table.table)


def ids(partitions: Any) -> list[str]:
    return [one.partition_id for one in partitions]


def between(history: Epochs, first: int, last: int) -> list[str]:
    return [life.partition.partition_id for life in history.lives(first, last)]


@st.composite
def stories(draw: st.DrawFn) -> Story:
    """Draws at most ten epochs, each of which replaces adjacent leaves by new ones."""
    story = Story(sorted(draw(st.sets(st.integers(-50, 50), max_size=4))))
    for _ in range(draw(st.integers(1, 10))):
        leaves = story.leaves()
        first = draw(st.integers(0, len(leaves) - 1))
        sealed = leaves[first : first + draw(st.integers(1, 3))]
        low, high = story.partitions[sealed[0]].bounds[0], story.partitions[sealed[-1]].bounds[1]
        smallest = -1_000 if low is None else low + 1
        largest = 1_000 if high is None else high - 1
        room = range(smallest, largest + 1)
        points = draw(st.sets(st.sampled_from(room), max_size=3)) if room else set[int]()
        story.scale(sealed, sorted(points), seconds=draw(st.sampled_from([0.000001, 1, 3_600])))
    return story


EXAMPLES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@EXAMPLES
@given(stories())
def test_the_leaves_of_each_epoch_are_equal_by_intervals_and_by_deltas(
    table: TableContext, history: Epochs, story: Story
) -> None:
    write(table, story)
    for epoch, change in enumerate(story.changes):
        found = history.active_partitions(epoch)
        assert ids(found) == story.leaves(epoch)
        assert [one.region for one in found] == [region(story, one.partition_id) for one in found]
        assert all(one.is_leaf for one in found)
        assert history.partitions_at(change.at) == found
    assert history.active_partitions() == history.active_partitions(story.epoch)
    records = list(history.epochs())
    assert [(r.created_at, r.sealed, r.created, r.splits, r.merges) for r in records] == [
        (c.at, c.sealed, c.created, c.splits, c.merges) for c in story.changes
    ]


@EXAMPLES
@given(stories(), st.data())
def test_partitions_between_two_epochs_are_the_leaves_of_any_of_them(
    table: TableContext, history: Epochs, story: Story, data: st.DataObject
) -> None:
    write(table, story)
    for _ in range(3):
        first = data.draw(st.integers(0, story.epoch))
        last = data.draw(st.integers(first, story.epoch))
        found = between(history, first, last)
        assert sorted(found) == sorted(p for p, one in story.partitions.items() if one.was_leaf(first, last))
        assert found[: len(story.leaves(first))] == story.leaves(first)
        lives = {life.partition.partition_id: life for life in history.lives(first, last)}
        for p, life in lives.items():
            one = story.partitions[p]
            assert (life.created, life.sealed) == (one.created, one.sealed)
            assert (life.row_count, life.byte_count) == (one.row_count, one.byte_count)


@EXAMPLES
@given(stories())
def test_successors_and_predecessors_are_the_overlapping_partitions(
    table: TableContext, history: Epochs, story: Story
) -> None:
    write(table, story)
    sealed, created = {}, {}
    for change in story.changes:
        for one in change.created:
            created[one] = [p for p in change.sealed if story.partitions[p].overlaps(story.partitions[one])]
        for one in change.sealed:
            sealed[one] = [p for p in change.created if story.partitions[p].overlaps(story.partitions[one])]
    for one in story.partitions:
        assert history.successors(one) == {p: created[p] for p in sealed.get(one, [])}
        assert history.predecessors(one) == {p: created[p] for p in created[one]}


@EXAMPLES
@given(stories(), st.data())
def test_totals_between_two_times_are_the_totals_of_the_epochs_between(
    table: TableContext, history: Epochs, story: Story, data: st.DataObject
) -> None:
    write(table, story)
    offsets = st.one_of(
        st.sampled_from([change.at - BEGAN for change in story.changes]),
        st.timedeltas(-SECOND, 4 * timedelta(hours=story.epoch + 1)),
    )
    first, last = sorted(BEGAN + data.draw(offsets) for _ in range(2))
    found = history.scale_metadata(first, last)
    assert (found.first, found.last) == (history.epoch_at(first), history.epoch_at(last))
    done = story.changes[found.first + 1 : found.last + 1]
    ended = [story.partitions[one] for change in done for one in change.sealed]
    assert (found.splits, found.merges) == (sum(c.splits for c in done), sum(c.merges for c in done))
    assert found.sealed_rows == sum(one.row_count or 0 for one in ended)
    assert found.sealed_bytes == sum(one.byte_count or 0 for one in ended)
    assert [record.epoch for record in found.records] == [*range(found.first, found.last + 1)]


def test_the_fork_of_an_interval_is_its_number_with_the_most_low_zero_bits(shared_supplier: Any) -> None:
    """Compares the SQL function `interval_fork` with bit operations in Python."""
    chosen = random.Random(7)
    some = [sorted(chosen.choices(range(1 << bits), k=2)) for bits in (1, 3, 8, 16) for _ in range(40)]
    some += [sorted(chosen.getrandbits(bits) for _ in range(2)) for bits in (33, 62) for _ in range(40)]
    firsts, lasts = zip(*some, [0, 0], [5, 5], [0, 3], [7, 8], [0, (1 << 62) - 1], [3, 2], strict=True)
    text = "select interval_fork(f, l) from unnest(%s::bigint[], %s::bigint[]) as t (f, l)"
    found = query(shared_supplier[1], text, list(firsts), list(lasts))
    for first, last, (fork,) in zip(firsts, lasts, found, strict=True):
        below = ((1 << (first ^ last).bit_length()) - 1) >> 1
        assert fork == (last & ~below if first <= last else None), (first, last)


def test_a_time_before_at_between_and_after_records(table: TableContext, history: Epochs) -> None:
    """Corresponds to findEpochAtTime in PDP-32."""
    story = Story(points=(1, 2, 3, 4))
    for _ in range(12):
        story.scale(story.leaves()[:1])
    write(table, story)
    assert history.epoch_at(BEGAN - 100 * SECOND) == 0
    assert ids(history.partitions_at(BEGAN - 100 * SECOND)) == story.leaves(0)
    for epoch in range(13):
        assert history.epoch_at(BEGAN + epoch * SECOND) == epoch
        assert history.epoch_at(BEGAN + epoch * SECOND - timedelta(microseconds=1)) == max(0, epoch - 1)
        assert history.epoch_at(BEGAN + (epoch + 0.5) * SECOND) == epoch
    elsewhere = (BEGAN + 7 * SECOND).astimezone(timezone(timedelta(hours=-9.5)))
    assert history.epoch_at(elsewhere) == 7
    assert history.epoch_at(BEGAN + timedelta(days=10_000)) == 12


def test_successors_and_predecessors_after_splits_and_merges(table: TableContext, history: Epochs) -> None:
    """Corresponds to predecessorAndSuccessorTest in PDP-32, with keys from 0 to 100 instead of 0 to 1."""
    story = Story(points=(20, 40, 60, 80))
    zero, one, two, three, four = story.leaves()
    [five] = story.scale([three, four])
    six, seven, eight = story.scale([one, two, five], [30, 40])
    nine, ten, eleven = story.scale([seven, eight], [35, 60])
    [twelve] = story.scale([nine, ten, eleven])
    write(table, story)
    assert history.successors(zero) == {}
    assert history.successors(one) == {six: [one], seven: [one]}
    assert history.successors(three) == history.successors(four) == {five: [three, four]}
    assert history.successors(five) == history.successors(two) == {eight: [two, five]}
    assert history.successors(six) == {}
    assert history.successors(seven) == {nine: [seven], ten: [seven, eight]}
    assert history.successors(eight) == {ten: [seven, eight], eleven: [eight]}
    merged = {twelve: [nine, ten, eleven]}
    assert [history.successors(p) for p in (nine, ten, eleven, twelve)] == [merged, merged, merged, {}]
    assert history.predecessors(twelve) == {nine: [seven], ten: [seven, eight], eleven: [eight]}
    assert history.predecessors(five) == {three: [], four: []}
    assert history.predecessors(zero) == {}


def test_the_initial_partitions_of_a_table_have_no_predecessors(new_table: NewTable) -> None:
    """The partitions above them were never leaves."""
    table = new_table(split_points=[0, 10])
    history = Epochs(table.supplier, table.table)
    assert ids(history.active_partitions(0)) == ids(table.partitions.leaves())
    for leaf in table.partitions.leaves():
        assert (history.successors(leaf.partition_id), history.predecessors(leaf.partition_id)) == ({}, {})
    assert (history.successors("root"), history.predecessors("root")) == ({}, {})
    assert between(history, 0, 0) == ids(table.partitions.leaves())


def test_splits_of_several_keys_are_read_as_in_the_tree(new_table: NewTable) -> None:
    table = new_table(dm.Field("a", dm.STRING), dm.Field("b", dm.BYTES), dm.Field("c", dm.INT))
    history, chosen = Epochs(table.supplier, table.table), random.Random(5)
    points: dict[str, Any] = {"a": ["\x00", "m", "\U0001f42d"], "b": [b"\x00", b"\xff"], "c": [-7, 0, 9]}
    for name, point in [(name, point) for name, some in points.items() for point in some]:
        leaves = [p for p in table.partitions.leaves() if p.region.range(name).contains(point)]
        leaf = chosen.choice(leaves).partition_id
        left, right = table.partitions.split(leaf, point, name)
        assert history.successors(leaf) == {left.partition_id: [leaf], right.partition_id: [leaf]}
        assert [*history.predecessors(right.partition_id)] == [leaf]
    for epoch in range(len(table.partitions.leaves())):
        expected = {leaf.partition_id: leaf for leaf in table.partitions.at(epoch).leaves}
        assert {leaf.partition_id: leaf for leaf in history.active_partitions(epoch)} == expected


def test_truncated_partitions_are_in_no_later_epoch(table: TableContext, history: Epochs) -> None:
    """Corresponds to truncationTest in PDP-32. Older leaves that still existed at the truncation are still
    found.
    """
    story = Story(points=(50,))
    zero, one = story.leaves()
    two, three = story.scale([one], [75])
    four, five = story.scale([three], [87])
    six, seven = story.scale([two], [62])
    eight, nine = story.scale([zero], [25])
    write(table, story)
    query(table.supplier, TRUNCATE, table.table.table_id, 2)
    at = [ids(history.partitions_at(BEGAN + epoch * SECOND)) for epoch in range(5)]
    assert at == [[zero], [zero, two], [zero, two, four, five], [zero, six, seven, four, five], ids_of(story)]
    query(table.supplier, "update truncation set epoch = 4 where table_id = %s", table.table.table_id)
    assert history.partitions_at(BEGAN) == ()
    assert ids(history.partitions_at(BEGAN + 2 * SECOND)) == [four, five]
    assert ids(history.partitions_at(BEGAN + 9 * SECOND)) == [eight, nine, six, seven, four, five]


def ids_of(story: Story) -> list[str]:
    return story.leaves()


LONG_HISTORY = 12_000


@pytest.fixture(scope="module")
def long_history(new_table_in: Callable[..., TableContext], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a table with running totals, whose ten leaves were replaced in turn, again and again."""
    from tests.support.objects import open_store

    table = new_table_in(open_store(tmp_path_factory.mktemp("objects")))
    story = Story(points=range(1, 10))
    leaves = story.leaves()
    for number in range(LONG_HISTORY):
        leaves[number % 10 : number % 10 + 1] = story.scale([leaves[number % 10]])
    write(table, story)
    table_id = table.table.table_id
    query(
        table.supplier,
        "update epoch set splits = epoch %% 7, merges = epoch %% 3 where table_id = %s",
        table_id,
    )
    query(
        table.supplier,
        """insert into history_chunk
           select %s, chunk, sum(splits), sum(merges), sum(sealed_rows), sum(sealed_bytes)
           from generate_series(1, 11) chunk join epoch e on e.table_id = %s and e.epoch <= 1000 * chunk
           group by chunk""",
        table_id,
        table_id,
    )
    return table, story


@pytest.mark.slow
@pytest.mark.parametrize("lost", [None, 7, 11])
def test_incremental_totals_equal_totals_from_scratch(long_history: Any, lost: int | None) -> None:
    """Covers also a table without running totals, as from before there were any."""
    table, _ = long_history
    table_id, chosen = table.table.table_id, random.Random(32)
    history = Epochs(table.supplier, table.table)
    remove = "delete from history_chunk where table_id = %s and chunk = %s returning *"
    removed = query(table.supplier, remove, table_id, lost)
    edges = [0, 1, 999, 1_000, 1_001, 10_999, 11_000, LONG_HISTORY]
    for _ in range(12):
        first, last = sorted([chosen.choice(edges), chosen.randrange(LONG_HISTORY + 1)])
        found = history.scale_metadata(BEGAN + first * SECOND, BEGAN + last * SECOND)
        text = """select coalesce(sum(splits), 0), coalesce(sum(merges), 0), coalesce(sum(sealed_rows), 0),
                      coalesce(sum(sealed_bytes), 0)
                  from epoch where table_id = %s and epoch > %s and epoch <= %s"""
        [scratch] = query(table.supplier, text, table_id, first, last)
        assert (found.first, found.last) == (first, last)
        assert (found.splits, found.merges, found.sealed_rows, found.sealed_bytes) == scratch
    for row in removed:
        query(table.supplier, "insert into history_chunk values (%s, %s, %s, %s, %s, %s)", *row)


def test_each_read_is_one_statement_whose_work_does_not_grow_with_the_history(
    long_history: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, story = long_history
    history, middle = Epochs(table.supplier, table.table), LONG_HISTORY // 2 + 1
    time, ended = BEGAN + middle * SECOND, story.changes[middle].sealed[0]
    reads: dict[str, Callable[[], Any]] = {
        "active": lambda: history.active_partitions(middle),
        "active now": history.active_partitions,
        "epoch at": lambda: history.epoch_at(time),
        "partitions at": lambda: history.partitions_at(time),
        "epochs": lambda: list(history.epochs(middle, middle + 10)),
        "totals": lambda: history.scale_metadata(BEGAN + SECOND, BEGAN + 2 * SECOND),
        "successors": lambda: history.successors(ended),
        "predecessors": lambda: history.predecessors(ended),
        "between": lambda: between(history, middle, middle + 10),
    }
    done = {}
    for name, read in reads.items():
        with measured(monkeypatch) as work:
            assert read() not in ((), [], {})
        assert len(work) == 1
        done[name] = work.total()
    assert {name: work for name, work in done.items() if not 0 < work < WORK_MAX} == {}


def test_pages_of_epochs_form_one_stream(
    table: TableContext, history: Epochs, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story()
    for _ in range(10):
        story.scale(story.leaves())
    write(table, story)
    monkeypatch.setattr(module, "PAGE_EPOCHS", 3)
    for first, last in [(0, 10), (0, 2), (0, 3), (4, 9), (10, 10), (3, 4)]:
        assert [record.epoch for record in history.epochs(first, last)] == [*range(first, last + 1)]
        assert between(history, first, last) == [f"p{n}" for n in range(first, last + 1)]
    assert [record.epoch for record in history.epochs(5)] == [5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("first", [None, 0])
def test_a_truncation_between_two_pages_of_epochs_is_named_in_the_error(
    table: TableContext, history: Epochs, monkeypatch: pytest.MonkeyPatch, first: int | None
) -> None:
    story = Story()
    for _ in range(10):
        story.scale(story.leaves())
    write(table, story)
    monkeypatch.setattr(module, "PAGE_EPOCHS", 3)
    records = history.epochs(first)
    assert next(records).epoch == 0
    query(table.supplier, TRUNCATE, table.table.table_id, 7)
    with pytest.raises(EpochNotFound, match=r"epoch 3.*: its history is truncated at epoch 7"):
        list(records)


def test_unknown_epochs_and_partitions_and_invalid_times_are_refused_in_one_line(
    table: TableContext, history: Epochs
) -> None:
    write(table, Story())
    name = table.table.name
    for epoch in (1, -1, 2**63, 2**200):
        for read in (history.active_partitions, history.epochs, lambda e: history.lives(0, e)):
            with pytest.raises(
                EpochNotFound, match=f"^table '{name}' has no epoch {epoch}; it has .* 0 to 0$"
            ):
                read(epoch)
    for wrong in ("x", 1.0, True, BEGAN):
        for read in (history.active_partitions, history.epochs, lambda e: history.lives(0, e)):
            with pytest.raises(InvalidInput, match="an epoch is a whole number, not "):
                read(wrong)  # type: ignore[arg-type]
    for absent in ("p9", "", "\x00", "a\ud800"):
        for ask in (history.successors, history.predecessors):
            with pytest.raises(PartitionNotFound, match="has no partition"):
                ask(absent)
    naive = datetime(2026, 11, 20, 14)
    for at in (history.epoch_at, history.partitions_at, lambda t: history.scale_metadata(BEGAN, t)):
        with pytest.raises(InvalidCut, match="is naive: give a time with its time zone"):
            at(naive)
        with pytest.raises(InvalidCut, match="give a datetime with a time zone, not '2026-11-20'"):
            at("2026-11-20")  # type: ignore[arg-type]
    with pytest.raises(InvalidCut, match="is before"):
        history.scale_metadata(BEGAN, BEGAN - SECOND)
    with pytest.raises(EpochNotFound, match="from 1 to 0: the first is the later one"):
        write_two(table)
        history.epochs(1, 0)


def write_two(table: TableContext) -> None:
    story = Story()
    story.scale(story.leaves())
    write(table, story)


def test_a_lost_row_of_an_epoch_is_an_error(table: TableContext, history: Epochs) -> None:
    story = Story()
    for _ in range(4):
        story.scale(story.leaves())
    write(table, story)
    query(table.supplier, "delete from epoch where table_id = %s and epoch = 2", table.table.table_id)
    with pytest.raises(MetadataDamaged, match="lost its row of epoch 2"):
        list(history.epochs())
    assert [record.epoch for record in history.epochs(3)] == [3, 4]
