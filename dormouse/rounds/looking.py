"""A look at a file: which deletions it has rows of; what it has none of, no reader applies to it any more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dormouse.context import TableContext
from dormouse.files.deletions import Noted
from dormouse.files.reads import KeyBounds
from dormouse.query.deletions import Deletion, deletions_of
from dormouse.query.reach import Reach
from dormouse.query.schemas import on_current

if TYPE_CHECKING:
    import psycopg

LOOKS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Look:
    """The deletions that a file has rows of, by number, and of how many each; all up to `till` were asked."""

    filename: str
    till: int
    rows: Mapping[int, int]


def look_at(
    context: TableContext,
    files: Sequence[tuple[str, int | None]],
    also: Callable[[psycopg.Connection[Any], list[Look]], object] = lambda conn, looks: None,
) -> list[Look]:
    """Reads files, given by name and bytes, for rows of deletions, and records what they have none of.

    Deletions that are undone count, too: a restore may make them pending again. What is recorded are facts of
    the files, whatever happens to them meanwhile; `also` is part of that transaction. Raises
    `ObjectNotFound`, `ObjectDamaged`.
    """
    looks = on_current(context, lambda now: _looks(now, files))
    noted = [Noted(one.filename, one.till, sorted(one.rows)) for one in looks]
    context.deletions.note(noted, lambda conn: also(conn, looks))
    return looks


def _looks(context: TableContext, files: Sequence[tuple[str, int | None]]) -> list[Look]:
    names = [name for name, _ in files]
    found = context.store.deletions_of(names, KeyBounds(), retired_too=True)
    known = {one.deletion_id: one for one in deletions_of(context.schema, found.deletions)}
    reach = Reach(context.schema, list(known.values()))
    asked = [reach.of(one.till or 0, one.min_key, one.max_key, one.left) for one in found.files]

    def look(number: int) -> Look:
        return Look(names[number], found.till, count(context, *files[number], asked[number]))

    if len(files) == 1:
        return [look(0)]
    with ThreadPoolExecutor(LOOKS_AT_ONCE, thread_name_prefix="dormouse-looks") as threads:
        return list(threads.map(look, range(len(files))))


def count(
    context: TableContext, filename: str, byte_count: int | None, deletions: Sequence[Deletion]
) -> dict[int, int]:
    """The deletions that are of rows of a file, by number, and of how many each; all of its rows count."""
    from dormouse.query.looking import count_rows

    return count_rows(context, filename, byte_count, deletions) if deletions else {}
