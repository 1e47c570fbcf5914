"""SQL by DuckDB: the tables of an instance as views of one moment."""
