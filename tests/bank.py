"""A bank with accounts in two tables, and processes that transfer money between them in transactions.

`savings` keeps the newest row of each account, `checking` keeps every row. Each transfer takes an amount from
an account of one table, adds it to an account of the other one, and notes itself in `ledger`. A process notes
in its log the transfers that it begins, and those that were acknowledged. A process that takes the place of a
killed one repeats the transfer that was begun last, with its id.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

import dormouse as dm
from dormouse.errors import (
    EditConflict,
    FileReferenceAssignedToJob,
    InvalidRange,
    ObjectNotFound,
    PartitionError,
    QueryOvertaken,
)
from tests.storming import LOST, hurry
from tests.support.api import Instance, Table, connect

ACCOUNTS, START = 24, 1_000
SAVINGS, CHECKING, LEDGER = "savings", "checking", "ledger"
ACCOUNT = dm.Schema([dm.Field("account", dm.LONG)], values=[dm.Field("balance", dm.LONG)])
TRANSFERS = dm.Schema(
    [dm.Field("id", dm.STRING)],
    values=[dm.Field("debtor", dm.STRING), dm.Field("creditor", dm.STRING), dm.Field("amount", dm.LONG)],
)
SMALL = {
    "compaction_strategy": "basic",
    "compaction_batch_files": 3,
    "split_threshold_rows": 16,
    "split_min_rows": 4,
    "merge_threshold_rows": 8,
    "gc_delay_seconds": 1,
}
READS_MAX = 100
PROGRAM = "from tests.bank import main; main()"


@dataclass(frozen=True)
class Transfer:
    """A transfer from an account of one table to an account of the other one, each as (table, account)."""

    id: str
    debtor: tuple[str, int]
    creditor: tuple[str, int]
    amount: int


def transfer_of(worker: int, number: int) -> Transfer:
    dice = random.Random(f"{worker} {number}")
    tables = dice.sample([SAVINGS, CHECKING], 2)
    debtor, creditor = ((table, dice.randrange(ACCOUNTS)) for table in tables)
    return Transfer(f"{worker}-{number}", debtor, creditor, dice.randrange(1, 9))


def open_bank(instance: Instance, layout: str, **properties: Any) -> None:
    """Creates the tables, with the same balance in each account."""
    accounts = pa.table({"account": range(ACCOUNTS), "balance": [START] * ACCOUNTS})
    for name, keep in {SAVINGS: "newest_row", CHECKING: "every_row"}.items():
        given = dm.TableProperties(**{**SMALL, "keep": keep, **properties})
        instance.create_table(name, ACCOUNT, layout=layout, properties=given).ingest(accounts)
    given = dm.TableProperties(**{**SMALL, **properties})
    instance.create_table(LEDGER, TRANSFERS, layout=layout, properties=given)


def make(instance: Instance, transfer: Transfer) -> None:
    """Makes a transfer, once, however often it is called. Raises `EditConflict` if it was not made."""
    (debtor, payer), (creditor, payee) = transfer.debtor, transfer.creditor
    with instance.transaction(transfer.id) as transaction:
        # the condition holds; it makes the balance a part of what the update reads
        condition = dm.sql(f"account = {payer} and balance >= {transfer.amount} - 1000000")
        transaction.update(debtor, condition, {"balance": dm.sql(f"balance - {transfer.amount}")})
        if transfer.amount % 2:
            transaction.update(
                creditor, {"account": payee}, {"balance": dm.sql(f"balance + {transfer.amount}")}
            )
        else:
            source = {"account": [payee], "amount": [transfer.amount]}
            when = [dm.WhenMatched(update={"balance": dm.sql("t.balance + s.amount")})]
            transaction.merge_into(creditor, source, ["account"], when)
        row = {"debtor": f"{debtor} {payer}", "creditor": f"{creditor} {payee}", "amount": transfer.amount}
        transaction.ingest(LEDGER, [{"id": transfer.id, **row}])


# The processes.


def main() -> None:
    """Runs as a process of the bank, with the DSN, the store, the folder and the role as arguments."""
    hurry()
    dsn, objects, folder, role = sys.argv[1:5]
    with connect(dsn, objects) as instance:
        work = _works(instance, Path(folder), *role.split())
        Path(folder, f"begun {os.getpid()}").touch()
        while not Path(folder, "stop").exists():
            next(work)


def _works(instance: Instance, folder: Path, kind: str, worker: str = "0") -> Iterator[None]:
    if kind == "transfer":
        return _transfers(instance, folder, int(worker))
    return _upkeep(instance, kind)


def _transfers(instance: Instance, folder: Path, worker: int) -> Iterator[None]:
    path = folder / f"log {worker}"
    notes = _notes(path)
    number = max((note["number"] for note in notes), default=-1)
    if number < 0 or any(note["number"] == number and note["acknowledged"] for note in notes):
        number += 1
    with path.open("a") as log:
        while True:
            _note(log, number, acknowledged=False)
            while True:
                with suppress(EditConflict, ObjectNotFound, QueryOvertaken, *LOST):
                    make(instance, transfer_of(worker, number))
                    break
                yield
            _note(log, number, acknowledged=True)
            number += 1
            yield


def _note(log: Any, number: int, *, acknowledged: bool) -> None:
    # it begins with a new line: a line before it may have been cut off
    log.write("\n" + json.dumps({"number": number, "acknowledged": acknowledged}) + "\n")
    log.flush()


def _notes(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):
            found.append(json.loads(line))
    return [note for note in found if isinstance(note, dict) and "acknowledged" in note]


def _upkeep(instance: Instance, kind: str) -> Iterator[None]:
    tables = [instance.table(name) for name in (SAVINGS, CHECKING, LEDGER)]
    while True:
        for table in tables:
            # happens because files are collected without a delay: nothing was done
            with suppress(ObjectNotFound, QueryOvertaken, *LOST):
                _maintain(table, kind)
            yield


def _maintain(table: Table, kind: str) -> None:
    if kind == "compact":
        table.compact(engine="local")
        table.collect_garbage()
    else:
        table.split()
        table.merge()
        with suppress(PartitionError, InvalidRange, FileReferenceAssignedToJob):
            if table.name != LEDGER:
                leaf = random.choice(table.partitions.leaves()).partition_id
                table.partitions.split(leaf, random.randrange(1, ACCOUNTS))


# What must hold.


def acknowledged(folder: Path) -> set[str]:
    """Returns the ids of the transfers that were acknowledged."""
    return {
        f"{path.name.split()[1]}-{note['number']}"
        for path in folder.glob("log *")
        for note in _notes(path)
        if note["acknowledged"]
    }


def begun(folder: Path) -> set[str]:
    return {
        f"{path.name.split()[1]}-{note['number']}" for path in folder.glob("log *") for note in _notes(path)
    }


def read(instance: Instance, as_of: Any = None) -> tuple[dict[tuple[str, int], int], Counter[str]]:
    """Returns the balances and the ids of the ledger at one moment, by one statement."""
    text = (
        f"select '{SAVINGS}' as t, account, balance, '' as id from {SAVINGS} "
        f"union all select '{CHECKING}', account, balance, '' from {CHECKING} "
        f"union all select '{LEDGER}', 0, 0, id from {LEDGER}"
    )
    for left in reversed(range(READS_MAX)):
        try:
            rows = instance.sql(text, as_of=as_of).read_all().to_pylist()
            break
        except (ObjectNotFound, QueryOvertaken):  # happens because files are collected without a delay
            if not left:
                raise
    accounts = [row for row in rows if row["t"] != LEDGER]
    balances = {(row["t"], row["account"]): row["balance"] for row in accounts}
    assert len(balances) == len(accounts) == 2 * ACCOUNTS, "an account is there twice, or not at all"
    return balances, Counter(row["id"] for row in rows if row["t"] == LEDGER)


def check(balances: dict[tuple[str, int], int], ledger: Counter[str]) -> None:
    """Asserts that the balances of a moment are those that the transfers in its ledger give."""
    assert sum(balances.values()) == 2 * ACCOUNTS * START
    assert not [one for one, times in ledger.items() if times > 1], "a transfer is there twice"
    expected = {(table, n): START for table in (SAVINGS, CHECKING) for n in range(ACCOUNTS)}
    for one in ledger:
        transfer = transfer_of(*map(int, one.split("-")))
        expected[transfer.debtor] -= transfer.amount
        expected[transfer.creditor] += transfer.amount
    assert balances == expected
