"""Payloads: JSON documents, which are hot in PostgreSQL and cold in the object store."""

from typing import TYPE_CHECKING, Any

from dormouse.payloads.keys import PayloadKey

if TYPE_CHECKING:
    from dormouse.payloads.store import PayloadStore

__all__ = ["PayloadKey", "PayloadStore"]


def __getattr__(name: str) -> Any:
    """Imports `PayloadStore` at its first use, because it needs packages that a client lacks."""
    if name != "PayloadStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dormouse.payloads.store import PayloadStore

    return PayloadStore
