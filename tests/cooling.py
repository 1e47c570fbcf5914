"""Helpers for tests that offload and fold payloads: steps at which the work is stopped, and a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

from dormouse.errors import PayloadNotFound
from dormouse.payloads import PayloadKey
from dormouse.payloads.copying import PayloadOptions
from dormouse.payloads.exchange import Tools
from tests.stored import query
from tests.support.api import Instance
from tests.support.jobs import PayloadStore
from tests.support.objects import ObjectStore

DAY = date(2026, 3, 5)
AT = datetime(2026, 3, 5, 12, tzinfo=UTC)
SMALL = PayloadOptions(
    object_bytes_min=400,
    object_bytes_max=1_500,
    portion_bytes_max=300,
    page_rows_max=7,
    lease_seconds=30,
    pointer_days=7,
)
STEPS = (
    "leased", "prepared", "page", "upload", "uploaded", "pointers", "committed", "copied", "verified",
    "swapping", "swapped", "finished",
)  # fmt: skip
FOLD_STEPS = (
    "leased", "prepared", "page", "kept", "upload", "uploaded", "pointers", "committed", "copied",
    "activated", "swapping", "swapped", "finished",
)  # fmt: skip
WITHIN = {"pointers", "swapping"}
"""The steps that happen within a transaction, for which other transactions may wait."""


def key(name: str, at: datetime = AT) -> PayloadKey:
    """Returns the key of a payload. The kind is the first letter of the name, so tests can use two kinds in a
    day.
    """
    return PayloadKey("t", name, at, name[0])


def names(count: int) -> list[str]:
    return [f"{'ab'[n % 2]}{n:04d}" for n in range(count)]


class Model:
    """A payload store, and the payloads that it must have."""

    def __init__(self, payloads: PayloadStore) -> None:
        self.payloads = payloads
        self.expected: dict[PayloadKey, Any] = {}
        self._lock = threading.Lock()

    @staticmethod
    def filled(instance: Instance, count: int) -> Model:
        made = Model(instance.payloads)
        made.put(*map(key, names(count)))
        return made

    def put(self, *keys: PayloadKey, content: Any = None) -> None:
        given = {one: {"of": str(one), "n": content, "text": "some text " * 5} for one in keys}
        self.payloads.put_many([(*one, value) for one, value in given.items()])
        with self._lock:
            self.expected |= given

    def delete(self, *keys: PayloadKey) -> None:
        self.payloads.delete_many(keys)
        with self._lock:
            for one in keys:
                self.expected.pop(one, None)

    def check(self, *others: PayloadKey) -> None:
        """Asserts that all expected payloads are in the store, and that none of the others are."""
        wanted = [*self.expected, *others]
        found = self.payloads.get_many(wanted)
        wrong = {str(one): found[one] for one in self.expected if found[one] != self.expected[one]}
        assert wrong == {}
        there = [one for one in others if one not in self.expected]
        assert [one for one in there if not isinstance(found[one], PayloadNotFound)] == []


def tools(
    instance: Instance,
    step: Callable[[str], object] = lambda name: None,
    *,
    objects: ObjectStore | None = None,
    is_over: Callable[[], bool] = lambda: False,
    **options: Any,
) -> Tools:
    made = replace(SMALL, **options)
    store = instance._objects if objects is None else objects
    return Tools(instance._supplier, store, made, step=step, is_over=is_over)


def leftovers(instance: Instance) -> list[str]:
    """Returns the tables, triggers, functions and constraints that an exchange has left behind."""
    return [
        name
        for (name,) in query(
            instance._supplier,
            """
            select relname from pg_class
            where relnamespace = 'dormouse'::regnamespace and relname ~ '^payload_\\d+_(copy|written|old)'
            union all select tgname from pg_trigger where tgname like 'payload_mirror%%'
            union all select proname from pg_proc where proname ~ '^payload_.*_mirror$'
            union all select conname from pg_constraint where conname like '%%_bounds'
            """,
        )
    ]


def locations(instance: Instance) -> dict[str, int]:
    rows = query(instance._supplier, "select location, count(*) from payload group by location")
    return dict(rows)


def known_objects(instance: Instance) -> dict[str, int]:
    rows = query(instance._supplier, "select state, count(*) from payload_object group by state")
    return dict(rows)


def stored(instance: Instance) -> set[str]:
    return {name for name, _ in instance._objects.list("payloads")}


def collect(instance: Instance) -> None:
    """Collects payload objects as the rounds of several days do."""
    for _ in range(3):
        instance.payloads.collect()
        query(instance._supplier, "update payload_object set changed_at = changed_at - interval '2 days'")
    instance.payloads.collect()


def days_of(first: date, count: int) -> Iterable[date]:
    return (first + timedelta(days=n) for n in range(count))
