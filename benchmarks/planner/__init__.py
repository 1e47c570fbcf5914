"""The benchmark of the query planner: the time to plan, and the number of stale plans."""
