"""What tells work to begin again with the table's newer schema; users never see it."""

from __future__ import annotations

from dormouse.errors.base import DormouseError


class SchemaMoved(DormouseError):
    """The table's columns, or its properties, are others than those that the work began with."""
