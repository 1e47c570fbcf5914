"""The PostgreSQL that Dormouse starts by itself."""

from __future__ import annotations

from dormouse.embedded.postgres import EmbeddedPostgres

__all__ = [
    "EmbeddedPostgres",
]
