"""Rounds of work on one table: ingest, compaction, splitting; their jobs, whole."""
