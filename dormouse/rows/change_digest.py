"""A digest of what a change asks, by which the same change id with another change is noticed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from os import PathLike
from pathlib import Path

from dormouse.model.values import json_value
from dormouse.rows.changes import AddColumn, Change, Insert, LoadCsv, Patch, Remove, Row, Update
from dormouse.rows.given import as_dicts
from dormouse.sources.source_digest import DIGEST_BYTES, Hash, add_files


def digest_of_changes(changes: Sequence[Change]) -> bytes | None:
    """Returns 16 bytes; None where rows come from an iterator, or a file is gone."""
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for change in changes:
        found.update(type(change).__name__.encode())
        match change:
            case Insert() | Update() | Patch() | Remove():
                is_known = _add_rows(found, change.rows)
            case LoadCsv():
                is_known = _add_file(found, change)
            case AddColumn():
                is_known = _add(found, change.column.to_json())
            case _:
                is_known = _add(found, asdict(change))
        if not is_known:
            return None
    return found.digest()


def digest_of_upsert(rows: Iterable[Row], on: Sequence[str]) -> bytes | None:
    """Returns 16 bytes; None where rows come from an iterator."""
    found, rows = hashlib.blake2b(b"upsert", digest_size=DIGEST_BYTES), as_dicts(rows)
    return found.digest() if _add(found, list(on)) and _add_rows(found, rows) else None


def _add_rows(found: Hash, rows: object) -> bool:
    return isinstance(rows, Sequence) and all(_add(found, row) for row in rows)


def _add(found: Hash, value: object) -> bool:
    """Adds JSON in one form, that in which a client sends it; of other values what Python shows."""
    try:
        text = json.dumps(json_value(value), sort_keys=True, default=repr)
    except (TypeError, ValueError, RecursionError):
        return False
    found.update(text.encode() + b"\0")
    return True


def _add_file(found: Hash, change: LoadCsv) -> bool:
    if not isinstance(change.path, str | PathLike):
        return False
    try:
        add_files(found, [(Path(change.path), ())])
    except OSError:
        return False
    return _add(found, asdict(replace(change, path="")))
