"""Queries: what to read of a table (planner), and its rows in key order (executor)."""
