"""The benchmark of a table's history: the cost of its operations by its length."""
