"""What the history of a table costs, however long it is."""
