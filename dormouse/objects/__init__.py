"""The object store: a folder, or S3; objects appear whole and are never overwritten."""

from dormouse.objects.store import ObjectStore, open_store

__all__ = ["ObjectStore", "open_store"]
