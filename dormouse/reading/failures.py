"""What DataFusion complains of while it reads files, as our errors: one line, which names the file or sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dormouse.data.datafusion_session import panics_as_errors
from dormouse.data.transform import Transform
from dormouse.errors import DormouseError, InvalidQuery
from dormouse.reading.checked_files import check_bytes, check_there
from dormouse.reading.planner import Scan
from dormouse.state.context import TableContext

MEMORY_BYTES_MAX = 2 * 1024**3
_PREFIXES = (
    "DataFusion error: ",
    "Error during planning: ",
    "Schema error: ",
    "SQL error: ",
    "Arrow error: ",
    "Cast error: ",
    "Parser error: ",
)
_CAUSED_BY = "\ncaused by\n"


@contextmanager
def named_failures(context: TableContext, scans: Sequence[Scan], transform: Transform) -> Iterator[None]:
    """Turns what fails while these files are read into one line, which names the file or sum at fault."""
    try:
        with panics_as_errors():
            yield
    except DormouseError:
        raise
    except Exception as error:
        raise transform.overflow(str(error)) or _failure(context, scans, error) from error


def _one_line(error: BaseException) -> str:
    """The first line of what caused an error, without the names of DataFusion's layers."""
    cause = str(error).rpartition(_CAUSED_BY)[2]
    text = (cause.splitlines() or [type(error).__name__])[0]
    while prefix := next((p for p in _PREFIXES if text.startswith(p)), None):
        text = text.removeprefix(prefix)
    return text.strip()


def _failure(context: TableContext, scans: Sequence[Scan], error: Exception) -> DormouseError:
    text = _one_line(error)
    if "Resources exhausted" in text:
        return DormouseError(f"the query needs more than the {MEMORY_BYTES_MAX:,} bytes of memory it may use")
    try:
        check_there(context, scans)
        check_bytes(context, scans)
    except DormouseError as found:
        return found
    return InvalidQuery(f"the query of table {context.table.name!r} failed: {text}")
