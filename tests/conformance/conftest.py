"""Fixtures that run tests on every layout, and tests marked `at_each_isolation` at every isolation level."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.databases import empty_table
from tests.support.objects import ObjectStore, open_store
from tests.support.state import LAYOUTS, FileReferenceStore, TableContext, TreeCache

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


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> ObjectStore:
    """Returns a store for the few tests that write objects. Each of them uses a table of its own."""
    return open_store(tmp_path_factory.mktemp("objects"))


@pytest.fixture(scope="session")
def free_tables() -> dict[tuple[str, str], list[TableContext]]:
    """Returns a list of unused tables for each layout and isolation level.

    Making a table takes as long as most tests, so tables without changes are used again.
    """
    return defaultdict(list)


@pytest.fixture
def another_table(
    new_table_in: Callable[..., TableContext],
    objects: ObjectStore,
    free_tables: dict[tuple[str, str], list[TableContext]],
    layout: str,
    isolation: str,
) -> Iterator[Callable[[], TableContext]]:
    """Returns a function that makes tables of the layout and isolation level under test."""
    free, lent = free_tables[layout, isolation], []

    def lend() -> TableContext:
        # a copy has no cached tree from the table's earlier use
        lent.append(free.pop() if free else new_table_in(objects, layout=layout, isolation=isolation))
        return replace(lent[-1], trees=TreeCache())

    yield lend
    free += filter(empty_table, lent)


@pytest.fixture
def table(another_table: Callable[[], TableContext]) -> TableContext:
    return another_table()


@pytest.fixture
def store(table: TableContext) -> FileReferenceStore:
    return table.store
