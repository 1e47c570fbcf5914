"""The reading of data to load (CSV, JSON and Parquet files, URLs, DataFrames), and the export of rows."""
