"""Changes and consumers, compared with a naive model: a list of all ingested rows in order."""

from __future__ import annotations

import itertools
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import dormouse as dm
from dormouse.errors import ConsumerOvertaken, InvalidInput
from dormouse.reading.changes import Consumer
from tests.machines import run_machine
from tests.support.api import Instance
from tests.support.model import Cut
from tests.support.state import LAYOUTS, record_cut

KEYS = st.lists(st.integers(0, 40), min_size=1, max_size=6)
NAMES = st.sampled_from(["one", "two"])
EXAMPLES, STEPS = 9, 40


class ChangesMachine(RuleBasedStateMachine):
    """A state machine of a table with cuts and consumers.

    Its model is `ingested`, a list of all rows in order. A moment is the length of this list at that time.
    """

    instance: Instance
    layout: str

    @initialize(writing=st.sampled_from(["one_file_per_leaf", "one_reference_per_leaf"]))
    def begin(self, writing: str) -> None:
        properties: dict[str, Any] = {
            "compaction_strategy": "basic",
            "compaction_batch_files": 2,
            "split_threshold_rows": 6,
            "split_min_rows": 2,
            "ingest_file_writing": writing,
            "gc_delay_seconds": 0,
        }
        schema = dm.Schema([dm.Field("key", dm.LONG)], values=[dm.Field("number", dm.LONG)])
        self.table = self.instance.create_table(
            f"t{next(_numbers)}", schema, layout=self.layout, properties=dm.TableProperties(**properties)
        )
        self.ingested: list[tuple[int, int]] = []
        self.cuts: list[tuple[Cut, int]] = []
        self.stands: dict[str, int] = {}
        self.versions: dict[str, int] = {}
        self.readers: list[tuple[str, Consumer, int, int | None]] = []
        self.named = itertools.count()

    def teardown(self) -> None:
        if hasattr(self, "table"):
            self.instance.drop_table(self.table.name)

    @rule(keys=KEYS)
    def ingest(self, keys: list[int]) -> None:
        rows = [(key, len(self.ingested) + n) for n, key in enumerate(keys)]
        self.ingested += rows
        self.table.ingest(pa.table({"key": keys, "number": [n for _, n in rows]}), engine="local")

    @rule()
    def compact(self) -> None:
        self.table.compact(engine="local")

    @rule()
    def split(self) -> None:
        self.table.split()

    @rule()
    def collect(self) -> None:
        self.table.collect_garbage()

    @rule()
    def cut(self) -> None:
        # a name keeps the cut
        cut = record_cut(self.table.context, f"cut{next(self.named)}")
        self.cuts.append((cut, len(self.ingested)))

    @rule(data=st.data())
    def changes(self, data: st.DataObject) -> None:
        if not self.cuts:
            return
        places = st.integers(0, len(self.cuts) - 1)
        first, last = sorted(data.draw(st.tuples(places, places)))
        (after, start), (till, end) = self.cuts[first], self.cuts[last]
        assert _rows(self.table.changes(after=after, till=till)) == sorted(self.ingested[start:end])
        assert _rows(self.table.changes(after=after)) == sorted(self.ingested[start:])
        assert self.table.history.size_between(after, till).row_count == end - start
        assert sum(file.row_count for file in self.table.history.changed_files(after, till)) == end - start

    @rule(name=NAMES)
    def open(self, name: str) -> None:
        consumer = self.table.consumer(name)
        self.stands.setdefault(name, len(self.ingested))
        self.versions.setdefault(name, 0)
        self.readers.append((name, consumer, -1, None))

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        if not self.readers:
            return
        number = data.draw(st.integers(0, len(self.readers) - 1))
        name, consumer, _, _ = self.readers[number]
        assert _rows(consumer.read()) == sorted(self.ingested[self.stands[name] :])
        self.readers[number] = (name, consumer, self.versions[name], len(self.ingested))

    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        if not self.readers:
            return
        number = data.draw(st.integers(0, len(self.readers) - 1))
        name, consumer, version, till = self.readers[number]
        if till is None:
            with pytest.raises(InvalidInput, match="nothing was read"):
                consumer.acknowledge()
        elif version != self.versions[name]:
            with pytest.raises(ConsumerOvertaken):
                consumer.acknowledge()
        else:
            consumer.acknowledge()
            self.stands[name], self.versions[name] = till, version + 1
            self.readers[number] = (name, consumer, -1, None)

    @rule()
    def look(self) -> None:
        behind = {one.name: one.rows_behind for one in self.table.consumers()}
        assert behind == {name: len(self.ingested) - place for name, place in self.stands.items()}


_numbers = itertools.count()


def _rows(reader: pa.RecordBatchReader) -> list[tuple[int, int]]:
    found = reader.read_all()
    return sorted(zip(found["key"].to_pylist(), found["number"].to_pylist(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_change_is_missed_and_none_comes_twice(instance: Instance, layout: str) -> None:
    run_machine(ChangesMachine, instance, layout, EXAMPLES, STEPS)
