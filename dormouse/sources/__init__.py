"""Readers of other people's data: CSV, JSON and Parquet files, URLs and frames."""
