"""What the demo did, and what tells a person of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from dormouse.api.table import Table


@dataclass(frozen=True, slots=True)
class Step:
    """The table after a step. Rows of divided files are estimates until they are compacted."""

    step: str
    rows: int
    rows_exact: bool
    partitions: int
    leaves: int
    files: int
    references: int
    unreferenced_files: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """A question's answer, as it compares with DuckDB's."""

    question: str
    text: str
    rows: int
    seconds: float
    files_read: int
    files_total: int
    matches_duckdb: bool
    difference: str | None = None


@dataclass(frozen=True, slots=True)
class DemoReport:
    """All that a demo did."""

    data: str
    rows: int
    folder: str
    steps: tuple[Step, ...]
    answers: tuple[Answer, ...]
    seconds: float

    @property
    def all_match(self) -> bool:
        return all(answer.matches_duckdb for answer in self.answers)


class Screen(Protocol):
    """What a person looks at while the demo runs."""

    def say(self, text: str = "") -> None: ...

    def working(self, text: str) -> AbstractContextManager[Callable[[str], None]]: ...

    def steps_begin(self) -> None: ...

    def step(self, step: Step) -> None: ...

    def tree(self, table: Table) -> None: ...

    def answers(self, answers: list[Answer]) -> None: ...
