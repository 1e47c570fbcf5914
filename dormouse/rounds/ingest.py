"""Where an ingest runs: small data in this process, large data on Spark."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dormouse.context import TableContext
from dormouse.rounds.engine import check_engine, choose_engine
from dormouse.rounds.ingest_commit import IngestReport
from dormouse.rounds.ingest_job import ingest as ingest_in_process


def ingest(
    context: TableContext,
    data: Any,
    *,
    ingest_id: str | None,
    engine: str,
    progress: Callable[[int, int | None], None] | None,
    on_spark: Callable[..., IngestReport] | None = None,
) -> IngestReport:
    """Adds rows to a table, see `Table.ingest`; `on_spark` is an ingest that distributes the work."""
    check_engine(engine)
    if _is_dataframe(data):
        engine = "spark"
    add = choose_engine(engine, lambda: _bytes_on_disk(data), ingest_in_process, on_spark)
    return add(context, data, ingest_id=ingest_id, progress=progress)


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
