"""Transfers: transactions that move an amount from an account of one table to an account of another.

Each reads the two balances that it changes, so none may be lost. Dormouse's accounts are in keyed tables or
in tables that keep every row. delta-rs and PyIceberg have no transactions over several tables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar

import dormouse as dm
from benchmarks.changes.plan import Plan
from benchmarks.changes.sides import FILES
from benchmarks.harness.command import Figures, Tell
from benchmarks.harness.place import own_place
from benchmarks.harness.report import median_ratio, turns
from benchmarks.peers.own import Dormouse
from benchmarks.peers.peer import Refused, Steps, refused_on
from benchmarks.peers.together import Result, Task, run_together, summary
from benchmarks.small.sides import INLINED, Inlining

if TYPE_CHECKING:
    import pyarrow as pa

ACCOUNTS = 1_000
"""The accounts of a table. Each has the same balance at first."""
BALANCE = 1_000_000
CASES = {"1": "1 process", "8": "8 processes", "8_beside": "8 processes, beside compactions"}
_ENDS = ("from", "to")
_CONNECTIONS = {"max_connections": "300"}  # DuckLake opens up to four for each process
_GRACE_SECONDS = 6.0  # a process whose transfer takes longer is killed


def accounts(number: int) -> pa.Table:
    """Returns the accounts of one of the files that are loaded."""
    import pyarrow as pa

    each = ACCOUNTS // FILES
    keys = pa.array(range(number * each, (number + 1) * each), pa.int64())
    return pa.table({"account": keys, "balance": pa.array([BALANCE] * each, pa.int64())})


class Plain(Dormouse):
    """Dormouse with tables that keep every row, and small files in PostgreSQL."""

    name = "dormouse"
    label = "Dormouse"
    properties: ClassVar[dm.TableProperties] = INLINED

    def create(self, table: str, partitions: int = 1) -> None:
        schema = dm.Schema([dm.Field("account", dm.LONG)], [], [dm.Field("balance", dm.LONG)])
        with self.open() as instance:
            for end in _ENDS:
                made = instance.create_table(f"{table}_{end}", schema, properties=self.properties)
                for number in range(FILES):
                    made.ingest(accounts(number), engine="local")

    @contextmanager
    def appender(self, table: str, writer: int) -> Iterator[Steps]:
        chance = Random(writer)
        with self.open() as instance:

            def transfer(amount: int) -> int:
                giver, taker = (chance.randrange(ACCOUNTS) for _ in _ENDS)
                with refused_on(dm.DormouseError), instance.transaction() as changes:
                    less, more = (dm.sql(f"balance {sign} {amount}") for sign in "-+")
                    changes.update(f"{table}_from", {"account": giver}, {"balance": less})
                    changes.update(f"{table}_to", {"account": taker}, {"balance": more})
                return 1

            yield _warmed(transfer)

    @contextmanager
    def compactor(self, table: str, worker: int, partitions: range) -> Iterator[Steps]:
        with self.open() as instance:

            def step(number: int) -> int:
                instance.table(f"{table}_{_ENDS[number % len(_ENDS)]}").compact(engine="local")
                return 1

            yield Steps(step)

    def total(self, name: str) -> int:
        """Returns the sum of the balances of a table."""
        with self.open() as instance:
            return int(instance.sql(f"select sum(balance) from {name}").read_all().column(0)[0].as_py())


class Keyed(Plain):
    """Dormouse with tables that keep the newest row of each account, and small files in PostgreSQL."""

    name = "keyed"
    label = "Dormouse, keyed tables"
    properties = INLINED.model_copy(update={"keep": "newest_row"})


class Lake(Inlining):
    """DuckLake with its defaults. A transaction whose commit is refused counts as failed."""

    def create(self, table: str, partitions: int = 1) -> None:
        with self.attached() as connection:
            for end in _ENDS:
                connection.execute(f"create table {table}_{end} (account bigint, balance bigint)")
                for number in range(FILES):
                    connection.register("loaded", accounts(number))
                    connection.execute(f"insert into {table}_{end} select * from loaded")

    @contextmanager
    def appender(self, table: str, writer: int) -> Iterator[Steps]:
        import duckdb

        chance = Random(writer)
        with self.attached() as connection:

            def transfer(amount: int) -> int:
                giver, taker = (chance.randrange(ACCOUNTS) for _ in _ENDS)
                with refused_on(duckdb.TransactionException), _transaction(connection):
                    for end, sign, account in (("from", "-", giver), ("to", "+", taker)):
                        connection.execute(
                            f"update {table}_{end} set balance = balance {sign} {amount} "
                            f"where account = {account}"
                        )
                return 1

            yield _warmed(transfer)

    @contextmanager
    def compactor(self, table: str, worker: int, partitions: range) -> Iterator[Steps]:
        import duckdb

        with self.attached() as connection:

            def step(number: int) -> int:
                name = f"{table}_{_ENDS[number % len(_ENDS)]}"
                with refused_on(duckdb.Error):  # a conflict in PostgreSQL is no error of its own kind
                    connection.execute(f"call ducklake_flush_inlined_data('lake', table_name => '{name}')")
                    connection.execute(f"call ducklake_rewrite_data_files('lake', '{name}')")
                    connection.execute(f"call ducklake_merge_adjacent_files('lake', '{name}')")
                return 1

            yield Steps(step)

    def total(self, name: str) -> int:
        """Returns the sum of the balances of a table."""
        with self.attached() as connection:
            [(found,)] = connection.execute(f"select sum(balance) from {name}").fetchall()
        return int(found)


def _warmed(transfer: Callable[[int], int]) -> Steps:
    """Returns steps that move 1 each. Moves 0 first, as the first transfer of a process takes long."""
    with suppress(Refused):
        transfer(0)
    return Steps(lambda _: transfer(1))


@contextmanager
def _transaction(connection: Any) -> Iterator[None]:
    """Commits the statements of the block, or rolls them back after an error."""
    import duckdb

    connection.begin()
    try:
        yield
        connection.commit()
    except duckdb.Error:
        with suppress(duckdb.TransactionException):  # a refused commit has ended the transaction
            connection.rollback()
        raise


OURS: tuple[type[Plain], ...] = (Keyed, Plain)
TRANSFERRING: tuple[type[Plain] | type[Lake], ...] = (*OURS, Lake)
Measured = dict[tuple[str, str], list[Result]]
"""The results of each round, by system and case."""


def transfers(plan: Plan, tell: Tell) -> Figures:
    """Measures transfers by 1 and by 8 processes, alone and beside compactions of both tables."""
    results: Measured = defaultdict(list)
    failed = {side.name: 0 for side in TRANSFERRING}
    with own_place(_CONNECTIONS) as place:
        sides = [side(place) for side in TRANSFERRING]
        for side in sides:
            side.set_up()
        for case, what in CASES.items():
            for number, side in turns(sides, plan.transfer_rounds):
                tell(f"{side.label}: transfers by {what}, round {number + 1}")
                result, lost = transferred(side, f"t{case}_{number}", case, plan.transfer_seconds)
                results[side.name, case].append(result)
                failed[side.name] += result.refused + result.unfinished + lost
    return figures(results) | {f"transfers_failed_{name}": count for name, count in failed.items()}


def transferred(side: Plain | Lake, table: str, case: str, seconds: float) -> tuple[Result, int]:
    """Makes transfers; returns the result, and the number of transfers that were lost or made in half."""
    side.create(table)
    writers = int(case[0])
    tasks = [Task(partial(side.appender, table, writer)) for writer in range(writers)]
    if case.endswith("beside"):
        tasks.append(Task(partial(side.compactor, table, 0, range(0))))
    tallies = run_together(tasks, seconds, _GRACE_SECONDS)[:writers]
    given, taken = (side.total(f"{table}_{end}") - ACCOUNTS * BALANCE for end in _ENDS)
    made = sum(step.commits for tally in tallies for step in tally.done)
    # a killed process may have made one transfer more than it counted
    surplus, unfinished = taken - made, sum(tally.unfinished for tally in tallies)
    return summary(tallies, seconds), abs(given + taken) + max(-surplus, surplus - unfinished, 0)


def figures(results: Measured) -> Figures:
    """Returns the rates of all systems, and the smaller rate of our two kinds of tables for each case."""
    found: Figures = {}
    for (name, case), rounds in results.items():
        found[f"transfers_per_s_{case}_{name}"] = round(median(each.per_second for each in rounds), 1)
        for percent in (50, 99):
            taken = median(each.percentile_ms(percent) for each in rounds)
            found[f"transfer_p{percent}_ms_{case}_{name}"] = round(taken, 3)
    for case in CASES:
        rates = {side.name: [each.per_second for each in results[side.name, case]] for side in TRANSFERRING}
        theirs = [
            max(rate, 1 / each.seconds)
            for rate, each in zip(rates[Lake.name], results[Lake.name, case], strict=True)
        ]
        found[f"transfers_per_s_{case}"] = min(found[f"transfers_per_s_{case}_{side.name}"] for side in OURS)
        found[f"transfers_{case}_vs_{Lake.name}"] = round(
            min(median_ratio(rates[side.name], theirs) for side in OURS), 2
        )
    return found
