"""A stateful model of payloads as a dictionary, while workers that offload days are killed."""

from __future__ import annotations

import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import dormouse as dm
from dormouse.errors import InvalidInput, PayloadDayBusy
from dormouse.payloads import cooling
from tests.cooling import DAY, FOLD_STEPS, STEPS, Model, collect, key, known_objects, leftovers, stored, tools
from tests.databases import Databases
from tests.stored import query
from tests.support.api import Instance

KEYS = [key(f"{kind}{number}") for kind in "ab" for number in range(8)]
GIVEN = st.lists(st.sampled_from(KEYS), min_size=1, max_size=6, unique=True)


class Stops(BaseException):
    """An exception that ends a worker like a kill, without any clean-up."""


class Payloads(RuleBasedStateMachine):
    """The rules of the model. The test sets `databases`."""

    databases: Databases

    @initialize()
    def begin(self) -> None:
        self.lent = self.databases.lent()
        dsn = self.lent.__enter__()
        self.folder = tempfile.TemporaryDirectory(prefix="dormouse-payloads-")
        self.instance: Instance = dm.connect(dsn, Path(self.folder.name).as_uri())
        self.model = Model(self.instance.payloads)
        self.model.put(*KEYS[:10])
        self.count = 0

    def teardown(self) -> None:
        if hasattr(self, "instance"):
            self.instance.close()
            self.lent.__exit__(None, None, None)
            self.folder.cleanup()

    @rule(keys=GIVEN)
    def put(self, keys: list[Any]) -> None:
        self.count += 1
        self.model.put(*keys, content=self.count)

    @rule(keys=GIVEN)
    def delete(self, keys: list[Any]) -> None:
        self.model.delete(*keys)

    @rule(step=st.sampled_from((None, *STEPS)), times=st.integers(1, 3), keys=GIVEN, rows=st.integers(1, 5))
    def offload(self, step: str | None, times: int, keys: list[Any], rows: int) -> None:
        self._work("offload", step, times, keys, rows)

    @rule(
        step=st.sampled_from((None, *FOLD_STEPS)), times=st.integers(1, 3), keys=GIVEN, rows=st.integers(1, 5)
    )
    def fold(self, step: str | None, times: int, keys: list[Any], rows: int) -> None:
        self._work("fold", step, times, keys, rows)

    @rule(step=st.sampled_from((None, "leased", "page", "warmed")))
    def rehydrate(self, step: str | None) -> None:
        self._work("rehydrate", step, 1, [], 3)

    @rule(keys=GIVEN)
    def rehydrate_keys(self, keys: list[Any]) -> None:
        self.instance.payloads.rehydrate([one for one in keys if one in self.model.expected])

    @rule()
    def collect(self) -> None:
        collect(self.instance)

    @rule()
    def verify(self) -> None:
        assert self.instance.payloads.verify(DAY).problems == ()

    def _work(self, work: str, step: str | None, times: int, keys: list[Any], rows: int) -> None:
        """Runs the work, and writes payloads when the work first reaches `step`, at most twice.

        When the work reaches `step` for the last of `times`, it is stopped like a killed one.
        """
        left = Counter({step: times})
        writes = 0

        def stop(reached: str) -> None:
            nonlocal writes
            if reached != step or left[step] <= 0:
                return
            left[step] -= 1
            if reached not in {"pointers", "swapping"} and writes < 2:
                writes += 1
                self.put(keys[: len(keys) // 2] or KEYS[:1])
                self.delete(keys[len(keys) // 2 :])
            if not left[step]:
                raise Stops

        given = tools(self.instance, stop, page_rows_max=rows, uploads=1)
        arguments = (DAY, False) if work == "offload" else (DAY,)
        with suppress(Stops, InvalidInput, PayloadDayBusy):
            getattr(cooling, work)(given, *arguments)

    @invariant()
    def every_payload_is_what_was_committed_last(self) -> None:
        if hasattr(self, "model"):
            self.model.check(*KEYS)

    @invariant()
    def nothing_is_left_behind(self) -> None:
        if not hasattr(self, "model"):
            return
        [(works,)] = query(self.instance._supplier, "select count(*) from payload_day where work is not null")
        if not works:
            assert leftovers(self.instance) == []
            # each object is needed, or recorded for a later deletion
            known = {
                name for (name,) in query(self.instance._supplier, "select object_key from payload_object")
            }
            assert stored(self.instance) <= known
            assert known_objects(self.instance).keys() <= {"live", "block", "dead", "pending"}


@pytest.mark.slow
def test_payloads_match_a_dictionary(databases: Databases) -> None:
    Payloads.databases = databases
    run_state_machine_as_test(
        Payloads, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )
