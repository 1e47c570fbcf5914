"""Three ways to commit with Dormouse: synchronously, through the commit queue, and by `Instance.commit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from threading import Thread
from time import sleep
from uuid import uuid4

import dormouse as dm
from benchmarks.harness.processes import Opener
from benchmarks.peers.peer import FILES_PER_COMPACTION, Peer, Refused, Steps, refused_on, small_rows
from dormouse.api.instance import Instance
from dormouse.api.table import Table
from dormouse.errors import DISTRIBUTION, CommitFailed
from dormouse.model.file_reference import (
    AssignJobIdRequest,
    FileReference,
    ReplaceFileReferencesRequest,
    group_by_file,
)
from dormouse.postgres import RETRIES, ConnectionSupplier
from dormouse.state.commits.postgres_queue import PostgresQueue
from dormouse.state.commits.queue import CommitQueue
from dormouse.state.commits.requests import AddFiles
from dormouse.state.files.store import FileReferenceStore

_LOOK_SECONDS = 0.01


class Dormouse(Peer):
    """Dormouse with its default layout and isolation.

    Each writer commits by itself, one file at a time, with a commit id.
    """

    name = "dormouse"
    label = "Dormouse, synchronous"
    packages = (DISTRIBUTION,)

    def set_up(self) -> None:
        super().set_up()
        self.open().close()

    def open(self) -> Instance:
        return dm.connect(self.database, f"file://{self.folder}")

    def create(self, table: str, partitions: int = 1) -> None:
        schema = dm.Schema([dm.Field("part", dm.LONG)], [], [dm.Field("payload", dm.BYTES)])
        with self.open() as instance:
            instance.create_table(table, schema, split_points=range(1, partitions))

    @contextmanager
    def appender(self, table: str, writer: int) -> Iterator[Steps]:
        with self.open() as instance:
            files: FileReferenceStore = instance.table(table).files
            leaf = _leaves(instance.table(table))[0]

            def step(_: int) -> int:
                name = f"{table}/{uuid4().hex}.parquet"
                with refused_on(CommitFailed):
                    files.add_files([_reference(name, leaf, rows=1)], commit_id=name)
                return 1

            yield Steps(step, retries=RETRIES.count)

    def fill(self, table: str, partitions: dict[int, int]) -> None:
        import pyarrow.parquet as pq

        with self.open() as instance:
            opened = instance.table(table)
            leaves = _leaves(opened)
            references = []
            (self.folder / table).mkdir()
            for partition, worker in partitions.items():
                for number in range(FILES_PER_COMPACTION):
                    name = f"{table}/{partition}-{number}.parquet"
                    rows = small_rows(partition, worker, number)
                    pq.write_table(rows, self.folder / name)
                    references.append(_reference(name, leaves[partition], rows.num_rows))
            opened.files.add_files(references)

    @contextmanager
    def compactor(self, table: str, worker: int, partitions: range) -> Iterator[Steps]:
        """Yields steps that each compact one of `partitions`.

        A step looks up the files, claims them, merges them and commits. Other systems have one call for this.
        """
        with self.open() as instance:
            opened = instance.table(table)
            leaves = _leaves(opened)

            def step(number: int) -> int:
                leaf, job = leaves[partitions[number]], uuid4().hex
                names = [reference.filename for reference in opened.files.file_references_in([leaf])]
                # the first partition also gets the files that the writer appends
                inputs = [name for name in names if name.startswith(f"{table}/{partitions[number]}-")]
                if len(inputs) != FILES_PER_COMPACTION:
                    raise RuntimeError(f"a partition has {len(inputs)} files to compact")
                output = f"{table}/{job}.parquet"
                claim = AssignJobIdRequest(job_id=job, partition_id=leaf, filenames=tuple(inputs))
                with refused_on(CommitFailed):
                    opened.files.assign_job_ids([claim])
                    done = ReplaceFileReferencesRequest(
                        job_id=job,
                        partition_id=leaf,
                        input_filenames=claim.filenames,
                        new_reference=_reference(output, leaf, self._merge(inputs, output)),
                    )
                    opened.files.replace_file_references([done], commit_id=job)
                return 1

            yield Steps(step, retries=RETRIES.count)

    def _merge(self, inputs: list[str], output: str) -> int:
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = pa.concat_tables([pq.ParquetFile(self.folder / name).read() for name in inputs])
        pq.write_table(rows, self.folder / output)
        return int(rows.num_rows)


class DormouseCommitter(Dormouse):
    """Dormouse with writers that submit one request at a time; a committer in another process applies them.

    The rate counts applied commits until the queue is empty. A latency is the time to submit one request.
    """

    name = "committer"
    label = "Dormouse, through the queue"

    @contextmanager
    def appender(self, table: str, writer: int) -> Iterator[Steps]:
        with self.open() as instance:
            leaf = _leaves(instance.table(table))[0]

            def step(_: int) -> int:
                instance.submit([_request(table, leaf)])
                return 1

            yield Steps(step)

    def committers(self, table: str) -> list[Opener]:
        return [self._committer]

    @contextmanager
    def _committer(self) -> Iterator[Steps]:
        with self.open() as instance, closing(ConnectionSupplier(self.database)) as supplier:
            committer = instance.committer()
            running = Thread(target=committer.run)
            running.start()
            counted = {"applied": 0, "rejected": 0}

            def step(_: int) -> int:
                sleep(_LOOK_SECONDS)
                metrics = committer.metrics()
                if metrics.rejected > counted["rejected"]:
                    counted["rejected"] += 1
                    raise Refused("the committer rejected a commit")
                more, counted["applied"] = metrics.applied - counted["applied"], metrics.applied
                return more

            try:
                yield Steps(step, is_idle=_emptied(PostgresQueue(supplier)))
            finally:
                committer.close()
                running.join()


class DormouseWaiting(Dormouse):
    """Dormouse with writers that call `Instance.commit`, which applies a request and returns its outcome."""

    name = "waiting"
    label = "Dormouse, Instance.commit"

    @contextmanager
    def appender(self, table: str, writer: int) -> Iterator[Steps]:
        with self.open() as instance:
            leaf = _leaves(instance.table(table))[0]

            def step(_: int) -> int:
                [status] = instance.commit([_request(table, leaf)])
                if status.state != "applied":
                    raise RuntimeError(f"a commit is {status.state}: {status.error}")
                return 1

            yield Steps(step, retries=RETRIES.count)


def _emptied(queue: CommitQueue) -> Callable[[], bool]:
    """Returns a function that checks whether the queue is empty now and was empty at the last call.

    Two calls are needed, because a commit may not be counted yet when its message has just left the queue.
    """
    looks = [False]

    def is_idle() -> bool:
        looks.append(queue.depth().messages == 0)
        return all(looks[-2:])

    return is_idle


def _leaves(table: Table) -> list[str]:
    return [leaf.partition_id for leaf in table.partitions.tree().leaves]


def _request(table: str, leaf: str) -> AddFiles:
    name = f"{table}/{uuid4().hex}.parquet"
    files = tuple(group_by_file([_reference(name, leaf, rows=1)]))
    return AddFiles(commit_id=name, table=table, files=files)


def _reference(name: str, leaf: str, rows: int) -> FileReference:
    return FileReference(filename=name, partition_id=leaf, row_count=rows)
