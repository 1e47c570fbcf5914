"""What DuckDB complains of, as our errors: one line, and what is to be done."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import duckdb
import pyarrow as pa

from dormouse.errors import DormouseError, EngineFailed, InvalidQuery, QueryTooLarge

INTERRUPTED = "the query was interrupted"
_POSITION = re.compile(r"\n*^LINE \d+:", re.MULTILINE)
_KIND = re.compile(r"^(?:TransactionContext Error: )?(?:(\w[\w ]*) Error: )?")
_MAY_BE_FILES = {"IO", "HTTP", "Invalid Input", "Serialization"}
_SETTING = re.compile(r'\n?Use "?SET [^\n]*')
"""Advice that no statement can follow: settings are locked."""
_DISK_FULL = ("No space left on device", "max_temp_directory_size")


class ReadFailed(InvalidQuery):
    """What DuckDB complained of while it read: a file may be the cause, or what was asked of its values."""


@contextmanager
def named_failures() -> Iterator[None]:
    """Turns DuckDB's errors into ours, also those that reach us by way of Arrow's streams."""
    try:
        yield
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        raise failure(error) from error


def failure(error: Exception, *, reads: bool = True) -> DormouseError:
    """Our error for one of DuckDB's, which read files or did not."""
    line, found = first_line(error), _KIND.match(str(error))
    kind = found[1] if found else None
    if kind == "INTERRUPT":
        return DormouseError(INTERRUPTED)
    if any(part in str(error) for part in _DISK_FULL):
        needed = line.partition("; This limit")[0]
        return QueryTooLarge(
            f"what the statement had to put aside on disk did not fit there, ask for less at once: {needed}"
        )
    if kind == "Out of Memory":
        # its advice is of settings, which are locked
        needed = line.partition("; Possible solutions")[0]
        return QueryTooLarge(
            f"the statement needs more memory than it may use, ask for less at once: {needed}"
        )
    if kind in {"INTERNAL", "FATAL"}:
        return EngineFailed(f"DuckDB failed at this statement, write it in another way: {line}")
    return ReadFailed(line) if reads and kind in _MAY_BE_FILES else InvalidQuery(line)


def first_line(error: BaseException) -> str:
    """DuckDB's complaint with its hints in one line, without its kind and the statement that it repeats."""
    text = _SETTING.sub("", _POSITION.split(str(error), maxsplit=1)[0])
    return "; ".join(line.strip() for line in _KIND.sub("", text, count=1).splitlines() if line.strip())
