"""Nothing lost between the database and the objects: ownership, checks, backups."""
