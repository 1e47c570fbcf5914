"""Row tables: tables whose rows have ids and versions, and are edited by many."""
