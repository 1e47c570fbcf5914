"""The statements of sqllogictest files in the formats of SQLite and DuckDB, with their loops unrolled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

LOOPS = ("loop", "foreach", "concurrentloop", "concurrentforeach")
OURS = "duckdb"
"""The name of our system in `onlyif` and `skipif`."""
KNOWN = (
    *("parquet", "json", "icu", "core_functions", "vector_size", "skip_reload", "no_alternative_verify"),
    *(
        "noforcestorage",
        "64bit",
        "no_extension_autoloading",
        "notmusl",
        "notwindows",
        "notmingw",
        "strinline",
    ),
)
"""The features that a file may require and that we have."""
_STOPPING = ("load", "restart", "unzip", "require-env", "reconnect", "include")


class LeftOut(Exception):
    """The reason why the rest of a file is not run."""


@dataclass(frozen=True)
class Record:
    """A statement of a file."""

    sql: str
    line: int


def records(text: str) -> Iterator[Record]:
    """Yields the statements of a file in order; raises `LeftOut` at a statement that cannot be run here."""
    yield from _records([*enumerate(text.splitlines(), 1)], {})


Lines = Sequence[tuple[int, str]]


def _records(lines: Lines, variables: Mapping[str, str]) -> Iterator[Record]:
    place = 0
    skipped = False
    while place < len(lines):
        number, line = lines[place]
        place += 1
        word, *rest = line.split() or [""]
        if word in ("statement", "query"):
            if any(one.startswith("con") for one in rest[1:]):
                raise LeftOut("needs several connections")
            end = _end(lines, place)
            if not skipped:
                sql = [text for _, text in lines[place:end]]
                yield Record(_filled(_before_results(sql), variables), number)
            place, skipped = end, False
        elif word in LOOPS:
            end = _end_of_loop(lines, place)
            for value in _values(word, [_filled(one, variables) for one in rest]):
                yield from _records(lines[place:end], {**variables, rest[0]: value})
            place = end + 1
        elif word in ("skipif", "onlyif"):
            skipped = skipped or (rest[0].split("=")[0] == OURS) == (word == "skipif")
        elif word == "halt":
            return
        elif word in _STOPPING or (word == "require" and rest[0] not in KNOWN):
            raise LeftOut(f"needs {word} {rest[0]}" if word == "require" else f"needs {word}")


def _end(lines: Lines, place: int) -> int:
    """Returns the number of the line at which the record at `place` ends."""
    while place < len(lines) and lines[place][1].strip():
        place += 1
    return place


def _before_results(sql: Sequence[str]) -> str:
    return "\n".join(sql[: sql.index("----")] if "----" in sql else sql)


def _end_of_loop(lines: Lines, place: int) -> int:
    depth = 1
    while depth:
        word = (lines[place][1].split() or [""])[0]
        depth += (word in LOOPS) - (word == "endloop")
        place += 1
    return place - 1


def _values(word: str, rest: Sequence[str]) -> Sequence[str]:
    if word.endswith("foreach"):
        if any(one.startswith("<") for one in rest):
            raise LeftOut("loops over what DuckDB's runner knows")
        return rest[1:]
    return [*map(str, range(int(rest[1]), int(rest[2])))]


def _filled(text: str, variables: Mapping[str, str]) -> str:
    for name, value in variables.items():
        text = text.replace(f"${{{name}}}", value)
    return text
