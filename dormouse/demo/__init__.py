"""The demo: the whole pipeline on real data, with each answer compared with DuckDB's on the raw data."""
