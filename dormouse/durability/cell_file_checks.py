"""Whether the objects that FILE cells refer to are there, and are what was put."""

from __future__ import annotations

from hashlib import sha256
from itertools import islice

from dormouse.errors import ObjectNotFound
from dormouse.model.table import Problem, TableRecord, is_edited
from dormouse.objects import ObjectStore
from dormouse.postgres.connection import Supplier
from dormouse.state.files.write_streams import PutFile, PutFiles

PROBLEMS_MAX = 1_000
CHUNK_BYTES = 1 << 20


def cell_file_problems(
    supplier: Supplier, objects: ObjectStore, table: TableRecord, *, deep: bool
) -> list[Problem]:
    """Of the files that were noted; none of a table that was dropped meanwhile."""
    if not is_edited(table.properties):
        return []
    files = PutFiles(supplier, table)
    sizes = dict(objects.list(files.prefix))
    found = (
        problem
        for file in files.noted()
        if (problem := _problem(objects, table.name, file, sizes.get(file.object_name), deep))
    )
    problems = list(islice(found, PROBLEMS_MAX))
    return problems if problems and any(files.noted()) else []


def _problem(
    objects: ObjectStore, table: str, file: PutFile, listed: int | None, deep: bool
) -> Problem | None:
    name = file.object_name
    try:
        # what is not listed so may have been put since
        size = listed if listed == file.byte_count else objects.size(name)
        if size != file.byte_count:
            detail = f"it has {size:,} bytes, and was written with {file.byte_count:,}"
            return Problem("object_size", table, None, name, detail)
        if deep and _digest(objects, name) != file.sha256:
            return Problem("object_digest", table, None, name, "its bytes are not those that were written")
    except ObjectNotFound:
        return Problem("object_missing", table, None, name, "the store does not have it")
    return None


def _digest(objects: ObjectStore, name: str) -> str:
    digest = sha256()
    with objects.reader(name) as source:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
