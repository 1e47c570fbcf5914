"""The suites that run with and without inlined files, and the tests that need objects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dormouse.reading import bundles
from dormouse.state.catalog import Catalog
from dormouse.writing import inlining as writing

INLINED_BYTES = 65_536
SUITES = {
    "test_changes",
    "test_changes_model",
    "test_changes_over_restores",
    "test_consumers",
    "test_deletes_model",
    "test_erase",
    "test_history_model",
    "test_keyed",
    "test_keyed_changes",
    "test_keyed_feed",
    "test_keyed_model",
    "test_query",
    "test_reshaping",
    "test_reshaping_model",
    "test_restores_model",
    "test_scaling",
    "test_time_travel",
}
"""The test modules whose tables have few rows, so that each of their ingests can be inlined."""


def also_inlined(metafunc: pytest.Metafunc) -> None:
    """Runs the tests of the suites twice: with objects, and with inlined files."""
    if metafunc.module.__name__.rpartition(".")[2] in SUITES and "inlining" not in metafunc.fixturenames:
        metafunc.fixturenames.append("inlining")
        metafunc.parametrize("inlining", [0, INLINED_BYTES], ids=["objects", "inlined"], indirect=True)


def _without_inlining(patch: pytest.MonkeyPatch) -> None:
    """Makes new tables of this process write objects, unless they are made with an `inline_bytes_max`."""
    create = Catalog.create

    def created(self: Catalog, name: str, schema: Any, properties: Any, *args: Any, **more: Any) -> Any:
        if "inline_bytes_max" not in properties.model_fields_set:
            properties = properties.model_copy(update={"inline_bytes_max": 0})
        return create(self, name, schema, properties, *args, **more)

    patch.setattr(Catalog, "create", created)


@pytest.fixture
def inlining(request: pytest.FixtureRequest) -> Iterator[None]:
    """Makes new tables inline small files or not, and lets any two inlined files be joined."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.param:
            _without_inlining(patch)
        patch.setattr(bundles, "FILES_MIN", 2)
        patch.setattr(writing, "JOINED_MIN", 2)
        yield


def _objects(request: pytest.FixtureRequest) -> Iterator[None]:
    """Makes new tables write objects in tests and modules with the mark `objects`."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("objects"):
            _without_inlining(patch)
        yield


objects_of_module = pytest.fixture(_objects, scope="module", autouse=True)
objects_of_test = pytest.fixture(_objects, autouse=True)
