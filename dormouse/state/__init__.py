"""The state store: tables, partitions, file references, commits and history, all kept in PostgreSQL."""
