"""The embedded instance: a folder, its PostgreSQL, its server."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from dormouse.errors import InstanceTooNew, NotAnInstance

FORMAT = 1
MARKER = "dormouse.json"
TEMPORARY = ".dormouse-"
"""How files begin that are here for a moment."""


def is_instance(folder: Path) -> bool:
    """Whether the folder is one; raises `NotAnInstance` or `InstanceTooNew` when its marker says no."""
    try:
        text = (folder / MARKER).read_bytes()
    except FileNotFoundError:
        return False
    try:
        found = int(json.loads(text)["format"])
    except (ValueError, KeyError, TypeError):
        raise NotAnInstance(f"{folder / MARKER} is not Dormouse's") from None
    if found > FORMAT:
        raise InstanceTooNew(f"{folder} has format {found}, this Dormouse knows {FORMAT}; upgrade Dormouse")
    return True


def mark(folder: Path) -> None:
    """Says that the folder is an instance."""
    handle, name = tempfile.mkstemp(prefix=TEMPORARY, dir=folder)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"format": FORMAT}, file)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(folder / MARKER)
    finally:
        Path(name).unlink(missing_ok=True)
