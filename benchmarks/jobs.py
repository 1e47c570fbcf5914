"""The latency and rate of jobs that do nothing, compared with procrastinate on the same PostgreSQL.

- Idle: the time from adding a job until a sleeping worker has claimed it, by the database's clock.
- Busy: the jobs per second of a worker that runs several at once. All jobs are added before it begins.

Dormouse and procrastinate alternate, both in this process and with durable commits. Dormouse's jobs have a
request and a result, and those of procrastinate have arguments.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from typing import Any

import psycopg

import dormouse as dm
from benchmarks.harness.command import Benchmark, Figures, Tell, amount
from benchmarks.harness.place import own_place
from benchmarks.harness.report import Grid, median_ratio, percentile
from dormouse.api.instance import Instance
from dormouse.jobs import JobStore

AT_ONCE = (1, 8, 64)
REST_SECONDS = 0.05
"""The pause before each job of the idle measurement, so that the worker sleeps."""

SETTLE_SECONDS = 1.0
WAIT_SECONDS_MAX = 60.0
_OURS = (
    "select extract(epoch from claimed_at - started_at)::float8 from ended_job where owner = 'idle' "
    "order by started_at"
)
_THEIRS = """
select extract(epoch from s.at - d.at)::float8
from procrastinate_events d
join procrastinate_events s on s.job_id = d.job_id and s.type = 'started'
join procrastinate_jobs j on j.id = d.job_id
where d.type = 'deferred' and j.queue_name = 'idle'
order by d.at
"""


@dataclass(frozen=True)
class Plan:
    jobs: int = amount(4_000, 400, help="jobs of a round, for each number at once [4,000]")
    idle: int = amount(300, 60, help="jobs for an idle worker, one by one [300]")
    rounds: int = amount(5, 2, help="counted rounds, after one that warms up [5]")


def measure(plan: Plan, tell: Tell) -> Figures:
    """Measures idle and then busy workers, of Dormouse and of procrastinate."""
    logging.getLogger("procrastinate").setLevel(logging.ERROR)
    with own_place() as place:
        theirs = Procrastinate(place.create_database("procrastinate"))
        with dm.connect(place.dsn, place.objects) as instance:
            ours = Dormouse(instance, place.dsn)
            found: Figures = {"jobs": plan.jobs, "rounds": plan.rounds, "idle": plan.idle}
            tell("idle workers")
            for name, side in (("claim", ours), ("procrastinate_claim", theirs)):
                seconds = side.idle(plan.idle)
                found[f"{name}_ms_p50"] = 1_000 * percentile(seconds, 50)
                found[f"{name}_ms_p99"] = 1_000 * percentile(seconds, 99)
            for at_once in AT_ONCE:
                tell(f"{at_once} at once")
                found |= _busy(ours, theirs, at_once, plan)
    found["jobs_per_s"] = found[f"jobs_per_s_{AT_ONCE[-1]}"]
    found["vs_procrastinate"] = min(found[f"vs_procrastinate_{at_once}"] for at_once in AT_ONCE)
    return found


def _busy(ours: Dormouse, theirs: Procrastinate, at_once: int, plan: Plan) -> Figures:
    # jobs one by one take longer, so there are fewer
    jobs = plan.jobs if at_once > 1 else max(plan.jobs // 4, 1)
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for number in range(1 + plan.rounds):
        for name, side in (("ours", ours), ("theirs", theirs)):
            taken = side.busy(jobs, at_once)
            if number:
                seconds[name].append(taken)
    return {
        f"jobs_per_s_{at_once}": jobs / median(seconds["ours"]),
        f"procrastinate_per_s_{at_once}": jobs / median(seconds["theirs"]),
        f"vs_procrastinate_{at_once}": round(median_ratio(seconds["theirs"], seconds["ours"]), 3),
    }


class Dormouse:
    """The jobs of a Dormouse instance."""

    def __init__(self, instance: Instance, dsn: str) -> None:
        self._jobs: JobStore = instance.jobs
        self._dsn = dsn

    def idle(self, count: int) -> list[float]:
        worker = self._jobs.worker({"idle": lambda request, progress: None}, threads=1)
        thread = threading.Thread(target=worker.run)
        thread.start()
        time.sleep(SETTLE_SECONDS)
        for number in range(count):
            self._jobs.start("idle", number, owner="idle")
            time.sleep(REST_SECONDS)
        _until(lambda: worker.report.complete == count)
        worker.stop()
        thread.join()
        return _column(self._dsn, _OURS)

    def busy(self, count: int, at_once: int) -> float:
        for number in range(count):
            self._jobs.start("work", number)
        worker = self._jobs.worker({"work": lambda request, progress: None}, threads=at_once)
        began = time.monotonic()
        done = worker.run(drain=True).complete
        seconds = time.monotonic() - began
        if done != count:
            raise RuntimeError(f"{done} of {count} jobs are complete")
        return seconds


class Procrastinate:
    """The same jobs by procrastinate."""

    def __init__(self, dsn: str) -> None:
        import procrastinate

        self._dsn = dsn
        app = procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo=dsn))
        with app.open():
            app.schema_manager.apply_schema()

    def idle(self, count: int) -> list[float]:
        async def run() -> None:
            app, task = self._app(1)
            async with app.open_async():
                working = asyncio.create_task(self._work(app, 1, queue="idle", wait=True))
                await asyncio.sleep(SETTLE_SECONDS)
                for number in range(count):
                    await task.configure(queue="idle").defer_async(number=number)
                    await asyncio.sleep(REST_SECONDS)
                await asyncio.sleep(SETTLE_SECONDS)
                working.cancel()
                await asyncio.wait([working])

        asyncio.run(run())
        return _column(self._dsn, _THEIRS)

    def busy(self, count: int, at_once: int) -> float:
        async def run() -> float:
            app, task = self._app(at_once)
            async with app.open_async():
                await task.configure(queue="work").batch_defer_async(*[{"number": n} for n in range(count)])
                began = time.monotonic()
                await self._work(app, at_once, queue="work", wait=False)
                return time.monotonic() - began

        seconds = asyncio.run(run())
        sql = "select count(*)::float8 from procrastinate_jobs where status <> 'succeeded'"
        if left := _column(self._dsn, sql)[0]:
            raise RuntimeError(f"{left:.0f} jobs of procrastinate did not succeed")
        return seconds

    async def _work(self, app: Any, at_once: int, *, queue: str, wait: bool) -> None:
        await app.run_worker_async(
            queues=[queue], concurrency=at_once, wait=wait, install_signal_handlers=False
        )

    def _app(self, at_once: int) -> tuple[Any, Any]:
        import procrastinate

        connector = procrastinate.PsycopgConnector(conninfo=self._dsn, max_size=max(4, min(at_once, 16)))
        app = procrastinate.App(connector=connector)

        @app.task(name="work")
        async def work(number: int) -> None: ...

        return app, work


def _column(dsn: str, sql: str) -> list[float]:
    with closing(psycopg.connect(dsn)) as conn:
        return [value for (value,) in conn.execute(sql.encode()).fetchall()]


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the worker did not finish within {WAIT_SECONDS_MAX:g} s")
        time.sleep(0.01)


BENCHMARK = Benchmark(
    name="jobs",
    question=__doc__,
    plan=Plan,
    measure=measure,
    figures=[
        "{idle} jobs for an idle worker, medians of {rounds} rounds of {jobs} jobs for a busy one",
        Grid(
            {"claim": "Dormouse", "procrastinate_claim": "procrastinate"},
            {"{}_ms_p50": "until it is claimed, p50, ms", "{}_ms_p99": "p99, ms"},
        ),
        Grid(
            {str(n): f"{n} at once" for n in AT_ONCE},
            {
                "jobs_per_s_{}": "Dormouse, jobs/s",
                "procrastinate_per_s_{}": "procrastinate, jobs/s",
                "vs_procrastinate_{}": "ratio",
            },
        ),
        "jobs_per_s: {jobs_per_s}, vs_procrastinate: {vs_procrastinate}, the smallest of the ratios",
    ],
    needed=("procrastinate",),
)

if __name__ == "__main__":
    BENCHMARK.main()
