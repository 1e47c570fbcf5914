"""What all errors are."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self


class DormouseError(Exception):
    """The root of every error that Dormouse raises."""

    data: Mapping[str, Any] = MappingProxyType({})
    """What a program reads of the error beside its message, as JSON."""

    @classmethod
    def told(cls, message: str, data: Mapping[str, Any] = MappingProxyType({})) -> Self:
        """Returns an error that another process met, of which its message and its data are known."""
        error = cls._of_nothing()
        error.args, error.data = (message,), data
        return error

    @classmethod
    def _of_nothing(cls) -> Self:
        return cls()
