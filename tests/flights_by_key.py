"""A year of flights with one flight of each key, for tables whose months are corrected."""

from __future__ import annotations

from pathlib import Path

import duckdb

from dormouse.demo.datasets import Flights

KEYS = ["carrier", "flight", "time", "origin"]
PROPERTIES = {
    "split_threshold_rows": 50_000,
    "compaction_batch_files": 4,
    "size_ratio": 1,
    "gc_delay_seconds": 0,
}


def flights_in(folder: Path, columns: str = "*") -> duckdb.DuckDBPyConnection:
    """Returns a connection whose table `first` has the given columns of the first flight of each key."""
    db = duckdb.connect()
    Flights().prepare(db, folder, lambda _: None)
    one = f"row_number() over (partition by {', '.join(KEYS)} order by dep_time) = 1"
    db.execute(f"create table first as select {columns} from flights qualify {one}")
    return db
