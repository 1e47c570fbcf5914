"""The facade: the instance, its tables, row tables and history, one class a file."""
