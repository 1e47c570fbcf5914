"""Processes that hold leases are killed while the database's clock really jumps: nothing is lost.

Only the server's clock is moved, by libfaketime, which CI installs. `tests/state/history/test_clock_jumps.py`
covers each lease and time without it.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.errors import DormouseError, InvalidCut
from dormouse.postgres.lease import restart_leases
from tests import forks
from tests.standard import OF_KEYS
from tests.stored import query, wait_until
from tests.support.api import Instance, Table
from tests.working import Working, until

LIBRARIES = [
    path
    for folder in ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/opt/homebrew/lib")
    for path in Path(folder).glob("**/faketime/libfaketimeMT.so.1")
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not LIBRARIES, reason="libfaketime is missing: apt-get install faketime"),
]
DAY = (datetime.now(UTC) - timedelta(days=1)).date()
HOLDERS = {
    "row lock": """
with i.row_table('r').locks.write(5):
    held()
""",
    "job": """
i.jobs.worker({'work': lambda request, progress: held()}).run()
""",
    "payload day": f"""
import datetime
from dormouse.payloads.days import leased
with leased(i._supplier, datetime.date({DAY.year}, {DAY.month}, {DAY.day}), 'offload', ['open']):
    held()
""",
    "compaction job": """
import dormouse.writing.compaction_job as job
job._write = lambda *_, **__: held()
i.table('t').compact()
""",
}
LEASES = [
    ("row_lock", "leased_until", 30),
    ("payload_day", "leased_until", 60),
    ("job_worker", "lease_until", 90),
    ("compaction_job", "leased_until", 6 * 3_600),
]
HOLDER = """
import sys, time
import dormouse as dm

def held():
    open(sys.argv[2], 'w').close()
    time.sleep(600)

with dm.local(sys.argv[1]) as i:
"""


class Clock:
    """The clock of all servers that are started from now on."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set(0)
        file.chmod(0o666)

    def set(self, days: float) -> None:
        self._file.write_text(f"{days * 86_400:+.0f}")


@pytest.fixture
def lake(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Clock]]:
    parent = Path(tempfile.mkdtemp(prefix="dormouse-clock-"))
    parent.chmod(0o755)
    clock = Clock(parent / "clock")
    monkeypatch.setenv("LD_PRELOAD", str(LIBRARIES[0]))
    monkeypatch.setenv("FAKETIME_TIMESTAMP_FILE", str(parent / "clock"))
    monkeypatch.setenv("FAKETIME_NO_CACHE", "1")
    monkeypatch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
    with dm.local(parent / "lake"):  # its server runs while this instance is open
        monkeypatch.delenv("LD_PRELOAD")
        yield parent / "lake", clock
    shutil.rmtree(parent, ignore_errors=True)


def killed(folder: Path, holder: str) -> bool:
    """Starts a process that takes the lease `holder`, and kills it. Returns whether it got the lease."""
    code = HOLDER + "".join(f"    {line}\n" for line in HOLDERS[holder].splitlines())
    (has_it := folder.with_name("held")).unlink(missing_ok=True)
    process = forks.start(code, folder, has_it)
    until(lambda: has_it.exists() or process.exitcode is not None)
    process.kill()
    process.join()
    return has_it.exists()


def prepared(instance: Instance) -> None:
    properties = dm.TableProperties(compaction_batch_files=2, compaction_strategy="basic", gc_delay_seconds=0)
    table = instance.create_table("t", OF_KEYS, properties=properties)
    for key in range(2):
        table.ingest(pa.table({"key": [-key - 1]}), engine="local")
    instance.create_row_table("r", [dm.Column("n", "INTEGER")])


def skip_leases(instance: Instance) -> None:
    """Ends all leases. None of them may have lasted for longer than usual."""
    for name, column, seconds_max in LEASES:
        left = f"extract(epoch from coalesce(max({column}) - clock_timestamp(), '0'))::float8"
        assert query(instance._supplier, f"select {left} from {name}")[0][0] <= seconds_max, name
        query(
            instance._supplier,
            f"update {name} set {column} = clock_timestamp() where {column} > clock_timestamp()",
        )


def test_leases_of_the_dead_end_after_a_jump(lake: tuple[Path, Clock]) -> None:
    folder, clock = lake
    with dm.local(folder) as instance:
        prepared(instance)
        instance.payloads.put("a", "b", datetime.now(UTC) - timedelta(days=1), "k", 1)
        job_id = instance.jobs.start("work", {})
        clock.set(5)
        for holder in HOLDERS:
            assert killed(folder, holder)
        instance.maintain(once=True)
        clock.set(0)
        table, rows = instance.table("t"), instance.row_table("r")
        table.ingest(pa.table({"key": [7]}), engine="local")
        assert tried(lambda: rows.change([dm.Insert([{"n": 1}])], wait_seconds=0)) is None
        assert tried(lambda: instance.payloads.offload(DAY)) is None
        table.compact()
        skip_leases(instance)
        assert rows.change([dm.Insert([{"n": 1}])], wait_seconds=60).versions
        assert instance.payloads.offload(DAY).payloads == 1
        with Working(instance.jobs.worker({"work": lambda request, progress: "done"}, lease_seconds=5)):
            wait_until(lambda: instance.jobs.status(job_id).has_ended, 300)
        assert instance.jobs.result(job_id) == "done"
        assert table.compact().jobs_run >= 1
        assert table.query(as_of=datetime.now(UTC)).read_all().num_rows >= 1
        consumer = table.consumer("etl")
        table.ingest(pa.table({"key": [8]}), engine="local")
        assert consumer.read().read_all()["key"].to_pylist() == [8]
        assert instance.clock_jumps()
        done = instance.maintain(once=True)
        assert done.failures == []
        due = "select count(*) from instance_round where ended_at > clock_timestamp() + interval '1 minute'"
        assert query(instance._supplier, due) == [(0,)]
        assert instance.check(deep=True).problems == ()


def test_times_include_commits_made_while_the_clock_was_ahead(lake: tuple[Path, Clock]) -> None:
    folder, clock = lake

    with dm.local(folder) as instance:
        table = instance.create_table("t", OF_KEYS)
        table.ingest(pa.table({"key": [0]}), engine="local")
        before = datetime.now(UTC)
        table.history.record_cut()
        clock.set(5)
        table.ingest(pa.table({"key": [1]}), engine="local")
        table.history.record_cut()
        table.ingest(pa.table({"key": [2]}), engine="local")
        clock.set(0)
        table.ingest(pa.table({"key": [3]}), engine="local")
        with pytest.raises(InvalidCut, match="clock was set back"):
            keys_at(table, datetime.now(UTC))
        assert instance.maintain(once=True).failures == []
        back = datetime.now(UTC)
        table.ingest(pa.table({"key": [4]}), engine="local")
        assert keys_at(table, back) == [0, 1, 2, 3]
        assert keys_at(table, before) == [0]
        table.restore(datetime.now(UTC))
        assert keys_at(table, datetime.now(UTC)) == [0, 1, 2, 3, 4]
        clock.set(6)
        with pytest.raises(InvalidCut, match="clock was set back"):
            keys_at(table, back)
        last = table.history.record_cut()
        assert keys_at(table, last) == keys_at(table, last.recorded_at) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(2))
def test_rows_survive_clock_jumps_in_both_directions(lake: tuple[Path, Clock], seed: int) -> None:
    """At the end each acknowledged row exists once, and all operations work."""
    folder, clock = lake
    chance = random.Random(seed)
    written, changed = set[int](), 0
    with dm.local(folder) as instance:
        prepared(instance)
        written |= {-1, -2}
        for number in range(10):
            clock.set(chance.choice([0, 0, 0, 5, 2, -1, 0.01, -0.02]))
            table, rows = instance.table("t"), instance.row_table("r")
            if chance.random() < 0.2:
                killed(folder, chance.choice(["row lock", "compaction job"]))
            for work in chance.sample(["ingest", "edit", "change", "maintain", "compact", "cut", "job"], 3):
                if work == "ingest":
                    table.ingest(pa.table({"key": [number]}), engine="local")
                    written.add(number)
                elif work == "edit":
                    table.update({"key": dm.Range(-2, number)}, {"key": dm.sql("key + 0")})
                elif work == "change":
                    done = tried(lambda rows=rows: rows.change([dm.Insert([{"n": 1}])], wait_seconds=0))
                    changed += done is not None
                elif work == "maintain":
                    instance.maintain(once=True)
                elif work == "compact":
                    tried(table.compact)
                elif work == "cut":
                    tried(table.history.record_cut)
                else:
                    instance.jobs.start("work", {})
        clock.set(0)
        restart_leases(instance._supplier)
        skip_leases(instance)
        assert sorted(table.query().read_all()["key"].to_pylist()) == sorted(written)
        with suppress(InvalidCut):
            assert keys_at(table, datetime.now(UTC)) == sorted(written)
        table.history.record_cut()
        assert keys_at(table, datetime.now(UTC)) == sorted(written)
        rows.change([dm.Insert([{"n": 2}])], wait_seconds=60)
        assert rows.query("select count(*) from r", wait_seconds=60).rows == [(changed + 1,)]
        with Working(instance.jobs.worker({"work": lambda request, progress: "done"})):
            wait_until(lambda: not instance.jobs.list("work", "PROCESSING"), 300)
        assert instance.maintain(once=True).failures == []
        assert instance.check(deep=True).problems == ()


def keys_at(table: Table, when: Any) -> list[int]:
    return sorted(table.query(as_of=when).read_all()["key"].to_pylist())


def tried(work: Any) -> Any:
    """Returns the result of `work`, or None if a lease prevents it."""
    try:
        return work()
    except DormouseError:
        return None
