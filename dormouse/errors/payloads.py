"""What the payload store answers in place of a payload, and what its days refuse."""

from __future__ import annotations

from typing import Any

from dormouse.errors.base import DormouseError

__all__ = [
    "PayloadCorrupt", "PayloadDayBusy", "PayloadExpired", "PayloadNotFound", "PayloadRoundFailed",
    "PayloadUnavailable", "PayloadsDiffer",
]  # fmt: skip


class PayloadNotFound(DormouseError, LookupError):
    """There is no payload of this key."""


class PayloadExpired(DormouseError):
    """The payload's day is past its retention, and was dropped."""


class PayloadCorrupt(DormouseError):
    """What is kept of the payload is not what was written: its checksum, length or owner differ."""


class PayloadUnavailable(DormouseError):
    """The object store does not give the payload now; try again."""


class PayloadDayBusy(DormouseError):
    """Another worker has the day, or others use it all the time; nothing was lost."""


class PayloadsDiffer(DormouseError):
    """A day's copy is not what the day has, and did not take its place; `keys` are the first that differ."""

    keys: tuple[Any, ...] = ()

    def __init__(self, message: str = "", keys: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.keys = keys

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.keys)


class PayloadRoundFailed(DormouseError):
    """Something that was due of payloads failed; the rest was done."""
