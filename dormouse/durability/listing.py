"""A listing of objects in the order in which the database reads files: by the ids of their names."""

from __future__ import annotations

import heapq
import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from typing import NamedTuple

from dormouse.model.text import narrow_bytes
from dormouse.objects.names import SKETCHES_SUFFIX

RUN_OBJECTS = 100_000
"""Sorted in memory at once; what there is more waits on disk."""


class Listed(NamedTuple):
    """An object; the id is its file's, as hexadecimal digits, which its sketches have too."""

    file_id: str
    name: str
    byte_count: int


def by_file(objects: Iterable[tuple[str, int]]) -> Iterator[Listed]:
    """(name, bytes) in the order of the ids of files, in bounded memory."""
    lines = map(_line, objects)
    with ExitStack() as stack:
        runs: list[Iterable[str]] = []
        while run := sorted(islice(lines, RUN_OBJECTS)):
            if len(run) < RUN_OBJECTS:
                runs.append(run)
                break
            file = stack.enter_context(tempfile.TemporaryFile("w+", encoding="ascii"))
            file.writelines(run)
            file.seek(0)
            runs.append(file)
        yield from map(_listed, heapq.merge(*runs))


def _line(listed: tuple[str, int]) -> str:
    name, size = listed
    file_id = narrow_bytes(name.removesuffix(SKETCHES_SUFFIX)).hex()
    return f"{file_id} {size} {json.dumps(name)}\n"


def _listed(line: str) -> Listed:
    file_id, size, name = line.split(" ", 2)
    return Listed(file_id, json.loads(name), int(size))
