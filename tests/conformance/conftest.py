"""One suite for every layout; at each isolation level what can depend on it (`at_each_isolation`)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dormouse.context import TableContext
from dormouse.files.layout import LAYOUTS
from dormouse.files.store import FileReferenceStore

ISOLATIONS = ["read committed", "serializable"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "isolation" in metafunc.fixturenames:
        every = metafunc.definition.get_closest_marker("at_each_isolation") is not None
        metafunc.parametrize("isolation", ISOLATIONS if every else ISOLATIONS[:1], indirect=True)


@pytest.fixture
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
