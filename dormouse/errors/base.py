"""What all errors are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Generic, Self, TypeVar, overload

T = TypeVar("T")


class Told(Generic[T]):
    """A field of an error: what its `data` has by this name, None where that is not known.

    `of` makes the value of what JSON has for it.
    """

    def __init__(self, of: Callable[[Any], T] | None = None) -> None:
        self._of = of

    def __set_name__(self, owner: type[DormouseError], name: str) -> None:
        self._name = name

    @overload
    def __get__(self, error: None, owner: type[DormouseError]) -> Self: ...

    @overload
    def __get__(self, error: DormouseError, owner: type[DormouseError]) -> T | None: ...

    def __get__(self, error: DormouseError | None, owner: type[DormouseError]) -> Self | T | None:
        if error is None:
            return self
        value = error.data.get(self._name)
        return value if value is None or self._of is None else self._of(value)


class DormouseError(Exception):
    """The root of every error that Dormouse raises.

    What its message names, a program reads of its fields: of those of its class, which `fields` lists. They
    are the same where another process met the error, and are members of the service's problem documents.
    """

    data: Mapping[str, Any] = MappingProxyType({})
    """The fields that are known, as JSON."""

    def __init__(self, *said: object, **data: Any) -> None:
        super().__init__(*said)
        if odd := data.keys() - set(self.fields()):
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(odd))}")
        if known := {name: value for name, value in data.items() if value is not None}:
            self.data = known

    @classmethod
    def fields(cls) -> list[str]:
        """Returns the names of the fields that errors of the class may have."""
        own = (vars(one).items() for one in reversed(cls.__mro__))
        return [name for members in own for name, member in members if isinstance(member, Told)]

    @classmethod
    def told(cls, message: str, data: Mapping[str, Any] = MappingProxyType({})) -> Self:
        """Returns an error that another process met, of which its message and its data are known."""
        error = cls._of_nothing()
        error.args, error.data = (message,), dict(data)
        return error

    @classmethod
    def _of_nothing(cls) -> Self:
        return cls.__new__(cls)
