"""The cost of offloading payloads: its speed, the delay of other requests, and the bytes left in PostgreSQL.

Payloads are put into one day, which is offloaded and folded. More are put into a day while it is offloaded,
and small days are exchanged while readers and writers use them. The comparison moves payloads one by one:
each is compressed into a separate object, and an UPDATE turns its row into a pointer. The page cache is warm.
The store is a folder; reads also use moto's S3 server, which answers from memory, one request at a time.
"""

from __future__ import annotations

import base64
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from itertools import chain, islice
from typing import Any
from urllib.request import Request, urlopen

import psycopg
import zstandard

import dormouse as dm
from benchmarks.harness.command import Benchmark, Figures, Tell, amount
from benchmarks.harness.place import Place, own_place
from benchmarks.harness.processes import remote
from benchmarks.harness.report import percentile, values
from dormouse.api.instance import Instance
from dormouse.objects import open_store
from dormouse.payloads import PayloadStore
from dormouse.payloads.copying import PayloadOptions

FIRST = datetime(2026, 1, 1, tzinfo=UTC)
BATCH = 500
WRITERS = 2
HARD_TO_COMPRESS = 0.1
Payload = tuple[str, str, datetime, str, Any]


@dataclass(frozen=True)
class Plan:
    payloads: int = amount(1_000_000, 10_000, help="payloads of the day that is offloaded alone [1,000,000]")
    during: int = amount(100_000, 5_000, help="payloads of the day that is offloaded during puts [100,000]")
    swaps: int = amount(50, 5, help="exchanges of small days under load [50]")
    reads: int = amount(2_000, 200, help="reads of single cold payloads [2,000]")
    plain: int = amount(2_000, 200, help="payloads that are moved one by one [2,000]")
    only: str = amount(
        "", choices=("day", "load"), help="measure only one day's steps, or only those under load"
    )


def payloads(count: int, day: int, seed: int = 1) -> Iterator[Payload]:
    """Yields payloads of JSON, 0.2 to 20 kB and 2 kB on average. A tenth is hard to compress."""
    chance = random.Random(seed * 1_000 + day)
    at = FIRST + timedelta(days=day)
    words = [f"{word}{number}" for word in ("order", "customer", "node", "step") for number in range(40)]
    for number in range(count):
        size = min(20_000, max(200, int(chance.lognormvariate(7.25, 0.9))))
        if chance.random() < HARD_TO_COMPRESS:
            body: Any = base64.b64encode(chance.randbytes(size * 3 // 4)).decode()
        else:
            body = [
                {
                    "name": chance.choice(words),
                    "value": chance.randrange(10**6),
                    "note": " ".join(chance.choices(words, k=4)),
                }
                for _ in range(size // 90 + 1)
            ]
        content = {"id": number, "trace": f"{chance.getrandbits(64):016x}", "state": "done", "body": body}
        kind = "request" if number % 2 else "result"
        yield f"tenant{number % 20}", f"{chance.getrandbits(64):016x}-{number}", at, kind, content


def measure(plan: Plan, tell: Tell) -> Figures:
    with (
        own_place() as place,
        dm.connect(place.dsn, place.objects) as instance,
        remote(moto) as server,
    ):
        lake = Lake(place, instance, server.call("url"), plan)
        day = (
            ("putting", lake.put),
            ("offloading", lake.offload),
            ("copying to S3", lake.copy),
            ("reading by pointers", lambda: lake.read("cold_read")),
            ("folding", lake.fold),
            ("reading by blocks", lambda: lake.read("block_read")),
            ("one by one", lake.one_by_one),
        )
        load = (
            ("putting during an offload", lake.put_during),
            ("exchanging under load", lake.swaps),
            ("without dictionaries", lake.without_dictionaries),
        )
        found: Figures = {"payloads": plan.payloads}
        for what, step in {"day": day, "load": load}.get(plan.only, (*day, *load)):
            tell(what)
            found |= step()
        return found


class Lake:
    """An instance with days of payloads, which are numbered from FIRST.

    Day 0 is offloaded alone, day 1 during puts, day 2 without dictionaries. The payloads of day 3 are moved
    one by one. The days from 10 on are small, and are exchanged under load.
    """

    def __init__(self, place: Place, instance: Instance, s3_url: str, plan: Plan) -> None:
        self._place = place
        self._instance = instance
        self._store = instance.payloads
        self._plan = plan
        keys = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}
        self._copies = open_store("s3://benchmark/lake", endpoint=s3_url, **keys)
        self._to_read: list[Any] = []

    def put(self) -> Figures:
        seconds = self._fill(0, self._plan.payloads)
        random.Random(7).shuffle(self._to_read)
        del self._to_read[self._plan.reads :]
        return {
            "put_per_s": round(self._plan.payloads / seconds),
            "postgres_bytes_before": self._bytes(0),
        }

    def offload(self) -> Figures:
        began = time.perf_counter()
        [done] = self._store.offload(_day(0)).days
        seconds = time.perf_counter() - began
        self._offload_per_s = done.payloads / seconds
        return {
            "offload_per_s": round(self._offload_per_s),
            "offload_mb_per_s": round(done.bytes_in / seconds / 1e6, 1),
            "puts_per_million": round(1e6 * done.objects / done.payloads, 1),
            "object_bytes_mean": done.bytes_out // done.objects,
            "ratio_with_dictionary": round(done.bytes_in / done.bytes_out, 3),
            "postgres_bytes_after": self._bytes(0),
        }

    def fold(self) -> Figures:
        began = time.perf_counter()
        self._store.fold(_day(0))
        seconds = time.perf_counter() - began
        [(rows,)] = self._ask(f"select count(*) from payload_{_day(0):%Y%m%d}")
        [(blocks,)] = self._ask("select count(*) from payload_object where state = 'block'")
        self._ask("select pg_stat_force_next_flush()")
        [(dead,)] = self._ask(
            "select coalesce(sum(s.n_dead_tup), 0)::bigint from pg_stat_all_tables s "
            "where s.relid in (select c.oid from pg_class c where c.relname = %s "
            "union all select c.reltoastrelid from pg_class c where c.relname = %s)",
            *[f"payload_{_day(0):%Y%m%d}"] * 2,
        )
        return {
            "fold_per_s": round(self._plan.payloads / seconds),
            "rows_per_million_in_blocks": round(1e6 * (rows + blocks) / self._plan.payloads, 1),
            "postgres_bytes_in_blocks": self._bytes(0),
            "dead_tuples_after": dead,
        }

    def copy(self) -> Figures:
        """Copies the objects to S3, to measure reads before the fold."""
        for name, _ in self._instance._objects.list("payloads"):
            self._copies.put(name, self._instance._objects.get(name))
        return {}

    def read(self, what: str) -> Figures:
        """Times reads of single payloads of the first day, in random order, by new stores."""
        found = {}
        for name, objects in ((what, self._instance._objects), (f"{what}_s3", self._copies)):
            store = PayloadStore(self._instance._supplier, objects)
            taken = []
            for key in self._to_read:
                began = time.perf_counter()
                store.get(*key)
                taken.append(1_000 * (time.perf_counter() - began))
            found[f"{name}_ms_p50"] = round(percentile(taken, 50), 3)
            found[f"{name}_ms_p99"] = round(percentile(taken, 99), 3)
        return found

    def put_during(self) -> Figures:
        """Times puts into a day while it is offloaded: each write also goes to the copy of the day."""
        self._fill(1, self._plan.during)
        thread = threading.Thread(target=self._store.offload, args=(_day(1),))
        more = payloads(10**9, 1, seed=2)
        count, began = 0, time.perf_counter()
        thread.start()
        while thread.is_alive():
            self._store.put_many(islice(more, BATCH))
            count += BATCH
        seconds = time.perf_counter() - began
        # the comparison: the same puts by one writer, without an offload
        began = time.perf_counter()
        for _ in range(10):
            self._store.put_many(islice(more, BATCH))
        alone = 10 * BATCH / (time.perf_counter() - began)
        return {
            "put_per_s_during_offload": round(count / seconds),
            "put_during_vs_alone": round(count / seconds / alone, 3),
        }

    def swaps(self) -> Figures:
        """Times the exchanges of small days that threads read and write at the same time."""
        locks = []
        for number in range(self._plan.swaps):
            day = 10 + number
            self._store.put_many(payloads(200, day))
            keys = [one[:4] for one in payloads(20, day)]
            ended = threading.Event()
            load = [
                threading.Thread(target=_until, args=(ended, lambda keys=keys: self._store.get_many(keys))),
                threading.Thread(
                    target=_until, args=(ended, lambda day=day: self._store.put_many(payloads(5, day)))
                ),
            ]
            for thread in load:
                thread.start()
            [done] = self._store.offload(_day(day)).days
            ended.set()
            for thread in load:
                thread.join()
            locks.append(done.swap_lock_ms or 0.0)
        return {
            "swap_lock_ms_p50": round(percentile(locks, 50), 2),
            "swap_lock_ms_p99": round(percentile(locks, 99), 2),
        }

    def without_dictionaries(self) -> Figures:
        self._fill(2, self._plan.during)
        plain = replace(PayloadOptions(), dictionaries=False)
        store = PayloadStore(self._instance._supplier, self._instance._objects, options=plain)
        [done] = store.offload(_day(2)).days
        return {"ratio_without_dictionary": round(done.bytes_in / done.bytes_out, 3)}

    def one_by_one(self) -> Figures:
        """Moves each payload with one object and one UPDATE, in as many threads as an offload has."""
        self._fill(3, self._plan.plain)
        name = f"payload_{_day(3):%Y%m%d}"
        keys = self._ask(f"select kind, tenant, id, inserted_at from {name}")
        objects = self._instance._objects

        def move(mine: list[Any]) -> None:
            by = zstandard.ZstdCompressor(level=3)
            with psycopg.connect(self._place.dsn, autocommit=True) as conn:
                conn.execute("set search_path = dormouse")
                for key in mine:
                    where = "where (kind, tenant, id, inserted_at) = (%s, %s, %s, %s)"
                    [(text,)] = conn.execute(f"select content::text from {name} {where}", key).fetchall()
                    data = by.compress(text.encode())
                    objects.put(object_name := f"runs/plain/{key[2]}", data)
                    conn.execute(
                        f"update {name} set location = 'external', content = null, object_key = %s, "
                        f"byte_start = 0, byte_length = %s, checksum = '' {where}",
                        (object_name, len(data), *key),
                    )

        began = time.perf_counter()
        threads = PayloadOptions().uploads
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(move, [keys[n::threads] for n in range(threads)]))
        per_s = len(keys) / (time.perf_counter() - began)
        return {"row_by_row_per_s": round(per_s), "vs_row_by_row": round(self._offload_per_s / per_s, 1)}

    def _fill(self, day: int, count: int) -> float:
        """Puts payloads into a day with two writers; returns the seconds of the puts alone.

        It remembers keys of day 0, which `read` uses later.
        """
        made, chance = payloads(count, day), random.Random(7)
        share = min(1.0, 2 * self._plan.reads / count)
        seconds = 0.0
        with ThreadPoolExecutor(WRITERS) as pool:
            while some := [list(islice(made, BATCH)) for _ in range(4 * WRITERS)]:
                if not some[0]:
                    return seconds
                self._to_read += [one[:4] for one in chain(*some) if not day and chance.random() < share]
                began = time.perf_counter()
                list(pool.map(self._store.put_many, some))
                seconds += time.perf_counter() - began
        return seconds

    def _bytes(self, day: int) -> int:
        [(size,)] = self._ask("select pg_total_relation_size(%s)", f"dormouse.payload_{_day(day):%Y%m%d}")
        return int(size)

    def _ask(self, statement: str, *values: Any) -> list[Any]:
        with psycopg.connect(self._place.dsn, autocommit=True) as conn:
            conn.execute("set search_path = dormouse")
            return conn.execute(statement, values or None).fetchall()


class Moto:
    """The address of a simulated S3 server with a bucket."""

    def __init__(self, url: str) -> None:
        self._url = url

    def url(self) -> str:
        return self._url


@contextmanager
def moto() -> Iterator[Moto]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    urlopen(Request(f"{url}/benchmark", method="PUT")).close()  # noqa: S310
    yield Moto(url)
    server.stop()


def _until(ended: threading.Event, work: Callable[[], object]) -> None:
    while not ended.is_set():
        work()


def _day(number: int) -> date:
    return (FIRST + timedelta(days=number)).date()


BENCHMARK = Benchmark(
    "payloads",
    __doc__,
    Plan,
    measure,
    [
        "{payloads} payloads",
        values(
            {
                "put_per_s": "put per second",
                "put_per_s_during_offload": "  by one writer, while their day is offloaded",
                "put_during_vs_alone": "  ÷ without an offload",
                "offload_per_s": "offloaded per second",
                "offload_mb_per_s": "  MB of JSON per second",
                "row_by_row_per_s": "  one by one, per second",
                "vs_row_by_row": "  offload ÷ one by one",
                "fold_per_s": "folded per second",
                "puts_per_million": "PUT requests per million payloads",
                "object_bytes_mean": "mean bytes of an object",
                "ratio_with_dictionary": "compression ratio",
                "ratio_without_dictionary": "  without dictionaries",
                "postgres_bytes_before": "bytes in PostgreSQL, hot",
                "postgres_bytes_after": "  offloaded",
                "postgres_bytes_in_blocks": "  folded",
                "rows_per_million_in_blocks": "rows per million payloads, folded",
                "dead_tuples_after": "dead tuples after the fold",
                "swap_lock_ms_p50": "lock on the day in an exchange, ms p50",
                "swap_lock_ms_p99": "  p99",
                "cold_read_ms_p50": "a cold payload by its pointer, ms p50",
                "cold_read_ms_p99": "  p99",
                "cold_read_s3_ms_p50": "  on S3, p50",
                "cold_read_s3_ms_p99": "  on S3, p99",
                "block_read_ms_p50": "a cold payload in a block, ms p50",
                "block_read_ms_p99": "  p99",
                "block_read_s3_ms_p50": "  on S3, p50",
                "block_read_s3_ms_p99": "  on S3, p99",
            }
        ),
    ],
    needed=("moto",),
)

if __name__ == "__main__":
    BENCHMARK.main()
