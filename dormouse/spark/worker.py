"""What tasks need of the machine that they run on: quick workers, and the folder that the driver sees.

After each task a worker collects garbage among everything that is imported, and before each it has Python
read the list of pyspark.zip again, file by file: 0.1 s of CPU a task, measured with pyspark 4.0.2 and
Python 3.11, more than many tasks take. So does each process in which Spark plans a read of a Python source.
"""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from zipimport import zipimporter

from pyspark import TaskContext

from dormouse.errors import ObjectNotFound, ObjectStoreError

if TYPE_CHECKING:
    from dormouse.model.file_reference import FileWithReferences
    from dormouse.objects.store import ObjectStore
    from dormouse.state.context import TableAddress, TableContext

_settled = False


def settle() -> None:
    """What is imported stays, and need not be looked at again; call it in a worker, when all is imported.

    Importers of zips are forgotten, not their contents: Python makes them anew, from its cache, on demand.
    """
    global _settled  # noqa: PLW0603  # one worker, one process
    if not _settled:
        gc.freeze()
        _settled = True
    for path, importer in list(sys.path_importer_cache.items()):
        if isinstance(importer, zipimporter):
            del sys.path_importer_cache[path]


def partition_number() -> int:
    """The number of the partition that this task is of; 0 outside of tasks."""
    task = TaskContext.get()
    return 0 if task is None else int(task.partitionId())


@contextmanager
def on_worker(address: TableAddress) -> Iterator[TableContext]:
    """A table's services in a task; `ObjectStoreError` where its machine does not see their folder."""
    settle()
    with address.open() as context:
        check_seen(context.objects)
        yield context


def make_folder(objects: ObjectStore) -> None:
    """On the driver: the folder that tasks look for, which otherwise the first object would make."""
    if (path := objects.local_path("data")) is not None:
        path.parent.mkdir(parents=True, exist_ok=True)


def check_seen(objects: ObjectStore) -> None:
    """In a task: `ObjectStoreError` where objects are in a folder that is not on this machine."""
    path = objects.local_path("data")
    # what is written would make it
    if path is not None and not path.parent.is_dir():
        raise _unseen(objects, f"the worker {socket.gethostname()} does not see it")


def check_arrived(objects: ObjectStore, files: Iterable[FileWithReferences]) -> None:
    """On the driver: `ObjectStoreError` where tasks wrote into a folder of another machine."""
    for file in files:
        if objects.local_path(file.filename) is None:
            return
        try:
            objects.size(file.filename)
        except ObjectNotFound:
            raise _unseen(objects, f"{file.filename!r}, which a worker wrote, is not in it here") from None


def _unseen(objects: ObjectStore, reason: str) -> ObjectStoreError:
    return ObjectStoreError(
        f"driver and workers must see one folder {objects.url}, but {reason}: share it under the same path, "
        "or keep the objects in S3"
    )
