"""The benchmark of queries by key and by range of keys, compared with other engines."""
