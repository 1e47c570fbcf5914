"""The partition tree of a table, and its history."""
