"""The preparation of Spark's worker processes: a lower cost of each task, and a check for the objects'
folder.

After each task, a worker of Spark collects garbage among all imported objects. Before each task, it makes
Python read the directory of pyspark.zip again. Together this takes 0.1 s of CPU for each task (measured with
pyspark 4.0.2 and Python 3.11), more than many tasks need. The same happens in each process in which Spark
plans a read of a Python data source. `settle` avoids both.
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
    """Excludes imported objects from garbage collection, and drops the importers of zip files.

    Call it in a worker after its imports. Python makes an importer again when it needs one, from a cache of
    the zip's directory.
    """
    global _settled  # noqa: PLW0603  # one worker, one process
    if not _settled:
        gc.freeze()
        _settled = True
    for path, importer in list(sys.path_importer_cache.items()):
        if isinstance(importer, zipimporter):
            del sys.path_importer_cache[path]


def partition_number() -> int:
    """Returns the number of the partition of this task, or 0 outside of tasks."""
    task = TaskContext.get()
    return 0 if task is None else int(task.partitionId())


@contextmanager
def on_worker(address: TableAddress) -> Iterator[TableContext]:
    """Opens a table's services in a task. Raises `ObjectStoreError` if the machine lacks the objects'
    folder.
    """
    settle()
    with address.open() as context:
        check_seen(context.objects)
        yield context


def make_folder(objects: ObjectStore) -> None:
    """Makes the objects' folder on the driver, so that tasks can check that their machine has it too."""
    if (path := objects.local_path("data")) is not None:
        path.parent.mkdir(parents=True, exist_ok=True)


def check_seen(objects: ObjectStore) -> None:
    """Raises `ObjectStoreError` in a task if the objects are in a folder that this machine does not have."""
    path = objects.local_path("data")
    # checked before the first write, which would make the folder
    if path is not None and not path.parent.is_dir():
        raise _unseen(objects, f"the worker {socket.gethostname()} does not see it")


def check_arrived(objects: ObjectStore, files: Iterable[FileWithReferences]) -> None:
    """Raises `ObjectStoreError` on the driver if files that tasks wrote are missing here.

    Such tasks wrote into a folder of another machine.
    """
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
