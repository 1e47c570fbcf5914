"""The image of the query service."""
