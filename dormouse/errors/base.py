"""What all errors are."""

from __future__ import annotations

from typing import Self


class DormouseError(Exception):
    """The root of every error that Dormouse raises."""

    @classmethod
    def told(cls, message: str) -> Self:
        """One that another process met, of which nothing but the message is known."""
        error = cls._of_nothing()
        error.args = (message,)
        return error

    @classmethod
    def _of_nothing(cls) -> Self:
        return cls()
