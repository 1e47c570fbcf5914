"""A job's inputs are held against what was recorded of them, so that no damage is merged into new files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from dormouse.data.digests import digest_of_object
from dormouse.data.object_access import parquet_object
from dormouse.errors import InvalidData, ObjectDamaged, one_line
from dormouse.files.compaction_jobs import CompactionInput, CompactionJob
from dormouse.objects import ObjectStore


class JobInputs:
    """The inputs of one job; `go_on` raises when it is to stop."""

    def __init__(
        self, objects: ObjectStore, table: str, job: CompactionJob, go_on: Callable[[], object]
    ) -> None:
        self._objects = objects
        self._table = table
        self._job = job
        self._go_on = go_on

    @contextmanager
    def verified(self) -> Iterator[None]:
        """Holds inputs against what is recorded of them: sizes, every byte of those with a digest, footers.

        Files of this machine are read first, which brings them into its memory for the merge. Those elsewhere
        are read while the merge runs, which waits for other things than the network. Raises `ObjectNotFound`,
        `ObjectDamaged`, or `InvalidData` with the file and both counts of rows.
        """
        self._check_sizes()
        if self._objects.url.startswith("file:"):
            self._check_digests()
            self._check_footers()
            yield
        else:
            with ThreadPoolExecutor(1, thread_name_prefix="dormouse-digests") as thread:
                found = thread.submit(self._check_digests)
                try:
                    yield
                except Exception:
                    found.result()  # what the merge failed at may be the damage, which is named better
                    raise
                found.result()
        # one that vanished meanwhile would have been merged as if it had no rows
        self._check_sizes()
        self._check_footers()

    def _check_sizes(self) -> None:
        for item in self._job.inputs:
            size, written = self._objects.size(item.filename), item.byte_count
            if written and size != written:
                raise self._damaged(item, f"has {size:,} bytes, and had {written:,} when it was written")

    def _check_footers(self) -> None:
        """Last, as a damaged footer, which pyarrow trusts, can end the process."""
        for item in self._job.inputs:
            try:
                with parquet_object(self._objects, item.filename) as file:
                    found = file.metadata.num_rows
            except InvalidData as error:
                cause = one_line(error.__cause__ or error)
                raise self._damaged(item, f"cannot be read as Parquet: {cause}") from error
            if item.whole and item.exact and found != item.row_count:
                raise InvalidData(
                    f"file {item.filename!r} has {found:,} rows; its reference tells {item.row_count:,}"
                )

    def _check_digests(self) -> None:
        for item in self._job.inputs:
            self._go_on()
            if item.digest is None:
                continue
            _, digest = digest_of_object(self._objects, item.filename)
            if digest != item.digest:
                raise self._damaged(
                    item, f"has the digest {digest.hex()}, and had {item.digest.hex()} when it was written"
                )

    def _damaged(self, item: CompactionInput, fault: str) -> ObjectDamaged:
        return ObjectDamaged(self._table, self._job.partition_id, item.filename, fault)
