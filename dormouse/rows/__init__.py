"""Row tables: tables whose rows have ids and versions, for edits by many users."""
