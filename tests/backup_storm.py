"""A storm of backups that are killed or frozen at random, while the instance is written to.

Each backup must be complete, or not exist. It has all changes of a transaction, or none.

python -m tests.backup_storm FOLDER --seconds 3600
"""

from __future__ import annotations

import argparse
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

import dormouse as dm
from dormouse.api.instance import Instance
from tests import forks
from tests.storming import IDLE_MS, freeze

SCHEMA = dm.Schema(row_keys=[dm.Field("key", dm.LONG)])
PROMPT = dm.TableProperties(gc_delay_seconds=0, compaction_strategy="basic", compaction_batch_files=3)
COUNTS = dm.Schema(row_keys=[dm.Field("key", dm.LONG)], values=[dm.Field("n", dm.LONG)])
WRITE_SECONDS = 0.1
"""The pause between transactions: each backup is restored and checked, which takes as long as it has rows."""
KEPT = 4
"""The number of backups that are kept; an operator removes the oldest ones."""

BACKUP = """
import sys
import dormouse as dm
from tests.storming import hurry
hurry()
with dm.local(sys.argv[1]) as instance:
    instance.backup(sys.argv[2], since=sys.argv[3] or None)
"""


@contextmanager
def written(instance: Instance) -> Iterator[list[int]]:
    """Adds, counts, compacts and collects rows in the background. Yields the acknowledged rows, in order.

    Each transaction adds a row, and adds 1 to the number of rows in another table.
    """
    table = instance.create_table("t", SCHEMA, properties=PROMPT)
    counts = instance.create_table("counts", COUNTS, properties=PROMPT)
    counts.ingest(pa.table({"key": [0], "n": [0]}))
    acknowledged: list[int] = []
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            with instance.transaction() as transaction:
                transaction.update("counts", {"key": 0}, {"n": dm.sql("n + 1")})
                transaction.ingest("t", pa.table({"key": [len(acknowledged)]}))
            acknowledged.append(len(acknowledged))
            ended.wait(WRITE_SECONDS)
            if len(acknowledged) % 5 == 0:
                for one in (table, counts):
                    one.compact()
                    one.collect_garbage()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield acknowledged
    finally:
        ended.set()
        thread.join()


def storm(folder: Path, seconds: float, seed: int, least: int = 0) -> Counter[str]:
    """Returns how many backups were killed, frozen and complete.

    Runs for `seconds`, or longer until both killed and complete backups number at least `least`.
    """
    dice, ended = random.Random(seed), Counter[str]()
    place, deadline = folder / "backups", time.monotonic() + seconds
    known: dict[str, int] = {}
    with dm.local(folder / "lake") as instance, written(instance) as acknowledged:
        usual = 2.0
        while time.monotonic() < deadline or min(ended["killed"], ended["whole"]) < least:
            since = "last" if known and dice.random() < 0.7 else ""
            began = time.monotonic()
            before = len(acknowledged)
            process = forks.start(BACKUP, folder / "lake", place, since)
            process.join(dice.uniform(0.05, 2) * usual)
            if process.exitcode is not None:
                usual = time.monotonic() - began
            elif dice.random() < 0.3:
                freeze(process, 2 * IDLE_MS / 1_000)
                ended["frozen"] += 1
                process.join(dice.uniform(0, 0.5) * usual)
            process.kill()
            process.join()
            ended["killed" if process.exitcode else "whole"] += 1
            if ended["killed"] > 10 * (1 + ended["whole"]):
                usual *= 2  # the machine is busy
            found = {one.name for one in dm.backups(place)}
            new = found - known.keys()
            assert known.keys() <= found, "a backup is missing"
            assert process.exitcode or len(new) == 1
            for name in new:
                known[name] = before
                check(folder, name, before)
            if len(known) > KEPT:
                earliest = min(known)
                del known[earliest]
                shutil.rmtree(place / earliest)
    return ended


def check(folder: Path, name: str, acknowledged: int) -> None:
    """Restores a backup. Asserts that it has the rows that were acknowledged before it began."""
    into = folder / f"restored-{name}"
    dm.restore(folder / "backups", into, name)
    with dm.local(into) as instance:
        found = sorted(instance.table("t").query().read_all()["key"].to_pylist())
        assert found == list(range(len(found))), "rows are lost or doubled"
        assert len(found) >= acknowledged
        counts = instance.table("counts").query().read_all().to_pylist()
        assert counts == [{"key": 0, "n": len(found)}], "half of a transaction"
        assert not instance.check(deep=True).problems
    shutil.rmtree(into)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    print(dict(storm(given.folder, given.seconds, given.seed)))


if __name__ == "__main__":
    main()
