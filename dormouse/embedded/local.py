"""The embedded instance: a folder that contains a PostgreSQL server of its own, and the objects."""

from __future__ import annotations

import errno
import os
import stat
from functools import partial
from pathlib import Path

from dormouse.api.instance import Instance
from dormouse.embedded import TEMPORARY, is_instance, mark
from dormouse.errors import InstanceError, InstanceReadOnly, InvalidName, NotAnInstance, not_installed
from dormouse.objects.store import open_store
from dormouse.settings.process import Settings, load_settings


def local(path: str | os.PathLike[str], *, read_only: bool = False, committer: bool = False) -> Instance:
    """Opens the instance of a folder; makes it if the folder is new or empty. A context manager.

    Processes that open the same folder share its database, which stops when the last one leaves. With
    `DORMOUSE_DSN`, an existing PostgreSQL is used instead, and the folder holds only the objects.

    With `committer`, submitted requests are applied at once, by a thread that begins with the first `submit`
    and ends with the instance. Otherwise they wait for a committer: `instance.committer().drain()`.

    Raises `InvalidName`, `NotAnInstance`, `InstanceLocked`, `InstanceReadOnly`, `InstanceTooNew` or
    `InstanceError`.
    """
    folder = _folder(path)
    settings = load_settings()
    prepare(folder, read_only=read_only)
    if settings.dsn is not None:
        objects = open_store(folder / "objects")
        return _opened(Instance(settings.dsn, objects, settings, read_only=read_only, committer=committer))
    return _with_own_server(folder, settings, read_only=read_only, committer=committer)


def opened_again(path: str | os.PathLike[str]) -> Instance:
    """Opens an instance like `local`, to continue work that other processes began.

    `local` would treat the write attempts of those processes as dead; this function does not.
    """
    folder, settings = _folder(path), load_settings()
    if settings.dsn is not None:
        return local(path)
    return _with_own_server(folder, settings, read_only=False, committer=False, goes_on=True)


def _folder(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise InvalidName(f"an instance's folder is a path, not {path!r}")
    text = os.fsdecode(path)
    if not text or any(character in text for character in "\n\r\0"):
        raise InvalidName(f"folder {text!r} cannot hold an instance: give it a name without line breaks")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise InstanceError(f"cannot use {text}: {error}") from None


def _with_own_server(
    folder: Path, settings: Settings, *, read_only: bool, committer: bool, goes_on: bool = False
) -> Instance:
    try:
        from dormouse.embedded.postgres import EmbeddedPostgres, base_backup
    except ModuleNotFoundError as error:
        raise not_installed(str(error.name), "local") from None
    server = EmbeddedPostgres(folder)
    dsn = server.start()
    try:
        objects = open_store(folder / "objects")
        instance = Instance(
            dsn,
            objects,
            settings,
            read_only=read_only,
            committer=committer,
            on_close=server.stop,
            revive=server.revive,
            base_backup=partial(base_backup, dsn),
        )
    except BaseException:
        server.stop()
        raise
    # if no other process has the folder open, all earlier writers are dead
    return _opened(instance, writers_are_dead=not (server.joined or goes_on))


def _opened(instance: Instance, *, writers_are_dead: bool = False) -> Instance:
    try:
        return instance.open(writers_are_dead=writers_are_dead)
    except BaseException:
        instance.close()
        raise


def prepare(folder: Path, *, read_only: bool) -> None:
    """Checks that the folder is an instance, or marks a new one. Call this before anything else is
    written.
    """
    try:
        if is_instance(folder):
            return
        if read_only:
            raise NotAnInstance(f"{folder} is not a Dormouse instance")
        folder.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
        # another process may have marked it meanwhile
        foreign = [entry for entry in folder.iterdir() if not entry.name.startswith(TEMPORARY)]
        if foreign and not is_instance(folder):
            raise NotAnInstance(
                f"{folder} holds something that is not a Dormouse instance; use an empty or a new folder"
            )
        if folder.stat().st_uid == os.geteuid():
            folder.chmod(
                stat.S_IRWXU
            )  # private, because it has rows; access that its owner grants later is kept
        mark(folder)
    except (FileExistsError, NotADirectoryError):
        raise NotAnInstance(f"{folder} is not a folder") from None
    except OSError as error:
        if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
            raise InstanceReadOnly(f"cannot write to {folder}: {error.strerror}") from None
        raise InstanceError(f"cannot use {folder}: {error.strerror}") from None
