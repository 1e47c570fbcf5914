"""The end of an ingest: its files become the table's, all or none, once for each ingest id."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from dormouse.errors import (
    CommitFailed,
    CommitIdReused,
    CommitOutcomeUnknown,
    DormouseError,
    InvalidCommitRequest,
    InvalidData,
    JobFailed,
)
from dormouse.model.ahead import backoff_seconds
from dormouse.model.file_reference import FileWithReferences
from dormouse.model.table import TableProperties, check_not_edited, is_keyed
from dormouse.model.text import check_text
from dormouse.postgres.transaction import run_transaction
from dormouse.sources.source import STREAM, is_same
from dormouse.state.commits.requests import AddFiles
from dormouse.state.context import TableContext
from dormouse.state.files.attempts import WriteAttempt, WriteAttempts
from dormouse.state.files.compaction_jobs import CompactionJob

if TYPE_CHECKING:
    import psycopg

# Rows are counted on their way: DataFusion takes a file that is missing or empty for one without rows.


def check_output(
    job: CompactionJob, properties: TableProperties, rows_written: int, *, deletes: bool = False
) -> None:
    """Refuses an output whose rows are not those of the inputs, as far as the references tell exactly.

    `deletes`: whether some may be left out.
    """
    changed = deletes or properties.filter or properties.aggregate or is_keyed(properties)
    exact = all(item.exact for item in job.inputs)
    if exact and (rows_written > job.row_count or (rows_written < job.row_count and not changed)):
        names = ", ".join(repr(item.filename) for item in job.inputs)
        raise InvalidData(
            f"the merge of {names} wrote {rows_written:,} rows; the references tell {job.row_count:,}"
        )


def check_ingested(
    rows_read: int, rows_total: int | None, files: Sequence[FileWithReferences], properties: TableProperties
) -> None:
    """Refuses an ingest that read fewer or more rows than its source has, or wrote others than it read.

    Of a keyed table it wrote one for each key.
    """
    if rows_total not in (None, rows_read):
        raise InvalidData(
            f"the data has {rows_total:,} rows, but {rows_read:,} were read: it changed meanwhile"
        )
    written = sum(reference.row_count for file in files for reference in file.references)
    fewest = min(1, rows_read) if is_keyed(properties) else rows_read
    if not fewest <= written <= rows_read:
        raise JobFailed(f"the ingest read {rows_read:,} rows and wrote {written:,}; nothing was added")


logger = logging.getLogger(__name__)

INGEST_ID_BYTES_MAX = 200
ASK_ATTEMPTS_MAX = 8
ASK_WAIT_SECONDS_MAX = 5.0


@dataclass(frozen=True, slots=True)
class IngestReport:
    """What an ingest added; nothing when its id was `applied` before, by another."""

    ingest_id: str
    rows: int
    files: int
    references: int
    bytes: int
    applied: bool
    seconds: float


def ingest_once(
    context: TableContext,
    ingest_id: str | None,
    write: Callable[[TableContext, WriteAttempt], Sequence[FileWithReferences]],
    *,
    digest: Callable[[], bytes | None] = lambda: None,
    leftovers: bool = False,
) -> IngestReport:
    """Commits the files that `write` makes, once for each id; for an id that is applied it is not called.

    `digest` gives 16 bytes for the data, as `GivenData.digest` does, or None. They are recorded with the id
    that a caller gave. Raises `CommitIdReused` for an id that is applied with data of another digest.

    Without an id it gets a new one. `write` is given the services for the columns of now, by which it writes;
    those that are changed meanwhile do not matter: readers find the older ones in the files. `leftovers`:
    others may still write objects of the attempt, see `WriteAttempts.finish`, also when it fails; they are
    looked for after the commit.
    """
    started = time.monotonic()
    source: Callable[[], bytes | None] = cache(digest) if ingest_id is not None else lambda: None
    if ingest_id is None:
        ingest_id = uuid.uuid4().hex
    check_text("ingest_id", ingest_id, INGEST_ID_BYTES_MAX)
    check_not_edited(context.table.name, context.properties, "use row_table(…).change or 'dormouse rows'")
    files: Sequence[FileWithReferences] = ()
    applied = False
    if not _is_applied(context, ingest_id, source):
        with context.writing(loads=True, leftovers=leftovers) as (current, attempt):
            of_data = None if source() == STREAM else source()
            files = write(current, attempt)
            applied = commit_files(current, attempt, files, ingest_id, leftovers=leftovers, source=of_data)
        if not applied:
            _is_applied(context, ingest_id, source)
        if applied and leftovers:
            context.attempts.delete_leftovers(attempt, context.store.own)
    added = files if applied else ()
    return IngestReport(
        ingest_id=ingest_id,
        rows=sum(file.row_count or 0 for file in added),
        files=len(added),
        references=sum(len(file.references) for file in added),
        bytes=sum(file.byte_count or 0 for file in added),
        applied=applied,
        seconds=time.monotonic() - started,
    )


def _is_applied(context: TableContext, ingest_id: str, source: Callable[[], bytes | None]) -> bool:
    """Returns whether an ingest of this id is applied; `CommitIdReused` when it was one of other data."""
    is_of_source = context.store.is_of_source(
        commit_id(ingest_id), lambda recorded: is_same(source(), recorded)
    )
    if is_of_source is False:
        raise CommitIdReused(
            f"ingest id {ingest_id!r} was used before, for other data, in table {context.table.name!r}; "
            "nothing was added: give each ingest an id of its own",
            commit_id=ingest_id,
            table=context.table.name,
        )
    return is_of_source is not None


def commit_id(ingest_id: str) -> str:
    return f"ingest:{ingest_id}"


def commit_files(
    context: TableContext,
    attempt: WriteAttempt,
    files: Sequence[FileWithReferences],
    ingest_id: str,
    *,
    leftovers: bool = False,
    source: bytes | None = None,
    with_them: Callable[[psycopg.Connection[Any]], object] | None = None,
) -> bool:
    """Adds the attempt's files and ends it; False, and the files removed, when the id is applied already.

    `source` is a digest of the data, which is recorded with the id.

    Those of a keyed table have the attempt's place among the deletions. What is done `with_them`, in the same
    transaction, comes first. Raises `CommitFailed` when nothing is applied, and `CommitOutcomeUnknown` only
    when the database does not answer any more.
    """
    files = with_place(attempt, files)
    try:
        applied = _commit(
            context, attempt, files, ingest_id, leftovers=leftovers, source=source, with_them=with_them
        )
    except CommitOutcomeUnknown as unknown:
        applied = _ask(context, attempt, ingest_id, unknown)
    if not applied:
        context.attempts.discard(attempt, leftovers=leftovers)
    return applied


def with_place(attempt: WriteAttempt, files: Sequence[FileWithReferences]) -> tuple[FileWithReferences, ...]:
    """Files of an attempt, which have its place among the deletions, if it has one."""
    if attempt.place is None:
        return tuple(files)
    return tuple(replace(file, deletions_till=attempt.place.deletions_till) for file in files)


def _commit(
    context: TableContext,
    attempt: WriteAttempt,
    files: Sequence[FileWithReferences],
    ingest_id: str,
    *,
    leftovers: bool,
    source: bytes | None,
    with_them: Callable[[psycopg.Connection[Any]], object] | None,
) -> bool:
    # a request cannot say that there may be leftovers, or what else there is to do or to check
    is_plain = not leftovers and with_them is None and context.numbering is None
    if is_plain and (commits := context.async_commits) is not None:
        with suppress(InvalidCommitRequest):
            request = AddFiles(
                commit_id=commit_id(ingest_id),
                table=context.table.name,
                files=tuple(files),
                attempt_id=attempt.attempt_id,
                source=source,
            )
            return commits.commit(request, attempt)

    def work(conn: psycopg.Connection[Any]) -> bool:
        if context.numbering is not None:
            context.numbering.check(conn)
        if with_them is not None:
            with_them(conn)
        applied = context.store.add_files_with_references(
            files, commit_id=commit_id(ingest_id), source=source, conn=conn
        )
        if applied:
            WriteAttempts.finish(conn, attempt.table_id, [attempt.attempt_id], leftovers=leftovers)
        return applied

    return run_transaction(context.supplier, work, operation="ingest")


def _ask(context: TableContext, attempt: WriteAttempt, ingest_id: str, unknown: CommitOutcomeUnknown) -> bool:
    """Whether a commit that never answered is applied; it cannot be applied later than this answer.

    Abandoning the attempt waits for a transaction that is still ending it, and no later one can.
    """
    for number in range(ASK_ATTEMPTS_MAX):
        try:
            withdrawn = context.attempts.abandon(attempt)
            applied = context.store.is_applied(commit_id(ingest_id))
        except (DormouseError, OSError) as error:
            logger.info("ingest %s: asking what became of its commit: %s", ingest_id, error)
            time.sleep(backoff_seconds(number, 0.1, ASK_WAIT_SECONDS_MAX))
            continue
        if not applied:
            raise CommitFailed(
                f"ingest {ingest_id!r}: the database lost the commit; run it again"
            ) from unknown
        return not withdrawn
    raise unknown
