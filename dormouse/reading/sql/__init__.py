"""SQL by DuckDB: the tables of an instance as views of one moment."""

import duckdb as duckdb  # first of all, so that it is what is said to be missing: its extra brings the others
