"""The state store: tables, partitions, file references, commits and history, all in PostgreSQL."""
