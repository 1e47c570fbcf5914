"""The embedded instance: a folder with its own PostgreSQL server."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from dormouse.errors import InstanceTooNew, NotAnInstance

FORMAT = 1
MARKER = "dormouse.json"
TEMPORARY = ".dormouse-"
"""The prefix of temporary files in the folder."""


def is_instance(folder: Path) -> bool:
    """Returns whether the folder is an instance.

    Raises `NotAnInstance` or `InstanceTooNew` if its marker is of another program or of a newer Dormouse.
    """
    try:
        text = (folder / MARKER).read_bytes()
    except FileNotFoundError:
        return False
    try:
        found = int(json.loads(text)["format"])
    except (ValueError, KeyError, TypeError):
        raise NotAnInstance(f"{folder / MARKER} was not written by Dormouse") from None
    if found > FORMAT:
        raise InstanceTooNew(f"{folder} has format {found}, this Dormouse knows {FORMAT}; upgrade Dormouse")
    return True


def mark(folder: Path) -> None:
    """Marks the folder as an instance."""
    handle, name = tempfile.mkstemp(prefix=TEMPORARY, dir=folder)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"format": FORMAT}, file)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(folder / MARKER)
    finally:
        Path(name).unlink(missing_ok=True)
