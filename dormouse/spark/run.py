"""The driver of a run on EMR, which works through the run's list table by table, and logs the work.

run.py --list s3://bucket/data/runs/<id>.json --dsn rds-iam://… --objects s3://bucket/data --region …

The exit code is 0 if all is done. It is 1 if a job was given up, a leaf could not be divided, or a table
failed. It is 2 if the run cannot begin.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from types import FrameType

from pyspark.sql import SparkSession

from dormouse.aws.schedules.runs import FOLDER, RunList, RunTable, note_begun, read_list
from dormouse.durability.ownership import Ownership
from dormouse.errors import DormouseError, InvalidInput, ObjectNotFound, TableNotFound
from dormouse.objects.store import GuardedStore, ObjectStore, note_if_shared, open_store
from dormouse.postgres.connection import ConnectionSupplier
from dormouse.spark.tasks import compact_on_spark
from dormouse.state.catalog import Catalog
from dormouse.state.context import TableContext
from dormouse.state.files.attempts import WriteAttempts
from dormouse.state.partitions import REST_SECONDS, rows_to_merge
from dormouse.writing.compaction import compacted
from dormouse.writing.splitting import merge, split

logger = logging.getLogger(__name__)

DONE, FAILED, BAD_USAGE = 0, 1, 2
CONNECTIONS_MAX = 4
CONNECT_SECONDS_MAX = 120.0
"""The time to wait for a connection: long enough for a paused database to wake up."""

PROGRESS_SECONDS = 30.0
SPLIT_ROUNDS_MAX = 20


class Stopped(BaseException):
    """A sign that the process got SIGTERM and must end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the work of a list and returns the exit code. Logs errors."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    given = _parser().parse_args(arguments)
    try:
        more = {} if given.region is None else {"region": given.region}
        objects = open_store(given.objects, **more)
        work = read_list(objects, _name_of(given.list, objects))
        note_begun(objects, work.run_id)
    except ObjectNotFound:
        logger.error("there is no list %s: the run was reported already, or never existed", given.list)  # noqa: TRY400
        return BAD_USAGE
    except DormouseError as error:
        logger.error("%s", error)  # noqa: TRY400
        return BAD_USAGE
    try:
        with until_told_to_stop():
            return _run(given.dsn, objects, work)
    except Stopped:
        logger.warning(
            "run %s was stopped; its unfinished jobs were returned, so that other runs can take them",
            work.run_id,
        )
    except DormouseError as error:
        logger.error("run %s failed: %s", work.run_id, error)  # noqa: TRY400
    return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="run", description="Does the work of a run's list, on Spark.")
    parser.add_argument("--list", required=True, help="the URL of the run's list")
    parser.add_argument("--dsn", required=True, help="the instance's PostgreSQL")
    parser.add_argument("--objects", required=True, help="the instance's object store")
    parser.add_argument("--region", help="the AWS region of the object store")
    return parser


def _name_of(url: str, objects: ObjectStore) -> str:
    name = f"{FOLDER}/{url.rpartition('/')[2]}"
    if url not in (objects.uri(name), f"{objects.url}/{name}"):
        raise InvalidInput(f"--list must be below {objects.url}/{FOLDER}/, not {url}")
    return name


def _run(dsn: str, objects: ObjectStore, work: RunList) -> int:
    supplier = ConnectionSupplier(
        dsn,
        connections_max=CONNECTIONS_MAX,
        application_name="dormouse-run",
        wait_seconds_max=CONNECT_SECONDS_MAX,
    )
    with closing(supplier):
        ownership = Ownership(supplier, objects)
        ownership.check_now()
        objects = GuardedStore(objects, ownership.deleting)
        catalog = Catalog(supplier, WriteAttempts(supplier, objects))
        records = {table.table_id: table for table in catalog.tables()}
        logger.info("run %s: %s of %d tables, %d jobs", work.run_id, work.kind, len(work.tables), work.jobs)
        spark = SparkSession.builder.appName(f"dormouse-{work.kind}-{work.run_id}").getOrCreate()
        failed = 0
        for listed in work.tables:
            if (record := records.get(listed.table_id)) is None:
                logger.info("skip table %s: it was dropped", listed.table)
                continue
            context = TableContext(dsn, supplier, objects, record)
            if work.kind == "compaction":
                action = partial(_compact, context, work.run_id, spark)
            else:
                action = partial(_split, context)
            failed += not _for_table(listed, action)
        logger.info("run %s has ended; tables that failed: %d", work.run_id, failed)
        return FAILED if failed else DONE


def _for_table(listed: RunTable, work: Callable[[], bool]) -> bool:
    """Does the work on one table. Returns False, after it logged the error, if the work failed.

    The caller then continues with other tables.
    """
    try:
        return work()
    except TableNotFound:
        logger.info("skip table %s: it was dropped meanwhile", listed.table)
        return True
    except Exception:
        logger.exception("table %s failed", listed.table)
        return False


def _compact(context: TableContext, run_id: str, spark: SparkSession) -> bool:
    name, total, started = context.table.name, context.jobs.due(run_id).jobs, time.monotonic()
    outcomes: Counter[str] = Counter()
    rows, logged_at = 0, started
    logger.info("table %s: %d jobs", name, total)
    results = compact_on_spark(context, int(time.time() * 1000), spark, run_id=run_id)
    with context.last_rounds.round("compaction") as current, closing(results):
        for result in results:
            outcomes[result.outcome] += 1
            current.worked = True
            rows += result.rows_read
            if result.outcome == "committed":
                note_if_shared(context.objects)
            if result.outcome == "given_up":
                logger.error("table %s: job %s is given up: %s", name, result.job_id, result.error)
                current.errors.append(str(result.error))
            current.outcome = compacted(outcomes["committed"], rows)
            if time.monotonic() - logged_at >= PROGRESS_SECONDS:
                logged_at = time.monotonic()
                logger.info("table %s: %d of %d jobs, %d rows", name, outcomes["committed"], total, rows)
    seconds = time.monotonic() - started
    logger.info("table %s: %s, %d rows in %.1f s", name, dict(outcomes) or "no jobs", rows, seconds)
    return not outcomes["given_up"]


def _split(context: TableContext) -> bool:
    """Splits leaves in rounds, until a round finds nothing to do or `SPLIT_ROUNDS_MAX` rounds are done.

    Then runs a round of merges if the table wants merges. Returns False if the last round could not divide a
    leaf, in which case no merges follow, or if a merge failed. Needs no executors.
    """
    name = context.table.name
    for number in range(1, SPLIT_ROUNDS_MAX + 1):
        done = split(context)
        if not (done.partitions_split or done.references_pushed):
            break  # `split` has logged the leaves that it could not divide
        note_if_shared(context.objects)
        counts = (len(done.partitions_split), done.references_pushed)
        logger.info("table %s, round %d: %d partitions divided, %d references moved", name, number, *counts)
    return not done.errors and _merge(context)


def _merge(context: TableContext) -> bool:
    """Runs a round of merges if the table wants merges. Returns False if some of them failed."""
    if rows_to_merge(context.properties) is None:
        return True
    done = merge(context, rest_seconds=REST_SECONDS)
    if done.partitions_merged:
        note_if_shared(context.objects)
    logger.info("table %s: %d pairs of leaves merged", context.table.name, len(done.partitions_merged))
    return not done.errors


@contextmanager
def until_told_to_stop() -> Iterator[None]:
    """Raises `Stopped` in the main thread on SIGTERM, the signal with which a container is ended."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
