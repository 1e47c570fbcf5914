"""What a history refuses, as it does not reach back so far, or another reader was faster."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from dormouse.errors.base import DormouseError, Told

__all__ = ["ConsumerExpired", "ConsumerOvertaken", "CutExpired", "EpochNotFound"]


class EpochNotFound(DormouseError, LookupError):
    """The table has no such epoch, or its history does not reach back to it any more."""


class CutExpired(DormouseError):
    """The history does not reach back to a moment any more: `oldest` is the oldest that can be served."""

    table = Told[str]()
    oldest = Told(datetime.fromisoformat)

    def __init__(self, message: str = "", oldest: datetime | None = None, **data: Any) -> None:
        super().__init__(message, oldest=None if oldest is None else oldest.isoformat(), **data)


class ConsumerExpired(CutExpired):
    """A consumer did not acknowledge for so long that its files were not kept."""

    consumer = Told[str]()


class ConsumerOvertaken(DormouseError):
    """Another reader of the consumer has acknowledged what this one read."""

    table = Told[str]()
    consumer = Told[str]()
