"""The history of a table: its epochs, cuts, what it was at a moment, and what changed between two."""
