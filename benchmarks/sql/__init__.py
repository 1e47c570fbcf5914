"""The benchmark of SQL, compared with DuckDB on files of the same rows."""
