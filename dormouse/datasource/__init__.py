"""Spark's `format("dormouse")`: what it reads and writes of a table that options name."""
