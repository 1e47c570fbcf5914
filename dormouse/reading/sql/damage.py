"""The checks of files that follow an error of DuckDB."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from urllib.parse import unquote

from dormouse.errors import ObjectStoreError
from dormouse.reading.checked_files import check_bytes, check_columns, check_local
from dormouse.reading.planner import Scan
from dormouse.reading.sql.results import ReadFailed
from dormouse.state.context import TableContext

COLUMNS_CHECKED_MAX, BYTES_CHECKED_MAX = 1_000, 1 << 28
"""The most files whose columns are checked, and the most bytes whose digests are checked.

These checks follow an error of DuckDB that names no file.
"""


def check_after(context: TableContext, scans: Sequence[Scan], error: ReadFailed) -> None:
    """Raises `FileGone` or an error for a damaged file, after DuckDB failed to read some of these files.

    It checks the files that DuckDB names. If there are none, it checks the first files.
    """
    said = unquote(str(error))
    if named := [scan for scan in scans if scan.filename in said]:
        check_bytes(context, named)
        raise ObjectStoreError(
            f"file {named[0].filename!r} of table {context.table.name!r} cannot be read: {error}"
        ) from error
    check_local(scans, context.table.name, said)
    ends = accumulate(scan.byte_count or 0 for scan in scans[:COLUMNS_CHECKED_MAX])
    check_bytes(context, [scan for scan, end in zip(scans, ends, strict=False) if end <= BYTES_CHECKED_MAX])
    for scan in scans[:COLUMNS_CHECKED_MAX]:
        check_columns(context, scan)
