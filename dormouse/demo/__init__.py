"""The whole pipeline on real data, with every answer checked against DuckDB on the raw data."""
