"""What a check that fails raises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from dormouse.errors.base import DormouseError


class CheckFailed(DormouseError):
    """A check found problems; `problems` has them."""

    def __init__(self, problems: Sequence[Any], consequence: str = "") -> None:
        self.problems = tuple(problems)
        self.consequence = consequence
        first = self.problems[0]
        where = (("table", first.table), ("partition", first.partition_id), ("file", first.filename))
        named = ", ".join(f"{what} {name!r}" for what, name in where if name is not None)
        total = len(self.problems)
        super().__init__(
            f"{total:,} problem{'' if total == 1 else 's'}; the first: {first.kind}"
            f"{f' of {named}' if named else ''}: {first.detail}{f'; {consequence}' if consequence else ''}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems, self.consequence)

    @classmethod
    def _of_nothing(cls) -> Self:
        error = cls.__new__(cls)
        error.problems, error.consequence = (), ""
        return error
