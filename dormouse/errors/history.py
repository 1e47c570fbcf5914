"""What a history refuses, as it does not reach back so far, or another reader was faster."""

from __future__ import annotations

from datetime import datetime

from dormouse.errors.base import DormouseError

__all__ = ["ConsumerExpired", "ConsumerOvertaken", "CutExpired", "EpochNotFound"]


class EpochNotFound(DormouseError, LookupError):
    """The table has no such epoch, or its history does not reach back to it any more."""


class CutExpired(DormouseError):
    """The history does not reach back to a moment any more: `oldest` is the oldest that can be served."""

    def __init__(self, message: str = "", oldest: datetime | None = None) -> None:
        super().__init__(message)
        self.oldest = oldest


class ConsumerExpired(CutExpired):
    """A consumer did not acknowledge for so long that its files were not kept."""


class ConsumerOvertaken(DormouseError):
    """Another reader of the consumer has acknowledged what this one read."""
