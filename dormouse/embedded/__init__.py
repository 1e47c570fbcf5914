"""The embedded instance: a folder, its PostgreSQL, its server."""
