"""SQL by DuckDB: the tables of an instance as views of one moment."""

import duckdb as duckdb  # imported first, so that the error for a missing extra names it
