"""PostgreSQL as a mechanism: connections, transactions, named queries and migrations."""

from dormouse.postgres.connection import ConnectionSupplier, Supplier
from dormouse.postgres.migrate import MIGRATIONS, Migration, migrate
from dormouse.postgres.queries import Queries, Query, load
from dormouse.postgres.session import Isolation
from dormouse.postgres.transaction import (
    RETRIES,
    Retries,
    rows_of,
    run_lookup,
    run_lookups,
    run_statement,
    run_transaction,
)

__all__ = [
    "MIGRATIONS",
    "RETRIES",
    "ConnectionSupplier",
    "Isolation",
    "Migration",
    "Queries",
    "Query",
    "Retries",
    "Supplier",
    "load",
    "migrate",
    "rows_of",
    "run_lookup",
    "run_lookups",
    "run_statement",
    "run_transaction",
]
