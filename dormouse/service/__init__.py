"""The query service: an HTTP server for programs that lack Python or cannot reach the database."""
