"""Data that only epochs before a truncation need is deleted in pieces; everything readable is kept."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta

import pytest
from histories import BEGAN, Story, age, leaves_of, of, rows, scaled, write
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import partitions_of

from dormouse.errors import (
    CutExpired,
    EpochNotFound,
    InvalidCut,
    PartitionNotFound,
)
from dormouse.state.files import garbage
from dormouse.state.history.epochs import Epochs
from dormouse.state.history.moments import cuts
from dormouse.state.history.retention import truncate
from tests.state.history.test_history_epochs import EXAMPLES, SECOND, ids, stories
from tests.stored import at_once, query
from tests.support.model import PartitionTree
from tests.support.state import FileChecks, PartitionStore, TableContext, record_cut, tree_problems
from tests.work_of import measured

NewTable = Callable[..., TableContext]
PIECE_WORK_MAX = 2_500
"""The limit on the rows and pages that PostgreSQL touches to forget twenty epochs."""
LONG_AGO = timedelta(days=4_000)
"""The time by which the epochs of a story are moved back."""


@pytest.fixture
def table(new_table: NewTable) -> TableContext:
    return new_table()


def truncate_at(table: TableContext, epoch: int) -> None:
    query(
        table.supplier,
        "insert into truncation (table_id, cut_id, epoch, recorded_at) values (%s, %s, %s, now()) "
        "on conflict (table_id) do update set cut_id = excluded.cut_id, epoch = excluded.epoch",
        table.table.table_id,
        epoch,
        epoch,
    )


def forget(table: TableContext) -> list[garbage.Piece]:
    return list(garbage.forget_epochs(table.supplier, table.table))


def check_history(table: TableContext, story: Story, first: int) -> None:
    """Checks the history from an epoch on against the story, and that earlier epochs are refused."""
    history = Epochs(table.supplier, table.table)
    for epoch, change in enumerate(story.changes):
        at = change.at - LONG_AGO
        if epoch >= first:
            assert ids(history.active_partitions(epoch)) == story.leaves(epoch)
            assert ids(history.partitions_at(at)) == story.leaves(epoch)
            assert history.epoch_at(at) == epoch
            continue
        lasted = [one for one in story.leaves(epoch) if (story.partitions[one].sealed or 10**9) > first]
        assert ids(history.partitions_at(at)) == lasted
        for refused in (
            lambda epoch=epoch: history.active_partitions(epoch),
            lambda epoch=epoch: history.epochs(epoch),
            lambda epoch=epoch: history.lives(epoch, first),
            lambda at=at: history.epoch_at(at),
            lambda at=at: history.scale_metadata(at, BEGAN),
        ):
            with pytest.raises(EpochNotFound, match=f"truncated at epoch {first}"):
                refused()
    assert [record.sealed for record in history.epochs()] == [c.sealed for c in story.changes[first:]]
    found = {life.partition.partition_id for life in history.lives(first, story.epoch)}
    assert found == {p for p, one in story.partitions.items() if one.was_leaf(first, story.epoch)}
    for name, one in story.partitions.items():
        if one.sealed is not None and one.sealed <= first > 0:
            for ask in (history.successors, history.predecessors):
                with pytest.raises(PartitionNotFound, match=f"ended up to epoch {first}, .* not kept"):
                    ask(name)
            continue
        sealed = one.sealed and story.changes[one.sealed].created
        made = [p for p in sealed or () if story.partitions[p].overlaps(one)]
        assert [*history.successors(name)] == made
        if 0 < one.created <= first:
            with pytest.raises(EpochNotFound, match=f"epoch {one.created} created it"):
                history.predecessors(name)
        else:
            ended = story.changes[one.created].sealed
            before = [p for p in ended if story.partitions[p].overlaps(one)]
            assert [*history.predecessors(name)] == before


def totals(story: Story, first: int, last: int) -> tuple[int, int, int, int]:
    done = story.changes[first + 1 : last + 1]
    ended = [story.partitions[one] for change in done for one in change.sealed]
    return (
        sum(c.splits for c in done),
        sum(c.merges for c in done),
        sum(one.row_count or 0 for one in ended),
        sum(one.byte_count or 0 for one in ended),
    )


@settings(EXAMPLES, max_examples=20)
@given(stories(), st.data())
def test_a_history_is_unchanged_from_its_truncation_on(
    table: TableContext, story: Story, data: st.DataObject
) -> None:
    """The history is truncated twice, and only some of it is forgotten in between."""
    write(table, story)
    of(table, "update epoch set created_at = created_at - %s where table_id = %s", LONG_AGO)
    for first in sorted(data.draw(st.sets(st.integers(0, story.epoch), min_size=1, max_size=3))):
        truncate_at(table, first)
        check_history(table, story, first)
        pieces = garbage.forget_epochs(table.supplier, table.table)
        for _ in range(data.draw(st.integers(0, 3))):
            next(pieces, None)
        check_history(table, story, first)
    whole = forget(table)
    check_history(table, story, first)
    lives = story.partitions.items()
    kept = {p for p, one in lives if one.sealed is None or one.sealed > first}
    made = {story.partitions[p].created for p in kept}
    assert rows(table) == (kept, {e for e in range(story.epoch + 1) if e >= first or e in made})
    assert not any(piece.partitions > 1_000 for piece in whole)
    assert forget(table) == []
    history = Epochs(table.supplier, table.table)
    for last in range(first, story.epoch + 1):
        found = history.scale_metadata(*(story.changes[n].at - LONG_AGO for n in (first, last)))
        assert (found.splits, found.merges, found.sealed_rows, found.sealed_bytes) == totals(
            story, first, last
        )


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "PIECE_EPOCHS", 3)


@pytest.mark.slow
def test_totals_continue_after_epochs_are_forgotten(
    table: TableContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running totals are stored every thousand epochs. The truncation lies at or between such epochs."""
    monkeypatch.setattr(garbage, "PIECE_EPOCHS", 400)
    story = Story(points=range(1, 4))
    leaves = story.leaves()
    for number in range(3_500):
        leaves[number % 4 : number % 4 + 1] = story.scale([leaves[number % 4]])
    write(table, story)
    of(table, "update epoch set created_at = created_at - %s, splits = epoch %% 7, merges = epoch %% 3 "
       "where table_id = %s", LONG_AGO)  # fmt: skip
    sums = "sum(splits), sum(merges), sum(sealed_rows), sum(sealed_bytes)"
    text = f"insert into history_chunk select t.table_id, chunk, {sums} from tables t, "
    text += "generate_series(1, 3) chunk join epoch e on e.epoch <= 1000 * chunk "
    of(table, f"{text} where e.table_id = t.table_id and t.table_id = %s group by t.table_id, chunk")
    text = f"select {sums} from epoch where epoch > %s and epoch <= %s and table_id = %s"
    history, chosen = Epochs(table.supplier, table.table), random.Random(8)
    for first in (10, 999, 1_000, 1_001, 2_345, 3_400):
        spans = [(first, 3_500), (first, first + 1)]
        spans += [(chosen.randrange(first, 3_450), chosen.randrange(3_450, 3_501)) for _ in range(4)]
        expected = [of(table, text, *span) for span in spans]
        truncate_at(table, first)
        assert sum(piece.epochs for piece in forget(table)) > 0
        for (a, b), [scratch] in zip(spans, expected, strict=True):
            found = history.scale_metadata(*(BEGAN - LONG_AGO + n * SECOND for n in (a, b)))
            assert (found.splits, found.merges, found.sealed_rows, found.sealed_bytes) == scratch
        chunks = of(table, "select chunk from history_chunk where table_id = %s order by chunk")
        assert chunks == [(n,) for n in range(first // 1_000, 4)]
        problems = [each.detail for each in tree_problems(table.supplier, table.table)]
        assert [each for each in problems if "epoch" in each and "it " not in each] == []


@pytest.mark.slow
def test_the_work_of_forgetting_a_piece_does_not_grow_with_the_history(
    table: TableContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story(points=range(1, 10))
    leaves = story.leaves()
    for number in range(4_000):
        leaves[number % 10 : number % 10 + 1] = story.scale([leaves[number % 10]])
    write(table, story)
    of(table, "update epoch set created_at = created_at - %s where table_id = %s", LONG_AGO)
    truncate_at(table, 3_900)
    with table.supplier.connection() as conn:
        conn.execute("analyze")  # otherwise the statistics may be those of an earlier test
    monkeypatch.setattr(garbage, "PIECE_EPOCHS", 20)
    pieces = garbage.forget_epochs(table.supplier, table.table)
    for _ in range(3):
        with measured(monkeypatch) as work:
            assert next(pieces).partitions == 20
        assert 0 < work.total() < PIECE_WORK_MAX


@pytest.mark.slow
def test_a_tree_is_whole_from_the_truncation_on(table: TableContext) -> None:
    """Covers later splits and merges. Ids are not reused, and a check finds no problems."""
    trees, stale = dict[int, PartitionTree](), []
    for seed, epochs in enumerate((4, 28, 30)):
        trees |= scaled(table, epochs, seed)
        stale.append(PartitionStore(table.supplier, table.table))
        assert leaves_of(stale[-1].tree()) == leaves_of(trees[max(trees)])
    of(table, "update epoch set created_at = created_at - interval '1 day' where table_id = %s")
    before, _ = rows(table)
    for first in (7, 8, 31, 59):
        truncate_at(table, first)
        assert forget(table)
        assert tree_problems(table.supplier, table.table) == []
        assert FileChecks(table.store.own).problems() == []
        fresh = PartitionStore(table.supplier, table.table)
        for epoch in range(first, 60):
            assert leaves_of(fresh.at(epoch)) == leaves_of(trees[epoch])
        with pytest.raises(EpochNotFound, match=f"no longer has epoch {first - 1}:"):
            PartitionStore(table.supplier, table.table).at(first - 1)
    seen = before | rows(table)[0]
    later = scaled(table, 20, seed=4)
    assert leaves_of(trees[59]) == leaves_of(later[59])
    assert not (rows(table)[0] - before) & seen
    assert {e for e in rows(table)[1] if e > 59} == set(range(60, max(later) + 1))
    # stores with an outdated tree, whose next epochs are forgotten
    for store in stale:
        assert leaves_of(store.tree()) == leaves_of(later[max(later)])
        assert leaves_of(store.at(65)) == leaves_of(later[65])
    assert tree_problems(table.supplier, table.table) == []


def test_a_process_with_an_outdated_tree_reads_the_current_tree_again(
    new_table: NewTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch that split a leaf is forgotten, since both halves were split later."""
    monkeypatch.setattr(garbage, "MARGIN_SECONDS", 0.0)
    table = new_table(split_points=[100], gc_delay_seconds=0)
    stale = PartitionStore(table.supplier, table.table)
    left = stale.tree().leaves[0].partition_id
    for half, point in zip(table.partitions.split(left, 50), (25, 75), strict=True):
        table.partitions.split(half.partition_id, point)
    truncate_at(table, 3)
    assert [(piece.epochs, piece.partitions) for piece in forget(table)] == [(1, 0)]
    assert rows(table)[1] == {0, 2, 3}
    now = PartitionStore(table.supplier, table.table).tree()
    assert [leaf.region.range("key").min for leaf in now.leaves] == [None, 25, 50, 75, 100]
    assert leaves_of(stale.tree()) == leaves_of(now)


KEEPERS = {
    "a reader": "insert into hold (holder, table_id, since, until) values "
    "('reader x', {table}, {at}, 'infinity')",
    "a backup": "insert into hold (holder, since, until) values ('backup', {at}, 'infinity')",
    "a consumer": "insert into hold (holder, table_id, since, snapshot, until) values "
    "('consumer {table}/etl', {table}, {at}, pg_current_snapshot(), clock_timestamp() + interval '1 hour')",
    "a writer": "insert into write_attempt (table_id, attempt_id, object_prefix, started_at) values "
    "({table}, gen_random_uuid(), 'x', {at})",
    "a look": "insert into watermark (table_id, purpose, epoch, whole_at) values "
    "({table}, 'splits', 2, now())",
    "a count": "insert into watermark (table_id, purpose, epoch, whole_at) values "
    "({table}, 'totals', 2, now() - interval '3 days')",
    "the delay of collection": "update epoch set created_at = now() - interval '15 minutes' + (epoch - 3) * "
    "interval '1 second' where table_id = {table} and epoch > 2",
}


@pytest.mark.parametrize("keeper", KEEPERS)
def test_epochs_that_a_holder_or_writer_needs_are_not_forgotten(table: TableContext, keeper: str) -> None:
    """The epochs lie before the truncation, so that nothing but the holder or writer keeps them."""
    story = Story(points=(10, 20))
    for _ in range(4):
        story.scale(story.leaves())
    write(table, story)
    of(table, "update epoch set created_at = '2020-01-01'::timestamptz + epoch * interval '1 hour' "
       "where table_id = %s")  # fmt: skip
    truncate_at(table, 4)
    table_id = table.table.table_id
    query(table.supplier, KEEPERS[keeper].format(table=table_id, at="'2020-01-01 02:30'::timestamptz"))
    try:
        forget(table)
        # a leaf that ended at epoch 3 existed at half past two
        assert [
            story.partitions[one].merged_id for one in rows(table)[0] if story.partitions[one].sealed == 3
        ]
        assert rows(table)[1] == {2, 3, 4} or keeper == "the delay of collection"
        assert not [one for one in rows(table)[0] if (story.partitions[one].sealed or 9) <= 2]
    finally:
        for name in ("hold", "write_attempt", "watermark"):
            query(table.supplier, f"delete from {name} where table_id = %s", table_id)
        query(table.supplier, "delete from hold where holder = 'backup'")
    of(table, "update epoch set created_at = created_at - interval '1 day' where table_id = %s")
    forget(table)
    assert rows(table) == ({*story.leaves()}, {4})


@pytest.mark.slow
def test_collection_forgets_for_a_while_and_goes_on_in_the_next_round(
    table: TableContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled(table, 40)
    truncate(table, record_cut(table))
    age(table)
    moved: list[tuple[int, int]] = []
    monkeypatch.setattr(garbage, "EPOCHS_SECONDS_MAX", -1.0)
    report = table.garbage.collect(progress=lambda done, total: moved.append((done, total)))
    assert (report.whole, report.epochs_left) == (False, 36)
    assert moved == [(3, 39)]
    assert table.garbage.collect(lambda: True).epochs_left == 33
    monkeypatch.setattr(garbage, "EPOCHS_SECONDS_MAX", 600.0)
    rest = table.garbage.collect()
    assert (rest.whole, rest.epochs_left) == (True, 0)
    assert rest.partitions > rest.epochs > 0
    assert tree_problems(table.supplier, table.table) == []
    tree = table.partitions.tree()
    assert rows(table)[0] == {one.partition_id for one in partitions_of(tree)}


@pytest.mark.slow
def test_concurrent_truncations_and_rounds_end_as_sequential_ones(table: TableContext) -> None:
    """Other threads split, merge and record cuts meanwhile."""
    scaled(table, 30)
    for _ in range(4):
        record_cut(table)
        scaled(table, 5, seed=3)
    age(table)
    before, last = list(cuts(table)), table.partitions.tree().epoch
    fresh = PartitionStore(table.supplier, table.table)
    trees = {epoch: leaves_of(fresh.at(epoch)) for epoch in range(last + 1)}

    def rounds() -> None:
        for _ in range(3):
            forget(table)

    outcomes = at_once(
        lambda: truncate(table, before[1]),
        lambda: truncate(table, before[3]),
        lambda: truncate(table, before[2]),
        rounds,
        rounds,
        lambda: scaled(table, 8, seed=5),
        lambda: record_cut(table),
    )
    refused = [each for each in outcomes if isinstance(each, Exception)]
    assert all(isinstance(each, InvalidCut | CutExpired) for each in refused), refused
    assert outcomes[1], "the last of the cuts"
    forget(table)
    first = before[3].epoch
    assert of(table, "select cut_id, epoch from truncation where table_id = %s") == [
        (before[3].cut_id, first)
    ]
    assert next(iter(cuts(table))) == before[3]
    store = PartitionStore(table.supplier, table.table)
    assert {epoch: leaves_of(store.at(epoch)) for epoch in range(first, last + 1)} == {
        epoch: trees[epoch] for epoch in range(first, last + 1)
    }
    assert tree_problems(table.supplier, table.table) == []
    assert FileChecks(table.store.own).problems() == []
    gone = of(table, "select count(*) from partition where merged_epoch <= %s and table_id = %s", first)
    assert gone == [(0,)]
