"""Maintenance, which one process at a time may do, even if the session that has its lock is lost."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

import dormouse as dm
from dormouse.durability.maintaining import InstanceRounds, Maintenance
from dormouse.errors import InstanceLocked, MaintenanceTakenOver
from tests.standard import OF_KEYS
from tests.stored import query, wait_until
from tests.support.api import Instance, Table

LOCKED = (
    "from pg_locks where locktype = 'advisory' and (classid::bigint << 32) + objid::bigint = 7236154098213003"
)


def end_session(instance: Instance) -> None:
    """Ends the session that has the maintenance lock."""
    query(instance._supplier, f"select pg_terminate_backend(pid, 5000) {LOCKED}")


@pytest.mark.slow
def test_a_maintainer_that_loses_its_session_locks_again(tmp_path: Path) -> None:
    reported: list[str] = []
    stop, done = threading.Event(), list[Maintenance]()
    with dm.local(tmp_path / "lake") as instance, dm.local(tmp_path / "lake") as other:
        thread = threading.Thread(
            target=lambda: done.append(instance.maintain(stop=stop, cycle_seconds=0.05, tell=reported.append))
        )
        thread.start()
        try:
            wait_until(lambda: query(other._supplier, f"select pid {LOCKED}"))
            end_session(other)
            wait_until(lambda: query(other._supplier, f"select pid {LOCKED}"))
            with pytest.raises(InstanceLocked, match="another process already maintains this instance"):
                other.maintain(once=True)
        finally:
            stop.set()
            thread.join(30)
        assert done[0].cycles, "the maintenance reports its cycles"


@pytest.mark.slow
def test_a_maintainer_ends_when_another_has_taken_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dm.local(tmp_path / "lake") as instance, dm.local(tmp_path / "lake") as other, ExitStack() as taken:
        instance.create_table("t", OF_KEYS)
        tables, looks = instance.tables, iter(range(1))

        def listed() -> list[Table]:
            if next(looks, None) is None:
                end_session(other)
                taken.enter_context(InstanceRounds(other._supplier).alone())
            return tables()

        monkeypatch.setattr(instance, "tables", listed)
        with pytest.raises(
            MaintenanceTakenOver, match="another process maintains this instance now"
        ) as raised:
            instance.maintain(cycle_seconds=0.01)
        assert raised.value.report.cycles == 1


@pytest.mark.slow
def test_a_lost_session_still_open_on_the_server_is_not_another_maintainer(tmp_path: Path) -> None:
    with dm.local(tmp_path / "lake") as instance:
        with InstanceRounds(instance._supplier).alone() as alone:
            lost = alone._conn
            assert lost is not None
            alone._conn = None  # as after a network error that only the client has noticed
            alone.check()
            alone.check()
        with pytest.raises(psycopg.OperationalError):
            lost.execute("select")
