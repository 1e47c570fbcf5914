"""The history of a table: its epochs, its cuts, its content at a moment, and changes between two moments."""
