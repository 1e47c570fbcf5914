"""Payloads: JSON documents, hot in PostgreSQL, cold in the object store."""

from dormouse.payloads.keys import PayloadKey
from dormouse.payloads.store import PayloadStore

__all__ = ["PayloadKey", "PayloadStore"]
