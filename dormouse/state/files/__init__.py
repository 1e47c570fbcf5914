"""Which files hold a table: the file reference store, write attempts, compaction jobs, garbage collection."""
