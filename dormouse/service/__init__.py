"""The query service: HTTP over an instance, for programs without Python, or without a way to the database."""
