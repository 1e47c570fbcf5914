"""One suite for every layout, at each isolation level."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dormouse.context import TableContext
from dormouse.files.layout import LAYOUTS
from dormouse.files.store import FileReferenceStore

ISOLATIONS = ["read committed", "serializable"]


@pytest.fixture(params=ISOLATIONS)
def isolation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def another_table(
    new_table: Callable[..., TableContext], layout: str, isolation: str
) -> Callable[[], TableContext]:
    """Makes tables of the layout and isolation level under test."""
    return lambda: new_table(layout=layout, isolation=isolation)


@pytest.fixture
def table(another_table: Callable[[], TableContext]) -> TableContext:
    return another_table()


@pytest.fixture
def store(table: TableContext) -> FileReferenceStore:
    return table.store
