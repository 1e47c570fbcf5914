"""How long does it take to plan a query, and is the plan ever stale?"""
