"""A deployed instance: what it does on a schedule, what it costs, and how it is put to sleep and woken."""
