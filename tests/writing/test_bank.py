"""Transfers between accounts in two tables by processes that are killed, while the tables are maintained.

The sum of all balances is the same in each read, and each transfer is made once.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from dormouse.errors import CutExpired
from tests import bank
from tests.small_tables import clock
from tests.storming import STORM_SECONDS, Workers
from tests.support.api import connect
from tests.support.state import LAYOUTS


def storm(dsn: str, folder: Path, layout: str, transferring: int, least: int, **properties: Any) -> None:
    """Runs the bank for STORM_SECONDS, or longer until `least` transfers were acknowledged."""
    objects = (folder / "objects").as_uri()
    with connect(dsn, objects) as instance:
        bank.open_bank(instance, layout, **properties)
        roles = [*(f"transfer {n}" for n in range(transferring)), "compact", "split"]
        workers = Workers(bank.PROGRAM, roles, dsn, objects, folder=folder)
        moments: list[Any] = []

        def turn(number: int) -> None:
            before = bank.acknowledged(folder)
            balances, ledger = bank.read(instance)
            bank.check(balances, ledger)
            assert before <= ledger.keys() <= bank.begun(folder)
            moments.append((clock(instance), ledger.keys()))
            moment, known = random.choice(moments)
            try:
                balances, ledger = bank.read(instance, moment)
            except CutExpired:  # files are collected after a second
                return
            bank.check(balances, ledger)
            assert known <= ledger.keys()

        enough = lambda: len(bank.acknowledged(folder)) >= least  # noqa: E731
        workers.storm(turn, STORM_SECONDS, enough, random.Random(59))
        balances, ledger = bank.read(instance)
        bank.check(balances, ledger)
        acknowledged = bank.acknowledged(folder)
        assert acknowledged <= ledger.keys()
        # each process repeated what it had begun when it was killed, so only its last transfer may be open
        assert len(bank.begun(folder) - acknowledged) <= transferring
        for one in sorted(bank.begun(folder)):
            bank.make(instance, bank.transfer_of(*map(int, one.split("-"))))
        balances, ledger = bank.read(instance)
        bank.check(balances, ledger)
        assert ledger.keys() == bank.begun(folder)
        for name in (bank.SAVINGS, bank.CHECKING, bank.LEDGER):
            while instance.table(name).compact(engine="local").jobs_run:
                assert bank.read(instance) == (balances, ledger)
            instance.table(name).collect_garbage()
        assert bank.read(instance) == (balances, ledger)
        assert instance.check(deep=True).problems == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "inline_bytes_max", "gc_delay_seconds"),
    [*zip(LAYOUTS, (65_536, 0, 65_536), (1, 0, 0), strict=True)],
)
def test_no_money_is_lost_in_a_storm_of_eight_processes(
    dsn: str, tmp_path: Path, layout: str, inline_bytes_max: int, gc_delay_seconds: int
) -> None:
    given = {"inline_bytes_max": inline_bytes_max, "gc_delay_seconds": gc_delay_seconds}
    storm(dsn, tmp_path, layout, 8, least=40, **given)
