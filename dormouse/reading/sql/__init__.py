"""SQL by DuckDB. All tables of an instance are views, and a statement reads them as of one moment."""

import duckdb as duckdb  # imported first, so that the error for a missing extra names it
