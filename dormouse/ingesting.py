"""Where an ingest runs: small data in this process, large data on Spark."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dormouse.context import TableContext
from dormouse.engine import check_engine, choose_engine

if TYPE_CHECKING:
    from dormouse.data.ingest import IngestReport


def ingest(
    context: TableContext,
    data: Any,
    *,
    ingest_id: str | None,
    engine: str,
    progress: Callable[[int, int | None], None] | None,
) -> IngestReport:
    """Adds rows to a table, see `Table.ingest`."""
    check_engine(engine)
    if _is_dataframe(data) or choose_engine(engine, lambda: _bytes_on_disk(data)) == "spark":
        from dormouse.spark.ingest import ingest_with_spark

        return ingest_with_spark(context, data, ingest_id=ingest_id, progress=progress)
    from dormouse.data.ingest import ingest as ingest_in_process

    return ingest_in_process(context, data, ingest_id=ingest_id, progress=progress)


def _bytes_on_disk(data: Any) -> int:
    """The size of files given by path; 0 for data in memory, and for paths that are not there."""
    if isinstance(data, str | os.PathLike):
        path = Path(data)
        files = path.rglob("*") if path.is_dir() else [path]
        return sum(file.stat().st_size for file in files if file.is_file())
    return sum(map(_bytes_on_disk, data)) if isinstance(data, list | tuple) else 0


def _is_dataframe(data: Any) -> bool:
    """Without importing pyspark, which whoever holds a DataFrame has done."""
    return any(kind.__module__.startswith("pyspark.sql") for kind in type(data).__mro__)
