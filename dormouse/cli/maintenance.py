"""`dormouse compact`, `split` and `gc`; and `status`, where it is about tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dormouse.cli.data import Engine
from dormouse.cli.failures import say
from dormouse.cli.verbs import Session, TableName, plural, verb
from dormouse.errors import JobFailed

if TYPE_CHECKING:
    from dormouse.table import TableStatus


def add_to(app: typer.Typer) -> None:
    verb(app, "compact", example="dormouse compact flights")(compact)
    verb(app, "split", example="dormouse split flights")(split)
    verb(app, "gc", example="dormouse gc flights --dry-run")(gc)


def compact(
    session: Session,
    table: TableName,
    engine: Annotated[Engine, typer.Option(help="Where the jobs run.")] = "auto",
) -> None:
    """One round of compaction: make jobs, and run what is due."""
    from dormouse.cli.console import progress

    with session.open() as instance, progress(f"compact {table}", unit="jobs") as moved:
        report = instance.table(table).compact(
            engine=engine, progress=lambda done, total, rows: moved(done, total), waiting=say
        )
    session.show(
        report,
        lambda: (
            f"{plural(report.jobs_run, 'job')} merged {plural(report.files_in, 'file')} into "
            f"{report.files_out:,}, {plural(report.rows_written, 'row')} ({report.seconds:.1f} s)"
            if report.jobs_run
            else "nothing to compact"
        ),
    )
    if report.given_up:
        raise JobFailed(f"given up: {plural(report.given_up, 'job')}; the first: {report.errors[0]}")


def split(session: Session, table: TableName) -> None:
    """One round of splits: divide leaves over the threshold, and push references down by one level."""
    with session.open() as instance:
        report = instance.table(table).split(waiting=say)
    session.show(
        report,
        lambda: (
            f"split {plural(len(report.partitions_split), 'partition')}, "
            f"pushed down {plural(report.references_pushed, 'reference')}"
        ),
    )


def gc(
    session: Session,
    table: TableName,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be deleted now.")] = False,
) -> None:
    """One round of garbage collection: delete files a while after their last reference went."""
    with session.open(read_only=dry_run) as instance:
        found = instance.table(table)
        if dry_run:
            ready = list(found.garbage_ready())
            session.show({"would_delete": ready}, lambda: "\n".join(ready) or "nothing would be deleted")
            return
        report = found.collect_garbage(waiting=say)
    session.show(
        report,
        lambda: (
            f"deleted {plural(report.deleted, 'file')}; {report.newly_unreferenced:,} more "
            f"{'is' if report.newly_unreferenced == 1 else 'are'} without references now, "
            f"to go once the delay is over"
        ),
    )
    if report.failed:
        name, reason = min(report.failed)
        raise JobFailed(f"{plural(report.failures, 'object')} could not be deleted, first {name}: {reason}")


def status(
    session: Session,
    table: Annotated[str | None, typer.Argument(help="One table; all when not given.")] = None,
) -> None:
    """What the tables consist of: partitions, files, references, rows, bytes."""
    with session.open(read_only=True) as instance:
        tables = [instance.table(table)] if table is not None else instance.tables()
        found = [item.status() for item in tables]
    session.show(found, lambda: _table(found) if found else "there are no tables yet")


def _table(found: Sequence[TableStatus]) -> Any:
    from dormouse.cli.console import byte_size, count, grid

    columns = ("table", "partitions", "leaves", "files", "references", "rows", "size", "garbage", "jobs")
    return grid(
        columns,
        [
            (
                one.name, one.partitions, one.leaves, one.files, one.references,
                count(one.row_count, exact=one.rows_exact), byte_size(one.byte_count),
                one.unreferenced_files, one.compaction_jobs,
            )
            for one in found
        ],
    )  # fmt: skip
