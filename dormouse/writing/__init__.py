"""Writes to one table: ingests, deletes, and rounds of compaction, splits and merges."""
