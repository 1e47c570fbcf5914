"""A job's inputs are held against what was recorded of them, so that no damage is merged into new files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING

from dormouse.data.file_checks import copied, digest_of_object
from dormouse.data.object_access import parquet_object
from dormouse.errors import InvalidData, ObjectDamaged, one_line
from dormouse.model.schema import Schema
from dormouse.objects import ObjectStore, open_store
from dormouse.reading.checked_files import on_current
from dormouse.reading.planner import Reach
from dormouse.reading.where import Deletion, deletions_of
from dormouse.state.context import TableContext
from dormouse.state.files.compaction_jobs import CompactionInput, CompactionJob

if TYPE_CHECKING:
    from datafusion import Expr

# Which deletions a job applies: those that are there when it begins, each to the files that came before.


@dataclass(frozen=True, slots=True)
class JobDeletions:
    """The deletions that a job applies to each of its inputs; `till` is the number of the last of all.

    `context` has the columns by which the job is run: they are no older than those of deletions and inputs.
    """

    till: int
    of_inputs: tuple[tuple[Deletion, ...], ...]
    context: TableContext = field(repr=False, compare=False)

    @staticmethod
    def of(context: TableContext, job: CompactionJob) -> JobDeletions:
        """As they are now: each that comes later is of all rows of the output, as the inputs were there."""
        found = context.store.deletions_of([item.filename for item in job.inputs])
        context, pending = on_current(context, lambda now: (now, deletions_of(now.schema, found.deletions)))
        reach = Reach(context.schema, pending)
        files = tuple(reach.of(one.till or 0, one.min_key, one.max_key, one.left) for one in found.files)
        return JobDeletions(found.till, files, context)


def remaining(schema: Schema, of_files: Sequence[Sequence[Deletion]]) -> list[Expr | None]:
    """For each file what its rows must meet that are of no deletion of it; None: they all remain."""
    from dormouse.reading.scan_session import remains

    return [remains(schema, deletions) if deletions else None for deletions in of_files]


COPIED_BYTES_MAX = 4 * 2**30
COPIED_SHARE = 8
"""Inputs of a job that are larger than so much of the free disk are fetched twice: others run beside it."""

COPIED_AT_ONCE = 8


class JobInputs:
    """The inputs of one job; `go_on` raises when it is to stop."""

    def __init__(
        self, objects: ObjectStore, table: str, job: CompactionJob, go_on: Callable[[], object]
    ) -> None:
        self._objects = objects
        self._table = table
        self._job = job
        self._go_on = go_on
        self._copies: dict[str, Path] = {}

    def verify(self) -> None:
        """As `verified`, for inputs that others merge from where they are."""
        self.check_sizes()
        self._check_digests()
        self._check_footers()

    @contextmanager
    def verified(self, folder: Path) -> Iterator[list[str]]:
        """Holds inputs against what is recorded of them: sizes, every byte of those with a digest, footers.

        Gives where the merge reads them. Files of this machine are read first, which brings them into its
        memory. Those elsewhere are copied below `folder` while they are read, so that each is fetched once,
        where the disk has room; else they are read while the merge runs. Raises `ObjectNotFound`,
        `ObjectDamaged`, or `InvalidData` with the file and both counts of rows.
        """
        self.check_sizes()
        places = [self._objects.uri(item.filename) for item in self._job.inputs]
        if self._objects.url.startswith("file:"):
            self._check_digests()
            self._check_footers()
            yield places
        elif self._fits(folder):
            self._copies = {item.filename: folder / "inputs" / item.filename for item in self._job.inputs}
            self._copy()
            self._check_footers()
            yield [str(path) for path in self._copies.values()]
            return
        else:
            with ThreadPoolExecutor(1, thread_name_prefix="dormouse-digests") as thread:
                found = thread.submit(self._check_digests)
                try:
                    yield places
                except Exception:
                    found.result()  # what the merge failed at may be the damage, which is named better
                    raise
                found.result()
        # one that vanished meanwhile would have been merged as if it had no rows
        self.check_sizes()
        self._check_footers()

    def _fits(self, folder: Path) -> bool:
        """Whether all can be verified by their copies, and these leave most of the disk to others."""
        if not all(item.digest and item.byte_count for item in self._job.inputs):
            return False
        byte_count = sum(item.byte_count or 0 for item in self._job.inputs)
        return byte_count <= min(COPIED_BYTES_MAX, disk_usage(folder).free // COPIED_SHARE)

    def _copy(self) -> None:
        def copy(item: CompactionInput) -> None:
            path = self._copies[item.filename]
            path.parent.mkdir(parents=True, exist_ok=True)
            self._compare(item, copied(self._objects, item.filename, path, self._go_on)[1])

        with ThreadPoolExecutor(COPIED_AT_ONCE, thread_name_prefix="dormouse-inputs") as threads:
            for _ in threads.map(copy, self._job.inputs):
                pass

    def check_sizes(self) -> None:
        """Whether all are there, with the sizes that are recorded; `ObjectNotFound`, `ObjectDamaged`."""
        for item in self._job.inputs:
            size, written = self._objects.size(item.filename), item.byte_count
            if written and size != written:
                raise self._damaged(item, f"has {size:,} bytes, and had {written:,} when it was written")

    def _check_footers(self) -> None:
        """Last, as a damaged footer, which pyarrow trusts, can end the process."""
        for item in self._job.inputs:
            try:
                found = self._row_count(item)
            except InvalidData as error:
                cause = one_line(error.__cause__ or error)
                raise self._damaged(item, f"cannot be read as Parquet: {cause}") from error
            if item.whole and item.exact and found != item.row_count:
                raise InvalidData(
                    f"file {item.filename!r} has {found:,} rows; its reference tells {item.row_count:,}"
                )

    def _row_count(self, item: CompactionInput) -> int:
        name, objects = item.filename, self._objects
        if item.filename in self._copies:
            path = self._copies[item.filename]
            name, objects = path.name, open_store(path.parent)
        with parquet_object(objects, name) as file:
            return int(file.metadata.num_rows)

    def _check_digests(self) -> None:
        for item in self._job.inputs:
            self._go_on()
            if item.digest is not None:
                self._compare(item, digest_of_object(self._objects, item.filename, self._go_on)[1])

    def _compare(self, item: CompactionInput, digest: bytes) -> None:
        if item.digest is not None and digest != item.digest:
            raise self._damaged(
                item, f"has the digest {digest.hex()}, and had {item.digest.hex()} when it was written"
            )

    def _damaged(self, item: CompactionInput, fault: str) -> ObjectDamaged:
        return ObjectDamaged(self._table, self._job.partition_id, item.filename, fault)
