"""Queries: what to read of a table (planner), in key order (executor), or as SQL (statements)."""

from dormouse.query.executor import explain, query
from dormouse.query.planner import PlanSummary
from dormouse.query.statements import explain_sql, sql

__all__ = ["PlanSummary", "explain", "explain_sql", "query", "sql"]
