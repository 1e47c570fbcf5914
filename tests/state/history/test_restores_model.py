"""Restores compared with a naive list, with deletes, late ingests, merges and collections, and read as
changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pyarrow as pa
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from dormouse.errors import CutExpired, DormouseError, NotWhole
from tests.machines import run_machine
from tests.support.api import Instance
from tests.support.state import LAYOUTS
from tests.writing.test_deletes_model import DeletesMachine, Row

EXAMPLES, STEPS = 4, 50


def applied(copy: Iterable[Row], changes: pa.RecordBatchReader) -> Counter[Row]:
    """Returns the number of each row after the changes are applied, in order, to the rows of `copy`.

    Checks that each removed row existed.
    """
    found = Counter(copy)
    for change in changes.read_all().to_pylist():
        kind, row = change.pop("_change"), tuple(change.values())
        assert kind == "insert" or found[row] > 0, f"{row} goes, and is not there"
        found[row] += 1 if kind == "insert" else -1
    return +found


class RestoresMachine(DeletesMachine):
    """A state machine of a table and a consumer. `copy` has the rows of the consumer."""

    @initialize()
    def begin_to_consume(self) -> None:
        self.copy: list[Row] | None = None
        self.copied_at = self.copies = 0

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        if not self.cuts:
            return
        cut, rows = data.draw(st.sampled_from(self.cuts))
        self.cut()
        before = self.cuts.pop()[0]
        try:
            self.table.restore(cut)
        except NotWhole:
            return
        except CutExpired:
            assert self.times[cut.cut_id] < self.erased_at
            return
        self.restored_at = next(self.clock)
        self.cut()
        gone, back = Counter(self.rows) - Counter(rows), Counter(rows) - Counter(self.rows)
        changes = self.table.changes(after=before, till=self.cuts.pop()[0]).read_all().to_pylist()
        changed = Counter((one.pop("_change"), tuple(one.values())) for one in changes)
        expected = {("delete", row): n for row, n in gone.items()}
        assert changed == expected | {("insert", row): n for row, n in back.items()}
        self.rows = list(rows)

    @rule()
    def end_job(self) -> None:
        try:
            super().end_job()
        except DormouseError:  # a restore gave the job up
            self.jobs_given_up = True

    @rule()
    def merge(self) -> None:
        self.table.compact(engine="local")
        leaves = [one.partition_id for one in self.table.partitions.leaves()]
        if len(leaves) > 1:
            try:
                self.table.partitions.merge(leaves)
            except DormouseError:  # a file has rows of other leaves, or belongs to a job
                return

    @rule(acknowledges=st.booleans())
    def consume(self, acknowledges: bool) -> None:
        consumer = self.table.consumer(f"copy {self.copies}")
        if self.copy is None:
            self.copy, self.copied_at = list(self.rows), next(self.clock)
        try:
            found = applied(self.copy, consumer.read())
        except CutExpired:  # the consumer starts again
            assert self.copied_at < self.erased_at
            self.copy, self.copies = None, self.copies + 1
            return
        assert found == Counter(self.rows)
        if acknowledges:
            consumer.acknowledge()
            self.copy, self.copied_at = list(self.rows), next(self.clock)

    @rule()
    @precondition(lambda self: self.cuts)
    def changes_since(self) -> None:
        for cut, rows in self.cuts[-3:]:
            try:
                assert applied(rows, self.table.changes(after=cut)) == Counter(self.rows)
            except CutExpired:
                assert self.times[cut.cut_id] < self.erased_at


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_changes_describe_restores(instance: Instance, layout: str) -> None:
    run_machine(RestoresMachine, instance, layout, EXAMPLES, STEPS)
