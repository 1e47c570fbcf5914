"""Bits flipped in a table's file, as a faulty disk would do."""

from __future__ import annotations

from pathlib import Path

from dormouse.api.table import Table


def path_of(table: Table) -> Path:
    """Returns the path of the table's only file."""
    [file] = table.files.all_files(0).files
    path = table.context.objects.local_path(file.filename)
    assert path is not None
    return path


def flipped(content: bytes, bit: int) -> bytes:
    """Returns the bytes with one bit flipped."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def written(path: Path, content: bytes) -> None:
    """Replaces the file by a new one.

    A process that has the old file open or mapped keeps the old bytes.
    """
    beside = path.with_name("beside")
    beside.write_bytes(content)
    beside.replace(path)


def damage(table: Table) -> Path:
    """Flips a bit in the middle of the table's only file; returns its path."""
    path = path_of(table)
    content = path.read_bytes()
    written(path, flipped(content, 4 * len(content)))
    return path
