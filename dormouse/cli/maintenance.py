"""`dormouse compact`, `split`, `merge`, `gc` and `maintain`; and `status` for tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dormouse.cli.command import Session, TableName, command, group, plural
from dormouse.cli.console import byte_size, count, minute
from dormouse.cli.failures import say, stop_on_signals
from dormouse.cli.options import bounds
from dormouse.errors import JobFailed, MaintenanceTakenOver
from dormouse.verbs.rounds import CompactRequest, SplitRequest
from dormouse.verbs.verb import options

if TYPE_CHECKING:
    from dormouse.durability.maintaining import InstanceRound, Maintenance
    from dormouse.state.files.holds import Hold
    from dormouse.state.files.round_reports import RoundKind
    from dormouse.state.history.history import TableStatus

app = group()
_ROUNDS: dict[RoundKind, tuple[str, str, str]] = {
    "compaction": ("compaction", "compact", "Files are not merged"),
    "split": ("splitting", "split", "Large leaves are not split"),
    "merge": ("merging", "merge", "Small leaves are not merged"),
    "collection": ("garbage collection", "gc", "Unused files are not deleted"),
}

_ONE_KEY_SHOWN = 3


@command(app, example="flights")
def compact(session: Session, request: CompactRequest) -> None:
    with session.work(f"compact {request.table}", "jobs") as (instance, moved):
        report = instance.table(request.table).compact(
            **options(request, "table"), progress=moved, waiting=say
        )
    if report.jobs_run:
        done = (
            f"{plural(report.jobs_run, 'job')} merged {plural(report.files_in, 'file')} into "
            f"{report.files_out:,}, {plural(report.rows_written, 'row')} ({report.seconds:.1f} s)"
        )
    elif report.given_up:
        done = "no job succeeded"
    else:
        looked = f"merged nothing: read {plural(report.jobs_looked, 'file')}, which contain few deleted rows"
        done = looked if report.jobs_looked else "nothing to compact"
    session.show(report, done)
    if report.given_up:
        jobs = plural(report.given_up, "job")
        raise JobFailed(
            f"given up: {jobs}; the first: {report.errors[0]}. {_advice('compaction', request.table)}"
        )


@command(app, example="flights")
def split(session: Session, request: SplitRequest) -> None:
    from dormouse.model.text import of_one_key

    with session.open() as instance:
        report = instance.table(request.table).split(waiting=say)
    done = (
        f"split {plural(len(report.partitions_split), 'partition')}, "
        f"pushed down {plural(report.references_pushed, 'reference')}"
    )
    session.lines(report, [done, *map(of_one_key, report.one_key_partitions)])
    if report.errors:
        partitions = plural(len(report.errors), "partition")
        raise JobFailed(
            f"could not split {partitions}; the first: {report.errors[0]}. {_advice('split', request.table)}"
        )


@command(app, example="flights --dry-run")
def merge(
    session: Session, table: TableName, /, dry_run: Annotated[bool, "List what would be merged now."] = False
) -> None:
    """Run one round of merges: halves of a partition with few rows (merge_threshold_rows) become one leaf."""
    with session.open(read_only=dry_run) as instance:
        of = instance.table(table)
        if dry_run:
            pairs = list(of.mergeable())
            lines = (f"{p.left_id} and {p.right_id}: {plural(p.row_count, 'row')}" for p in pairs)
            session.lines({"would_merge": pairs}, lines, empty="nothing would be merged")
            return
        report = of.merge(waiting=say)
    session.show(report, f"merged {plural(len(report.partitions_merged), 'pair')} of leaves")
    if report.errors:
        apart = plural(len(report.errors), "pair")
        raise JobFailed(
            f"could not merge {apart} of leaves; the first: {report.errors[0]}. {_advice('merge', table)}"
        )


@command(app, example="flights --dry-run")
def gc(
    session: Session, table: TableName, /, dry_run: Annotated[bool, "List what would be deleted now."] = False
) -> None:
    """Run one round of garbage collection: delete files some time after their last reference was removed.

    Also deletes metadata of truncated history, for half a minute at most.
    """
    with session.work(f"gc {table}", "old epochs", read_only=dry_run) as (instance, moved):
        of = instance.table(table)
        if dry_run:
            ready = list(of.garbage_ready())
            session.lines({"would_delete": ready}, ready, empty="nothing would be deleted")
            return
        report = of.collect_garbage(progress=moved, waiting=say)
    # without a delay, this round has tried to delete them already
    later = report.newly_unreferenced if of.properties.gc_delay_seconds else 0
    are = "is" if later == 1 else "are"
    waiting = (
        f"; {later:,} more {are} without references now and will be deleted after the delay" if later else ""
    )
    old = ""
    if report.epochs or report.partitions:
        left = f", {report.epochs_left:,} more to check: run it again" if report.epochs_left else ""
        old = f"; forgot {plural(report.epochs, 'old epoch')}, {plural(report.partitions, 'partition')}{left}"
    session.show(report, f"deleted {plural(report.deleted, 'file')}{waiting}{old}")
    if report.failed:
        name, reason = min(report.failed)
        objects = plural(report.failures, "object")
        raise JobFailed(
            f"{objects} could not be deleted, first {name}: {reason}. {_advice('collection', table)}"
        )


@command(app, example="--instance ./lake")
def maintain(
    session: Session,
    once: Annotated[bool, "Run one round of all work and end, for example from cron."] = False,
    every: Annotated[float, "Seconds between checks for work.", bounds(0.1, 86_400)] = 30.0,
    metrics: Annotated[
        Path | None, "A file for Prometheus' textfile collector, written after each cycle."
    ] = None,
    no_compact: Annotated[bool, "Leave splits, merges and compactions to another program."] = False,
) -> None:
    """Split, merge, compact and collect all tables, until Ctrl-C or SIGTERM; once a day back up the metadata.

    Deployed instances have schedules or a service instead. With --once, exit code 1 when anything failed.
    """
    with session.open() as instance, stop_on_signals() as stop:
        if not once:
            say(f"tables are maintained every {every:g} s; Ctrl-C ends it")
        try:
            done = instance.maintain(
                once, stop=stop, cycle_seconds=every, tell=say, metrics=metrics, compacts=not no_compact
            )
        except MaintenanceTakenOver as error:
            _show_maintenance(session, error.report)
            raise
    _show_maintenance(session, done)
    if once and done.failed:
        raise JobFailed(f"failed: {done.failed}; the last: {done.failures[-1]}")


def _show_maintenance(session: Session, done: Maintenance) -> None:
    session.show(
        done,
        f"{plural(done.jobs_run, 'compaction job')}, {plural(done.partitions_split, 'partition')} split, "
        f"{plural(done.partitions_merged, 'pair')} merged, "
        f"{plural(done.files_deleted, 'file')} deleted, {plural(done.failed, 'failure')}",
    )


def show_status(session: Session, table: str | None) -> None:
    """Prints the counts and states of tables: `dormouse status`."""
    with session.open(read_only=True) as instance:
        tables = [instance.table(table)] if table is not None else instance.tables()
        found, rounds, held = [item.status() for item in tables], instance.rounds(), instance.holds()
        jumps = instance.clock_jumps()
    refusal = None if instance.refusal is None else str(instance.refusal)
    of_instance = {"refusal": refusal, "instance_rounds": rounds, "holds": held, "clock_jumps": jumps}
    shown = [{**asdict(one), **of_instance} for one in found]
    if not found and refusal is not None:
        shown = [of_instance]  # a program must see it
    columns = ("table", "partitions", "leaves", "files", "references", "rows", "size", "garbage", "jobs")
    rows = (
        (one.name, one.partitions, one.leaves, one.files, one.references, _rows(one),
         byte_size(one.byte_count), one.unreferenced_files, one.compaction_jobs)
        for one in found
    )  # fmt: skip
    lines = [line for of_table in (_attention, _history) for one in found for line in of_table(one)]
    lines += [*map(_last_of, rounds), *map(_held, held), *(f"! {one}" for one in jumps)]
    session.table(shown, columns, rows, *(lines if found else ()), empty="there are no tables yet")
    if refusal is not None:
        say(refusal)


def _rows(status: TableStatus) -> str:
    rows, versions = count(status.row_count, exact=status.rows_exact), status.stored_versions
    return rows if versions is None else f"{rows} ({plural(versions, 'version')})"


def _history(status: TableStatus) -> Iterator[str]:
    """Yields a line about each named cut or consumer that keeps history, and each expired consumer."""
    for holder in status.history_held_by:
        yield f"{status.name}: {holder} keeps the history from {minute(holder.since)} on"
    for consumer in status.consumers:
        if consumer.is_expired:
            yield (
                f"! {status.name}: consumer {consumer.name!r} has expired, and its changes since "
                f"{minute(consumer.position_at)} may be lost: 'dormouse changes {status.name} --consumer "
                f"{consumer.name}' says how to continue"
            )


def _held(hold: Hold) -> str:
    return f"collection waits for {hold.holder}, until {minute(hold.until)} at most ('dormouse holds')"


def _last_of(hold: InstanceRound) -> str:
    well = (
        "it has never succeeded" if hold.well_at is None else f"it last succeeded at {minute(hold.well_at)}"
    )
    if hold.error is None:
        return f"last {hold.kind}: {minute(hold.well_at)}"
    return f"! the {hold.kind} of {minute(hold.ended_at)} failed: {hold.error}; {well}"


def _attention(status: TableStatus) -> Iterator[str]:
    """Yields lines about files in PostgreSQL, pending deletions and failing rounds.

    A line about a failing round has its reason, begin and remedy.
    """
    from dormouse.model.text import of_one_key

    if status.inlined_files:
        inlined, size = plural(status.inlined_files, "small file"), byte_size(status.inlined_bytes)
        yield f"{status.name}: {inlined} with {size} in PostgreSQL: compaction writes the rows as objects"
    if status.deletions:
        pending = plural(status.deletions, "deletion")
        yield f"{status.name}: {pending} pending: queries hide the rows, and compaction removes them"
    for partition_id in status.one_key_partitions[:_ONE_KEY_SHOWN]:
        yield f"{status.name}: {of_one_key(partition_id)}"
    if (more := len(status.one_key_partitions) - _ONE_KEY_SHOWN) > 0:
        yield f"{status.name}: {plural(more, 'more such partition')}; --json names them"
    for last in status.rounds:
        if last.error is not None:
            what = _ROUNDS[last.kind][0]
            often = f", {last.failures} times in a row" if last.failures > 1 else ""
            given_up = _given_up(status, last.error) if last.kind == "compaction" else ""
            yield (
                f"! {status.name}: {what} has failed since {minute(last.failing_since)}{often}: "
                f"{last.error}. "
                f"{given_up}{_advice(last.kind, status.name)}"
            )


def _advice(kind: RoundKind, table: str) -> str:
    _, command, effect = _ROUNDS[kind]
    return f"{effect}: fix the cause, then run: dormouse {command} {table}"


def _given_up(status: TableStatus, error: str) -> str:
    if not status.jobs_given_up:
        return ""
    reason = status.given_up_reason or ""
    why = "" if error.startswith(reason) else f": {reason}"
    jobs = plural(status.jobs_given_up, "job")
    return f"{jobs} given up in all, the last {minute(status.given_up_at)}{why}. "
