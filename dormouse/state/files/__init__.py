"""The files of a table: file reference store, write attempts, compaction jobs, garbage collection."""
