"""The folder of a demo: one demo at a time, in an instance of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dormouse.api.instance import Instance
from dormouse.embedded.local import prepare
from dormouse.embedded.locks import close_lock, open_lock, try_lock
from dormouse.errors import InstanceError, InstanceLocked

# an instance's folder may have files of this prefix
LOCK = ".dormouse-demo.lock"
OWN = ".dormouse-demo.own"
WORK = ".dormouse-demo"


@contextmanager
def claimed(folder: Path) -> Iterator[Path]:
    """Holds the folder for this demo alone; gives a scratch folder in it, which is removed at the end.

    The lock is the kernel's, so it goes with the process, however that ends. Raises `InstanceLocked`.
    """
    prepare(folder, read_only=False)
    lock = open_lock(folder / LOCK)
    try:
        if not try_lock(lock):
            raise InstanceLocked(
                f"another demo is running in {folder}: wait for it, or give this one another --folder"
            )
        work = folder / WORK
        shutil.rmtree(work, ignore_errors=True)  # of a demo that was killed
        work.mkdir()
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
    finally:
        close_lock(lock)


def start_afresh(instance: Instance, folder: Path, names: Sequence[str]) -> None:
    """Drops the demo's tables of an earlier run, in an instance that is the demo's own; else refuses."""
    tables = [table.name for table in instance.tables()]
    if tables and not (folder / OWN).exists():
        raise InstanceError(
            f"the instance of {folder} has tables that are not a demo's ({', '.join(tables[:3])}…): "
            "give the demo a --folder of its own"
        )
    (folder / OWN).touch()
    for name in tables:
        if name in names:
            instance.drop_table(name)


def remove(instance: Instance, folder: Path, names: Sequence[str]) -> bool:
    """Drops the demo's tables; whether nothing else is left, so that the folder can go once it is closed."""
    for table in instance.tables():
        if table.name in names:
            instance.drop_table(table.name)
    return not instance.tables()
