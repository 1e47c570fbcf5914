"""Spark's `format("dormouse")`: reads and writes of a table that is named by options."""
