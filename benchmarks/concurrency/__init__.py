"""Key look-ups by many clients while a table is written, compacted and collected."""
