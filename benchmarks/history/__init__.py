"""The benchmark of a table's history: the cost of operations on histories of different lengths."""
