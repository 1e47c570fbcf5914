"""The history compared with a naive model, which has the leaves of each epoch and the rows of each cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from histories import leaves_of
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from trees import below, partitions_of

import dormouse as dm
from dormouse.errors import CutExpired, EpochNotFound, InvalidCut, NotWhole
from dormouse.state.files import garbage
from tests.machines import run_machine
from tests.standard import OF_KEYS
from tests.support.api import Instance
from tests.support.model import Cut
from tests.support.state import LAYOUTS

KEYS = st.lists(st.integers(0, 40), min_size=1, max_size=6)
EXAMPLES, STEPS = 4, 50
_numbers = itertools.count()


class HistoryMachine(RuleBasedStateMachine):
    """A state machine of a table and its model.

    `epochs` has the leaves and the time of each epoch, and `cuts` the rows of each readable cut. Only named
    cuts keep removed rows, since the delay of collection is 0.
    """

    instance: Instance
    layout: str

    @initialize()
    def begin(self) -> None:
        properties: dict[str, Any] = {
            "compaction_strategy": "basic",
            "compaction_batch_files": 2,
            "gc_delay_seconds": 0,
        }
        self.table = self.instance.create_table(
            f"t{next(_numbers)}",
            OF_KEYS,
            layout=self.layout,
            split_points=[20],
            properties=dm.TableProperties(**properties),
        )
        self.rows: list[int] = []
        self.cuts: list[tuple[Cut, list[int]]] = []
        self.gone: list[Cut] = []
        self.first = 0
        self.epochs: list[tuple[Any, Any]] = []
        self.ids: set[str] = set()
        self._note()
        self.turns = itertools.count()

    def teardown(self) -> None:
        if hasattr(self, "turns"):
            self._read_all()
            self.instance.drop_table(self.table.name)

    def _note(self) -> None:
        tree = self.table.partitions.tree()
        if tree.epoch < len(self.epochs):
            return
        assert tree.epoch == len(self.epochs)
        [record] = self.table.history.epochs(tree.epoch)
        new = {*record.created}
        assert not new & self.ids, "an id is never given again"
        self.ids |= new
        self.epochs.append((leaves_of(tree), record.created_at))

    @rule(keys=KEYS)
    def ingest(self, keys: list[int]) -> None:
        self.rows += keys
        self.table.ingest(pa.table({"key": keys}), engine="local")

    @rule()
    def compact(self) -> None:
        self.table.compact(engine="local")

    @rule(point=st.integers(1, 40))
    def split(self, point: int) -> None:
        [leaf] = [one for one in self.table.partitions.leaves() if one.region.range("key").contains(point)]
        if leaf.region.range("key").min != point:
            self.table.partitions.split(leaf.partition_id, point)
            self._note()
        self.table.split()  # pushes references down

    @rule(data=st.data())
    def merge(self, data: st.DataObject) -> None:
        tree = self.table.partitions.tree()
        inner = [one.partition_id for one in partitions_of(tree) if not one.is_leaf]
        if inner:
            with suppress(NotWhole):
                self.table.partitions.merge(below(tree, data.draw(st.sampled_from(inner))))
                self._note()

    @rule()
    def cut(self) -> None:
        self.cuts.append((self.table.history.record_cut(f"cut{next(_numbers)}"), sorted(self.rows)))

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        if not self.cuts:
            return
        self._read_all()
        at = data.draw(st.integers(0, len(self.cuts) - 1))
        history, (cut, _) = self.table.history, self.cuts[at]
        if at:
            with pytest.raises(InvalidCut, match="would be lost"):
                history.truncate(cut)
        for before, _ in self.cuts[:at]:
            history.drop_cut(before)
            self.gone.append(before)
        del self.cuts[:at]
        self.first = max(self.first, cut.epoch)
        history.truncate(cut)
        assert not history.truncate(cut)

    @rule()
    def collect(self) -> None:
        assert self.table.collect_garbage().whole
        self._read_all()

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        if not self.cuts:
            return
        cut, rows = data.draw(st.sampled_from(self.cuts))
        with suppress(NotWhole):
            self.table.restore(cut)
            self.rows = [*rows]

    def _read_epoch(self, epoch: int) -> None:
        history, (leaves, at) = self.table.history, self.epochs[epoch]
        found = [(one.partition_id, one.region) for one in history.partitions_at(at)]
        if epoch >= self.first:
            assert [(p.partition_id, p.region) for p in history.active_partitions(epoch)] == leaves
            assert (history.epoch_at(at), found) == (epoch, leaves)
            return
        then = dict(self.epochs[self.first][0])
        assert found == [(name, region) for name, region in leaves if name in then]
        with pytest.raises(EpochNotFound):
            history.active_partitions(epoch)

    def _read_cut(self, at: int) -> None:
        cut, rows = self.cuts[at]
        assert sorted(self.table.query(as_of=cut).read_all()["key"].to_pylist()) == rows

    def _read_all(self) -> None:
        for epoch in range(len(self.epochs)):
            self._read_epoch(epoch)
        for at in range(len(self.cuts)):
            self._read_cut(at)
        for cut in self.gone:
            with pytest.raises((CutExpired, InvalidCut)):
                self.table.query(as_of=cut)

    @invariant()
    def the_next_epoch_and_cut_are_read(self) -> None:
        """Reads the current rows, and at each step another epoch and cut.

        All are read where some are removed, after each collection, and at the end.
        """
        if not hasattr(self, "turns"):
            return
        assert sorted(self.table.query().read_all()["key"].to_pylist()) == sorted(self.rows)
        records = list(self.table.history.epochs())
        assert [record.epoch for record in records] == [*range(self.first, len(self.epochs))]
        turn = next(self.turns)
        self._read_epoch(turn % len(self.epochs))
        if self.cuts:
            self._read_cut(turn % len(self.cuts))

    @rule()
    def check(self) -> None:
        assert self.instance.check(table=self.table.name).problems == ()


@pytest.fixture
def instance(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Instance]:
    # without a margin, new epochs can be forgotten at once
    monkeypatch.setattr(garbage, "MARGIN_SECONDS", 0.0)
    monkeypatch.setattr(garbage, "PIECE_EPOCHS", 2)
    with dm.connect(dsn, tmp_path.as_uri()) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_history_equals_the_naive_model(instance: Instance, layout: str) -> None:
    run_machine(HistoryMachine, instance, layout, EXAMPLES, STEPS)
