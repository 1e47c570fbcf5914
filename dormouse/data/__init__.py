"""The data path: Arrow schemas, validation, leaf look-up, Parquet files, sketches and the sorted merge."""
