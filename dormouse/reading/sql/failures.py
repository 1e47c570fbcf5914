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
_CARET = re.compile(r"^LINE (\d+): (.*)\n( *)\^", re.MULTILINE)
_KIND = re.compile(r"^(?:TransactionContext Error: )?(?:(\w[\w ]*) Error: )?")
_MAY_BE_FILES = {"IO", "HTTP", "Invalid Input", "Serialization", "Binder", None}
"""Kinds of what it complains of; of a page that ends too soon it tells none."""
_SETTING = re.compile(r'\n?Use "?SET [^\n]*')
"""Advice that no statement can follow: settings are locked."""
_DEVIATION = re.compile(r"^(STDDEV|VAR)\w* is out of range")
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
    if _DEVIATION.search(line):
        return InvalidQuery(
            f"{line.rstrip('!')}: values are infinite, or too large to be squared; leave them out by "
            "WHERE isfinite(x), or the column: SUMMARIZE SELECT ... FROM ..."
        )
    if kind in {"INTERNAL", "FATAL"}:
        return EngineFailed(f"DuckDB failed at this statement, write it in another way: {line}")
    return ReadFailed(line) if reads and kind in _MAY_BE_FILES else InvalidQuery(line)


def syntax_error(error: duckdb.Error, statement: str, hint: str | None = None) -> DormouseError:
    """Why the statement cannot be read, where, and what to write instead."""
    complaint = f"{first_line(error)}{_place(str(error), statement)}"
    return InvalidQuery(f"{complaint}; {hint}" if hint else complaint)


def _place(complaint: str, statement: str) -> str:
    """The line and column, of what DuckDB shows of the line with a caret below."""
    found = _CARET.search(complaint)
    if found is None:
        return ""
    number, shown, indent = found.groups()
    line, part = statement.split("\n")[int(number) - 1], shown.removeprefix("...").removesuffix("...")
    if not line.isascii() or part not in line:  # its caret stands elsewhere then
        return f" (line {number})"
    cut = len(f"LINE {number}: ") + len("...") * shown.startswith("...")
    return f" (line {number}, column {line.index(part) + len(indent) - cut + 1})"


def first_line(error: BaseException) -> str:
    """DuckDB's complaint with its hints in one line, without its kind and the statement that it repeats."""
    text = _SETTING.sub("", _POSITION.split(str(error), maxsplit=1)[0])
    return "; ".join(line.strip() for line in _KIND.sub("", text, count=1).splitlines() if line.strip())
