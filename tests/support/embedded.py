"""The PostgreSQL server that Dormouse starts itself."""

from __future__ import annotations

from dormouse.embedded.postgres import EmbeddedPostgres

__all__ = [
    "EmbeddedPostgres",
]
